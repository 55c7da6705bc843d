"""Shared prefixes: trees of prefixes with the features, against the reference; wrong descriptions; and parts of a prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import Prefixes
from quire.kernels.triton.host import shared
from support.launched import attend, card, check, run
from support.scenario import Scenario, build

TREE = [((3, 0, 1, 5, 6), 0, 3), ((0, 3, 1), 3, 8), ((5, 6), 3, 4), ((1, 3), 8, 9)]
"""Of depth 3; sequences 2 and 4 share nothing, and neighbours in a prefix are not neighbours in the batch."""
LENS: dict[str, Any] = {
    "q_lens": [1, 2, 3, 5, 0, 1, 3], "kv_lens": [70, 80, 30, 90, 7, 40, 36], "page_size": 8, "padding": 2, "prefixes": TREE,
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi-softcap": {"alibi": True, "softcap": 3.0},
    "sinks": {"sinks": True, "index": (torch.int64, torch.int32, torch.int32)},
    "non-causal": {"causal": "mixed"},
    "int8-tokens": {"format": "int8", "scales": "token", "layout": "vllm_x"},
    "fp8-heads": {"format": "e4m3fn", "scales": "head", "q_dtype": "bf16"},
    "context": {"form": "context", "format": "int8", "scales": "head"},
    "group": {"group": 20},
    "large group": {"group": 40},
    "negative": {"scale": -0.3, "kv_heads": 1, "head_dim": 24},
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, device: str) -> None:
    attend("shared", device, **LENS, **FEATURES[name])


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2])
def test_parts(programs: int, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes in several parts that begin within a tile or not; sequences with more new tokens than the hint says."""
    monkeypatch.setattr(shared, "LEAST_PART", 32)
    s = build(3, **LENS, device=device)
    s.batch.max_q_len = tokens
    out, lse = run("shared", s, platform=card(device, programs))
    check("shared", s, out, lse)


def test_keys_of_their_own_that_are_split(device: str) -> None:
    case: dict[str, Any] = {"q_lens": [1, 1], "kv_lens": [300, 20], "kv_heads": 1, "page_size": 4}
    attend("shared", device, how={"platform": card(device, 3)}, prefixes=[((0, 1), 0, 4)], **case)


def without(s: Scenario, seq: int) -> torch.Tensor:
    """The rows of the other sequences."""
    starts = s.batch.q_starts.tolist()
    rows = torch.ones(s.live, dtype=torch.bool)
    rows[starts[seq] : starts[seq + 1]] = False
    return rows


def test_other_pages_give_nan(device: str) -> None:
    """A sequence that does not have the pages of its prefix, and a page that does not exist."""
    s = build(2, **LENS, device=device)
    s.batch.max_q_len = 5  # so that the sequences of a prefix are in one tile
    good, _ = run("shared", s)
    other = s.batch.page_table[3, 4].clone()
    s.batch.page_table[1, 4] = s.batch.page_table[2, 0]
    out, lse = run("shared", s)
    rows = without(s, 1)
    assert lse is not None and out[: s.live][~rows].isnan().all() and lse[: s.live][~rows].isnan().all()
    assert torch.equal(out[: s.live][rows], good[: s.live][rows])
    s.batch.page_table[1, 4] = other
    for bad in (-1, s.cache.pages):
        s.batch.page_table[[0, 1, 3], 5] = bad
        out, lse = run("shared", s)
        rows = without(s, 0) & without(s, 1) & without(s, 3)
        assert out[: s.live][~rows].isnan().all() and torch.equal(out[: s.live][rows], good[: s.live][rows])


def test_new_tokens_that_are_shared_give_nan(device: str) -> None:
    """A sequence that was shortened since."""
    s = build(2, **LENS, device=device)
    good, _ = run("shared", s)
    s.batch.kv_lens[1] = 8 * 9 + 1  # two new tokens, of which one is in its last prefix
    out, _ = run("shared", s)
    rows = without(s, 1)
    assert out[: s.live][~rows].isnan().all() and torch.equal(out[: s.live][rows], good[: s.live][rows])


def test_buffers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are larger than the prefixes, and prefixes for whose parts there is no memory."""
    s = build(2, **LENS, device=device)
    assert s.batch.prefixes is not None
    buffers = Prefixes.allocate(seqs=7, prefixes=9, members=30, pages=20, levels=4, device=device)
    s.batch.prefixes = buffers.fill(s.batch.prefixes)
    out, lse = run("shared", s)
    check("shared", s, out, lse)
    # Memory for four parts, of 32 keys: the prefix of level 2 that begins with key 64 has part 2 + 2.
    monkeypatch.setattr(shared.SharedLauncher, "divide", lambda *_: shared.Division(32, 4))
    out, _ = run("shared", s)
    rows = without(s, 1) & without(s, 3)
    assert out[: s.live][~rows].isnan().all() and not out[: s.live][rows].isnan().any()
