"""Tensors in memory that is not aligned or not contiguous: kernels for generic memory, which count work in 64 bits, and the LSE,
whose strides are free in any memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire import Batch
from support.launched import GUARD, bits, check, prepared, run
from support.scenario import Scenario, build

LENS = {"q_lens": [1, 3, 0, 35], "kv_lens": [90, 40, 5, 50], "padding": 3}


def spread(tensor: torch.Tensor, step: int = 2) -> torch.Tensor:
    """The same with elements apart from each other: -7 or NaN lies between them."""
    between = torch.nan if tensor.is_floating_point() else -7
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] * step + 1), between, dtype=tensor.dtype, device=tensor.device)
    return wide[..., 1::step].copy_(tensor)


def elsewhere(s: Scenario) -> Scenario:
    """The same call in generic memory: queries, new tokens and indices."""
    batch = Batch(*(spread(tensor, 3) for tensor in (s.batch.page_table, s.batch.kv_lens, s.batch.q_starts)))
    new = None if s.new is None else (spread(s.new[0]), spread(s.new[1]))
    return replace(s, q=spread(s.q), batch=batch, new=new)


@pytest.mark.parametrize("form", ["full", "context"])
def test_generic_memory(form: str, device: str) -> None:
    """The mixed kernel, which alone takes it. Aligned memory gives the same bits."""
    s = build(3, **LENS, form=form, device=device)
    out, lse = run("mixed", s)
    check("mixed", s, out, lse)
    there = elsewhere(s)
    wide = torch.full((out.shape[0], out.shape[2], out.shape[1]), torch.nan, dtype=out.dtype, device=device).transpose(1, 2)
    _, launcher = prepared("mixed", there, wide)
    assert launcher.problem.memory == "generic" and launcher.constants.WIDE
    result, result_lse = run("mixed", there, out=wide)
    assert lse is not None and result_lse is not None
    assert torch.equal(bits(result), bits(out)) and torch.equal(bits(result_lse), bits(lse))


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_an_lse_with_strides(kernel: str, device: str) -> None:
    """Heads first, and every second element of a larger tensor, whose other elements stay as they are."""
    s = build(4, **LENS, device=device)
    tokens, heads = s.q.shape[:2]
    memory = torch.full((heads, 2 * tokens), GUARD, device=device)
    lse = memory[:, ::2].T
    lse[: s.live] = torch.nan
    out = torch.full((tokens, heads, s.cache.v_head_dim), torch.nan, dtype=s.q.dtype, device=device)
    out[s.live :] = GUARD
    call, launcher = prepared(kernel, s, out, lse)
    assert launcher.problem.memory == "aligned"
    launcher(call)
    check(kernel, s, out, lse)
    assert (memory[:, 1::2] == GUARD).all(), "memory beside the LSE was written"
