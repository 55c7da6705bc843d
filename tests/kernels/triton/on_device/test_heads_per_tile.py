"""Several key heads in one tile: each query sees its own head's keys, whatever the others hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.kernels.triton.host.tuning import tuning_for
from quire.problem import Extent
from support.launched import card, check, prepared, run
from support.scenario import Scenario, build

LENS: dict[str, Any] = {"q_lens": [1] * 6, "kv_lens": [5, 70, 33, 1, 130, 16]}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "16 bits": {"q_dtype": "bf16", "format": "bf16", "head_dim": 64},
    "window": {"window": 20},
    "window to both sides": {"window": (30, 3), "causal": "mixed"},
    "alibi": {"alibi": True, "window": 40},
    "softcap and sinks": {"softcap": 5.0, "sinks": True},
    "few tokens": {"q_lens": [1, 2, 0, 1, 2, 1]},
    "scales of heads": {"format": "e4m3fn", "scales": "head", "q_dtype": "bf16"},
    "scales of heads, fp16": {"format": "int8", "scales": "head", "q_dtype": "fp16"},
    "scales of tokens": {"format": "int8", "scales": "token", "q_dtype": "fp16", "page_size": 8},
    "packed": {"layout": "vllm_x", "format": "bf16", "q_dtype": "bf16"},
    "heads first": {"layout": "hnd"},
    "odd sizes": {"head_dim": 24, "v_head_dim": 40, "group": 3, "page_size": 5},
    "one query head a group": {"group": 1},
    "heads that do not divide": {"kv_heads": 6},
}


def packed(device: str, heads_per_tile: int = 4, multiprocessors: int = 1) -> dict[str, Any]:
    """Fewer programs than units, so that heads are put together."""
    platform = card(device, multiprocessors)
    row = tuning_for("decode", platform.arch, 64, 4, 4)
    return {"platform": platform, "tuning": row._replace(per_multiprocessor=1.0, heads_per_tile=heads_per_tile)}


def made(seed: int, device: str, **case: Any) -> Scenario:
    """A scenario whose batch says how many new tokens a row has at most: a tile then holds no more."""
    case = {**LENS, "kv_heads": 4, **case}
    s = build(seed, device=device, **case)
    s.batch.max_q_len = max(case["q_lens"])
    return s


def tile_of(s: Scenario, **how: Any) -> Any:
    out = torch.empty(s.q.shape[0], s.q.shape[1], s.cache.v_head_dim, dtype=torch.float32, device=s.q.device)
    call, launcher = prepared("decode", s, out, **how)
    return launcher.schedule(call, Extent.of(s.q, s.cache, s.batch)).tile


@pytest.mark.parametrize("name, together", [("plain", 2), *((name, 4) for name in CASES)])
def test_several_heads_per_tile(name: str, together: int, device: str) -> None:
    s, how = made(1, device, **CASES[name]), packed(device, together)
    assert tile_of(s, **how).HEADS_PER_TILE > 1
    check("decode", s, *run("decode", s, **how))


def test_the_number_of_heads_per_tile(device: str) -> None:
    """As many as the table says, if their queries fit, if they divide the heads, if there are more units than programs, and in
    plain calls: not with a tree, not with new tokens beside the pages."""
    for expected, case, how in (
        (4, {}, {}),
        (2, {}, {"heads_per_tile": 2}),
        (1, {}, {"heads_per_tile": 1}),
        (2, {"group": 8}, {}),
        (1, {"group": 16}, {}),
        (2, {"kv_heads": 6}, {}),
        (1, {"kv_heads": 3}, {}),
        (4, {"kv_heads": 8}, {"multiprocessors": 12}),
        (2, {"kv_heads": 8}, {"multiprocessors": 24}),
        (1, {"kv_heads": 8}, {"multiprocessors": 48}),
        (1, {"batch_invariant": True}, {}),
        (1, {"mask": True}, {}),
        (1, {"form": "context"}, {}),
    ):
        s = made(1, device, **case)
        assert tile_of(s, **packed(device, **{"heads_per_tile": 4, **how})).HEADS_PER_TILE == expected, (case, how)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("multiprocessors", [1, 7])
def test_values_of_other_heads_have_no_effect(multiprocessors: int, bad: float, device: str) -> None:
    """One that is infinite or NaN spoils what sees it: a number of one head's output, and no bit of another's."""
    s = made(2, device)
    how = packed(device, multiprocessors=multiprocessors)
    assert tile_of(s, **how).HEADS_PER_TILE > 1
    clean, clean_lse = run("decode", s, **how)
    row, key, head, dim = 4, 77, 2, 5
    page = s.batch.page_table[row, key // s.cache.page_size]
    s.cache.v[page, key % s.cache.page_size, head, dim] = bad
    out, lse = run("decode", s, **how)
    spoiled = torch.zeros_like(out, dtype=torch.bool)
    spoiled[row, 2 * head : 2 * head + 2, dim] = True
    assert torch.equal(~out.isfinite(), spoiled)
    assert torch.equal(out[~spoiled], clean[~spoiled]) and torch.equal(lse, clean_lse)
