"""Batch-invariant calls: the bits of a sequence, however its prompt is cut, its pieces are divided among programs, and whatever is
beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import Batch
from quire.kernels.triton.host import launcher, shared, tile_selection
from quire.kernels.triton.host.tuning import tuning_for
from support.launched import bits, card, check, platform_at, run
from support.scenario import Scenario, build

PIECE = 64
"""Fewer keys than outside of tests, so that short sequences have several pieces."""
BYTES: dict[str, Any] = {"format": "e4m3fn", "q_dtype": "bf16"}
FEATURES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"format": "bf16", "q_dtype": "bf16"},
    "fp16": {"format": "fp16", "q_dtype": "fp16", "group": 1},
    "e4m3fn": BYTES,
    "token-scales": {"format": "int8", "scales": "token", "q_dtype": "bf16"},
    "group-of-5": {"group": 5, "kv_heads": 1},
    "window": {"window": 75},
    "window-of-one-tile": {"window": 9, "group": 4},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": True},
    "together": {**BYTES, "window": 90, "sinks": True, "softcap": 3.0, "alibi": True},
    "shard": {"shard": (1, 2, 8), "window": 75},
    "spans": {"spans": "any"},
}
FEW_PROGRAMS = ("fp32", "window", "together", "spans")


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_selection, "PIECE", PIECE)


def alone(s: Scenario, sequence: int, begin: int, end: int) -> Scenario:
    """New tokens [begin, end) of a sequence, as a call of their own: those before are in the cache, those after not yet."""
    first, stop = s.batch.q_starts[sequence : sequence + 2].tolist()
    tokens = slice(first + begin, first + end)
    kv_lens = s.batch.kv_lens[sequence : sequence + 1] - (stop - first - end)
    starts = torch.tensor([0, end - begin], dtype=torch.int32, device=s.q.device)
    spans = None if s.batch.spans is None else s.batch.spans[tokens]
    batch = Batch(s.batch.page_table[sequence : sequence + 1], kv_lens, starts, shard=s.batch.shard, spans=spans)
    return replace(s, q=s.q[tokens], batch=batch, live=end - begin)


def same(one: tuple[torch.Tensor, Any], other: tuple[torch.Tensor, Any], tokens: slice) -> bool:
    return all(torch.equal(bits(a), bits(b[tokens])) for a, b in zip(one, other))


@pytest.mark.parametrize("name", FEATURES)
def test_a_prompt_in_chunks(name: str, device: str) -> None:
    """Of 40 tokens after a context, which are a long sequence: at once, by 16, and one by one where a piece ends
    and another begins. Their keys are divided among few programs, among many, and not at all."""
    s = build(81, [1, 40, 3], [70, 200, 150], batch_invariant=True, device=device, **FEATURES[name])
    whole = run("mixed", s, platform=card(device, 3))
    check("mixed", s, *whole)
    cuts = [(0, 16), (16, 32), (32, 40), (0, 1), (31, 32), (32, 33)]
    for nth, (begin, end) in enumerate(cuts):
        if name != "spans" or end == begin + 1:  # spans may be after the chunk
            part = run("decode", alone(s, 1, begin, end), platform=card(device, (1, 7, 20, 5)[nth % 4]))
            assert same(part, whole, slice(1 + begin, 1 + end)), (begin, end)


@pytest.mark.parametrize("memory", [None, 0], ids=["divided", "not divided"])
@pytest.mark.parametrize("name", FEW_PROGRAMS)
def test_any_number_of_programs(name: str, memory: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without memory for partial results. Sequences of one to five pieces, short and long."""
    s = build(82, [1, 3, 40, 0, 1, 2], [300, 64, 90, 20, 65, 260], batch_invariant=True, device=device, **FEATURES[name])
    first = run("mixed", s, platform=card(device, 1))
    check("mixed", s, *first)
    if memory is not None:
        monkeypatch.setattr(launcher, "MOST_PARTIALS", memory)
    for multiprocessors in (2, 5, 20):
        assert same(run("mixed", s, platform=card(device, multiprocessors)), first, slice(None)), multiprocessors


@pytest.mark.parametrize("select", ["positions", "columns"])
def test_a_selection(select: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are of selected keys: fewer per piece, so that the few that are selected are in several."""
    monkeypatch.setattr(tile_selection, "PIECE", 16)
    s = build(83, [1, 3], [150, 190], select=select, page_size=16, batch_invariant=True, device=device)
    tuning = tuning_for("decode", platform_at(device).arch, 16, 4, 4)._replace(keys=16)
    first = run("mixed", s, platform=card(device, 1), tuning=tuning)
    check("mixed", s, *first)
    assert same(run("mixed", s, platform=card(device, 30), tuning=tuning), first, slice(None))


def test_the_forms_agree(device: str) -> None:
    """New tokens from the cache, or beside it: short and long."""
    case: dict[str, Any] = {"format": "bf16", "q_dtype": "bf16", "batch_invariant": True, "device": device}
    full, context = (build(84, [1, 40], [150, 170], form=form, **case) for form in ("full", "context"))
    assert same(run("mixed", context, platform=card(device, 9)), run("mixed", full, platform=card(device, 2)), slice(None))
    check("mixed", context, *run("mixed", context))


@pytest.mark.parametrize("missing", [0, 2, 5])
def test_a_missing_page_of_one_piece(missing: int, device: str) -> None:
    """All of the sequence is NaN, also where one program found the page missing and others computed other pieces."""
    s = build(85, [1, 1], [200, 100], batch_invariant=True, device=device)
    good, _ = run("mixed", s, platform=card(device, 20))
    s.batch.page_table[0, missing] = -1
    out, lse = run("mixed", s, platform=card(device, 20))
    assert lse is not None
    first_is_nan(out, lse, good)


def test_a_short_table(device: str) -> None:
    s = build(85, [1, 1], [200, 100], batch_invariant=True, device=device)
    good, _ = run("mixed", s, platform=card(device, 20))
    s.batch.page_table = s.batch.page_table[:, :8].contiguous()
    out, lse = run("mixed", s, platform=card(device, 20))
    assert lse is not None
    first_is_nan(out, lse, good)


def first_is_nan(out: torch.Tensor, lse: torch.Tensor, good: torch.Tensor) -> None:
    assert out[0].isnan().all() and lse[0].isnan().all() and torch.equal(bits(out[1]), bits(good[1]))


FORKS: list[tuple[tuple[int, ...], int, int]] = [((3, 0, 1, 4, 5), 0, 17), ((0, 1), 17, 25), ((4, 3), 17, 26), ((4, 3), 26, 27)]
"""Prefixes that end before, at and after the end of a piece of 64 keys, with pages of 8. Sequence 2 shares nothing."""
SHARING: dict[str, dict[str, Any]] = {
    "e4m3fn": BYTES,
    "softcap-alibi-sinks": {"softcap": 3.0, "alibi": True, "sinks": True},
    "context": {"form": "context", "group": 5},
}


@pytest.mark.parametrize("name", SHARING)
def test_prefixes_that_are_read_once_change_no_bit(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the kernel without them: each sequence's pieces are the same, and are merged in the same order, whether its own are
    divided among programs or not. A sequence longer than the hint is read by itself."""
    case: dict[str, Any] = {"page_size": 8, "kv_heads": 1, "padding": 2, "prefixes": FORKS, "batch_invariant": True}
    s = build(86, [1, 2, 3, 1, 3, 1], [300, 290, 70, 218, 333, 137], device=device, **case, **SHARING[name])
    plain = run("mixed", s, platform=card(device, 3))
    check("mixed", s, *plain)
    for programs, hint in ((1, None), (20, None), (5, 2)):
        s.batch.max_q_len = hint
        assert same(run("shared", s, platform=card(device, programs)), plain, slice(None)), (programs, hint)
    monkeypatch.setattr(shared, "MOST_SHARED", 0)
    assert same(run("shared", s, platform=card(device, 5)), plain, slice(None)), "no memory for parts: nothing is shared"


def test_a_wrong_page_of_a_prefix_in_a_batch_invariant_call(device: str) -> None:
    """Of a whole piece, where pages are compared."""
    case: dict[str, Any] = {"page_size": 8, "prefixes": [((0, 1), 0, 17)], "batch_invariant": True, "device": device}
    s = build(87, [1, 1], [300, 290], **case)
    good, _ = run("shared", s)
    s.batch.page_table[1, 5] = s.batch.page_table[1, 20]
    out, lse = run("shared", s)
    assert lse is not None and out[1].isnan().all() and lse[1].isnan().all() and torch.equal(bits(out[0]), bits(good[0]))
    s.batch.page_table[:, 5] = -1
    out, _ = run("shared", s)
    assert out.isnan().all()
