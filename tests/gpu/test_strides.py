"""Tensors that lie where they like: sliced, fused, transposed, and less aligned than a kernel was compiled for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import quire
from gpu.calls import DEVICE, attend, check, every, fresh_out
from support.scenario import Scenario, build

LENS: dict[str, Any] = {"q_lens": [1, 40, 0, 3, 1], "kv_lens": [150, 57, 60, 75, 9], "padding": 2}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"format": "bf16", "q_dtype": "bf16", "head_dim": 64},
    "context": {"format": "bf16", "q_dtype": "bf16", "head_dim": 64, "form": "context"},
    "fp32": {},
    "e4m3fn": {"format": "e4m3fn", "q_dtype": "bf16", "head_dim": 64},
}


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same in memory that begins `by` elements later than memory is aligned."""
    memory = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
    moved = memory[by : by + tensor.numel()].view(tensor.shape)
    if tensor.dtype.itemsize == 1:
        moved.view(torch.uint8).copy_(tensor.view(torch.uint8))
    else:
        moved.copy_(tensor)
    assert by == 0 or moved.data_ptr() % 16
    return moved


def moved_by(s: Scenario, by: int, what: str) -> Scenario:
    """The scenario with its queries, its pages, its indices or its new tokens there."""
    if what == "q":
        return replace(s, q=shifted(s.q, by))
    if what == "pages":
        k, v = shifted(s.cache.k, by), shifted(s.cache.v, by)
        return replace(
            s,
            cache=quire.KVCache.wrap(
                k, v, layout="nhd", format=s.cache.format.name, k_scale=s.cache.k_scale, v_scale=s.cache.v_scale
            ),
        )
    if what == "indices":
        return replace(s, batch=quire.Batch(*(shifted(t, by) for t in (s.batch.page_table, s.batch.kv_lens, s.batch.q_starts))))
    assert what == "new" and s.new is not None
    return replace(s, new=(shifted(s.new[0], by), shifted(s.new[1], by)))


@every
@pytest.mark.parametrize(
    ("name", "what", "first"),
    [
        ("bf16", "q", 0),
        ("bf16", "q", 1),
        ("bf16", "pages", 0),
        ("bf16", "indices", 1),
        ("context", "new", 0),
        ("fp32", "q", 0),
        ("e4m3fn", "pages", 1),
    ],
)
def test_alignment(name: str, what: str, first: int, kernel: str) -> None:
    """Calls of one kind whose memory is aligned, and is not, in turns: what was bound for one must not serve the other."""
    # A shape of its own for each test: a kind that is known already would not be bound anew.
    padding = 1 + first + 2 * ("q", "pages", "indices", "new").index(what)
    s = build(40, **LENS | {"padding": padding}, **CASES[name], device=DEVICE)
    for by in (first, first, 1 - first, 1 - first, first):
        there = moved_by(s, by, what)
        out, lse = attend(there, kernel)
        check(there, out, lse)


@every
def test_outputs_that_are_not_aligned(kernel: str) -> None:
    s = build(41, **LENS, **CASES["bf16"], device=DEVICE)
    for by in (0, 1, 0, 1):
        out, lse = attend(s, kernel, out=shifted(fresh_out(s), by))
        check(s, out, lse)


@every
def test_slices_of_a_fused_projection(kernel: str) -> None:
    """Queries, new keys and new values side by side in one tensor; the output is a part of another."""
    s = build(42, **LENS, **CASES["context"], device=DEVICE)
    assert s.new is not None
    tokens, heads = s.q.shape[0], s.q.shape[1]
    fused = torch.full((tokens, heads + 4, 64), torch.nan, dtype=s.q.dtype, device=DEVICE)
    fused[:, :heads], fused[:, heads : heads + 2], fused[:, heads + 2 :] = s.q, *s.new
    q, k, v = fused.split([heads, 2, 2], 1)
    there = replace(s, q=q, new=(k, v))
    for _ in range(2):
        wide = torch.full((tokens, heads, 2, 64), 40.0, dtype=s.q.dtype, device=DEVICE)
        wide[: s.live, :, 1] = torch.nan
        out, lse = attend(there, kernel, out=wide[:, :, 1])
        check(s, out, lse)
        assert (wide[:, :, 0] == 40.0).all(), "memory beside the output was written"


@every
def test_elements_that_are_not_side_by_side(kernel: str) -> None:
    s = build(43, **LENS, **CASES["context"], device=DEVICE)
    assert s.new is not None
    tokens, heads = s.q.shape[:2]
    spread = [torch.full((*t.shape[:2], 2 * t.shape[2] + 1), torch.nan, dtype=t.dtype, device=DEVICE) for t in (s.q, *s.new)]
    q, k, v = (t[:, :, 1::2] for t in spread)
    for mine, theirs in zip((q, k, v), (s.q, *s.new)):
        mine.copy_(theirs)
    there = replace(s, q=q, new=(k, v))
    for _ in range(2):
        out = torch.full((tokens, 64, heads), torch.nan, dtype=s.q.dtype, device=DEVICE).transpose(1, 2)
        out[s.live :] = 40.0
        out, lse = attend(there, kernel, out=out)
        check(s, out, lse)


@every
def test_indices_that_are_not_side_by_side(kernel: str) -> None:
    s = build(44, **LENS, **CASES["bf16"], device=DEVICE)
    tensors = []
    for t in (s.batch.page_table, s.batch.kv_lens, s.batch.q_starts):
        wide = torch.full((*t.shape[:-1], t.shape[-1] * (1 if t.dim() == 2 else 3) + 5), -7, dtype=t.dtype, device=DEVICE)
        view = wide[:, : t.shape[1]] if t.dim() == 2 else wide[: 3 * t.shape[0] : 3]
        tensors.append(view.copy_(t))
    there = replace(s, batch=quire.Batch(*tensors))
    for _ in range(2):
        check(s, *attend(there, kernel))
