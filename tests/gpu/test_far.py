"""Clause 9: a cache above 2^31 elements is right, not wrapped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import quire
from gpu.calls import KERNELS, attend, bits, check, needs_gpu
from support.scenario import TYPES, build

pytestmark = needs_gpu

PAGES, PAGE, HEADS, DIM = 140_500, 16, 8, 128
"""2.3e9 elements, each of K and V."""
NAN = {"bf16": 0x7FC0, "e4m3fn": 0x7F}
"""Bits that fill what was never written."""


def movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize])


@pytest.mark.parametrize(("format", "layout"), [("bf16", "nhd"), ("e4m3fn", "hnd")])
def test_pages_at_the_far_end(format: str, layout: str) -> None:
    assert PAGES * PAGE * HEADS * DIM > 2**31
    case: dict[str, Any] = {
        "kv_heads": HEADS,
        "head_dim": DIM,
        "page_size": PAGE,
        "format": format,
        "layout": layout,
        "q_dtype": "bf16",
    }
    shape = (PAGES, PAGE, HEADS, DIM) if layout == "nhd" else (PAGES, HEADS, PAGE, DIM)
    k, v = (torch.empty(shape, dtype=TYPES[format], device="cuda") for _ in range(2))
    for pages in (k, v):
        movable(pages).fill_(NAN[format])
    for index in (torch.int32, torch.int64):
        s = build(90, [1, 40, 3, 0], [300, 60, 75, 40], **case, index=(index,) * 3, device="cuda")
        offset = PAGES - s.cache.pages
        for mine, theirs in ((k, s.cache.k), (v, s.cache.v)):
            movable(mine)[offset:] = movable(theirs)
        table = s.batch.page_table
        batch = quire.Batch(torch.where(table >= 0, table + offset, table), s.batch.kv_lens, s.batch.q_starts)
        cache = quire.KVCache.wrap(k, v, layout=layout, format=format, k_scale=s.cache.k_scale, v_scale=s.cache.v_scale)
        far = replace(s, cache=cache, batch=batch)
        for kernel in KERNELS:
            for _ in range(2):
                check(far, *attend(far, kernel))
        write_there(cache, index, offset)


def write_there(cache: quire.KVCache, index: torch.dtype, first: int) -> None:
    """New tokens go to the last pages and to page 0, and nowhere else: the pages that their addresses would wrap to stay NaN."""
    table = torch.tensor([[cache.pages - 1, cache.pages - 3, 0]], dtype=index, device="cuda")
    batch = quire.Batch(table, torch.tensor([40], dtype=index, device="cuda"), torch.tensor([0, 40], dtype=index, device="cuda"))
    new = torch.randn(40, HEADS, DIM, device="cuda").bfloat16()
    quire.write(new, -new, cache, batch, kernel="triton")
    for part in (cache.k, cache.v):
        for pages in movable(part)[1:first].split(20_000):
            assert (pages == NAN[cache.format.name]).all(), "an address wrapped"
    # The same into a small cache, over pages that hold something else.
    near = quire.Batch(torch.arange(3, dtype=index, device="cuda")[None], batch.kv_lens, batch.q_starts)
    parts = [part[table[0].long()].contiguous() for part in (cache.k_bytes, cache.v_bytes)]
    wanted = [bits(part).clone() for part in parts]
    for part in parts:
        part[:2].fill_(1)
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    small = quire.KVCache.wrap(*parts, layout=cache.layout.name, format=cache.format.name, **scales)
    quire.write(new, -new, small, near, kernel="triton")
    assert all(torch.equal(bits(part), before) for part, before in zip((small.k, small.v), wanted))
