"""Tensors in memory that is not aligned or not contiguous: kernels for generic memory, which count work in 64 bits, and the LSE,
whose strides are free in any memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import Batch
from quire.kernels.triton.host.copied import CopyingLauncher
from quire.kernels.triton.host.launcher import mixed
from quire.problem import Extent
from support.launched import GUARD, bits, check, platform_at, prepared, run
from support.scenario import Scenario, build

LENS = {"q_lens": [1, 3, 0, 35], "kv_lens": [90, 40, 5, 50], "padding": 3}


def spread(tensor: torch.Tensor, step: int = 2) -> torch.Tensor:
    """The same with elements apart from each other: -7 or NaN lies between them."""
    between = torch.nan if tensor.is_floating_point() else -7
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] * step + 1), between, dtype=tensor.dtype, device=tensor.device)
    return wide[..., 1::step].copy_(tensor)


def elsewhere(s: Scenario) -> Scenario:
    """The same call in generic memory: queries, new tokens and indices."""
    narrowed = {"spans": s.batch.spans, "select": s.batch.select}
    batch = Batch(*(spread(tensor, 3) for tensor in (s.batch.page_table, s.batch.kv_lens, s.batch.q_starts)), **narrowed)
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


NARROWED: dict[str, dict[str, Any]] = {
    "spans": {"spans": "images"},
    "spans of new tokens": {"spans": "any", "form": "context"},
    "columns": {"select": "columns", "select_heads": 2},
    "positions": {"select": "positions"},
}


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize("name", NARROWED)
def test_with_spans_or_a_selection_other_memory_is_copied(name: str, zero_padding: bool, device: str) -> None:
    """The kernel of aligned memory reads the copies: no other one is compiled. Rows of padding and memory beside the output stay
    as they are. Where the pages are not aligned, there is nothing to copy: the kernel for generic memory gives the same bits."""
    s = build(3, **LENS, **NARROWED[name], device=device)
    good, good_lse = run("mixed", s)
    there = elsewhere(s)
    memory = torch.full((*good.shape[:2], 2 * good.shape[2]), GUARD, dtype=good.dtype, device=device)
    out, lse = memory[..., 1::2], torch.full(good.shape[:2], torch.nan, device=device)
    out[: s.live] = torch.nan
    call, generic = prepared("mixed", there, out, lse, zero_padding=zero_padding)
    launcher = mixed(generic.problem, platform_at(device))
    assert generic.problem.memory == "generic" and isinstance(launcher, CopyingLauncher)
    launcher(call)
    assert (
        good_lse is not None and torch.equal(bits(out[: s.live]), bits(good[: s.live])) and torch.equal(bits(lse), bits(good_lse))
    )
    assert (out[s.live :] == (0 if zero_padding else GUARD)).all() and (memory[..., ::2] == GUARD).all()
    _, kernels = prepared("mixed", s, good, good_lse)
    assert launcher.keys() == mixed(kernels.problem, platform_at(device)).keys()
    unaligned = mixed(generic.problem.replace(aligned_pages=False), platform_at(device))
    assert not isinstance(unaligned, CopyingLauncher) and unaligned.units is None
    out[: s.live] = torch.nan
    unaligned(call)
    assert torch.equal(bits(out[: s.live]), bits(good[: s.live]))


@pytest.mark.parametrize("name", NARROWED)
def test_one_kernel_has_a_tile_for_decodes_and_one_for_more_tokens(name: str, device: str) -> None:
    """A hint selects the tile, and changes no more than rounding if it is wrong."""
    s = build(5, [1, 9, 16, 3], [70, 20, 40, 3], **NARROWED[name], device=device)
    tiles = set()
    for hint in (1, 16):
        s.batch.max_q_len = hint
        call, launcher = prepared("decode", s, torch.empty_like(s.q))
        assert len(set(launcher.programs.values())) == 1
        tiles.add(launcher.schedule(call, Extent.of(s.q, s.cache, s.batch)).tile)
        check("decode", s, *run("decode", s))
    assert len(tiles) == (1 if name == "positions" else 2)


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
