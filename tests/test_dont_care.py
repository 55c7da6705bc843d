"""Clauses 1 and 7: what is not required has no influence, to the bit, and nothing but live rows of the output is touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import quire
from support.kernels import each_kernel  # noqa: F401
from support.scenario import Scenario, build

pytestmark = pytest.mark.usefixtures("each_kernel")

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "context": {"form": "context"},
    "window": {"window": 9},
    "window-context": {"window": 9, "form": "context"},
    "non-causal-window": {"window": (4, 4), "causal": False},
    "tree": {"mask": True},
    "tree-window": {"mask": True, "window": 5},
    "e4m3fn": {"format": "e4m3fn"},
    "e4m3fn-token-scales": {"format": "e4m3fn", "scales": "token"},
    "int8-token-scales": {"format": "int8", "scales": "token", "window": 11},
    "int4-token-scales": {"format": "int4", "scales": "token", "window": 11},
    "int4-zero-points": {"format": "int4_zp", "scales": "token", "window": 11},
    "bf16-int4-token-scales": {"format": "bf16", "v_format": "int4", "scales": "token"},
    "nvfp4-swizzled": {"format": "nvfp4", "v_format": "nvfp4_swizzled", "v_head_dim": 64, "layout": "hnd", "window": 11},
    "fp16-nvfp4-context": {"format": "fp16", "v_format": "nvfp4", "form": "context"},
    "bf16-x-packed": {"format": "bf16", "layout": "vllm_x"},
    "bf16-aiter-large-pages": {"format": "bf16", "layout": "aiter", "page_size": 64},
    "spans": {"spans": "any"},
    "spans-context-token-scales": {"spans": "any", "form": "context", "format": "int8", "scales": "token"},
    "fp16-joint": {"format": "fp16", "layout": "vllm_joint", "window": 30},
}
LENS = {"q_lens": [1, 7, 0, 20, 1], "kv_lens": [50, 7, 60, 75, 1]}


def run(s: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((s.q.shape[0], s.q.shape[1], s.cache.v_head_dim), 7.0)
    got, lse = quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, out=out, lse=True)
    return got, lse


@pytest.mark.parametrize("name", CASES)
def test_poison_does_not_show(name: str) -> None:
    spec = LENS | {"padding": 2} | CASES[name]
    clean = build(30, **spec, poison=0.0, bad_id=0)
    out, lse = run(clean)
    clean.check(out, lse)
    for poison, bad_id in ((math.nan, -1), (math.inf, 10**9), (-math.inf, -(2**31))):
        dirty = build(30, **spec, poison=poison, bad_id=bad_id)
        assert torch.equal(dirty.expected, clean.expected), "the poison reached something that is required"
        poisoned_out, poisoned_lse = run(dirty)
        assert torch.equal(poisoned_out, out)
        assert torch.equal(poisoned_lse, lse)


@pytest.mark.parametrize("name", CASES)
def test_only_live_rows_of_out_are_touched(name: str) -> None:
    s = build(31, **LENS, padding=2, **CASES[name])
    shape = (s.q.shape[0], s.q.shape[1], s.cache.v_head_dim)
    # The output is the middle of a larger buffer: guard rows above and below, guard columns on both sides.
    buffer = torch.full((shape[0] + 2, shape[1] + 2, shape[2] + 2), 123.5)
    inputs = [s.q, s.cache.k_bytes, s.cache.v_bytes, s.cache.k_scale, s.cache.v_scale, *(s.new or ())]
    inputs += [s.batch.page_table, s.batch.kv_lens, s.batch.q_starts]
    before = [None if t is None else t.clone() for t in inputs]
    quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, out=buffer[1:-1, 1:-1, 1:-1])
    for tensor, copy in zip(inputs, before):
        if tensor is not None and copy is not None:
            assert torch.equal(_bits(tensor), _bits(copy))
    s.check(buffer[1:-1, 1:-1, 1:-1])
    buffer[1 : 1 + s.live, 1:-1, 1:-1] = 123.5
    assert (buffer == 123.5).all()


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: NaN compares equal to itself there."""
    return t.contiguous().view(-1).view(torch.uint8)
