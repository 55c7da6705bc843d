"""The writer, bit for bit what the torch writer stores; `tests/test_write.py` holds that one to formulas of its own."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from quire import Batch, KVCache
from quire.kernels.torch import write as plain
from quire.kernels.triton.host.tuning import SMALLEST
from support import nvfp4
from support.launched import bits, write
from support.scenario import LARGEST, TYPES, place

LAYOUTS = ["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"]
SCALES = ["tensor", "head", "token"]
CASES = [
    (f, layout, "token" if f == "int4_zp" else SCALES[(i + j) % 3], (i + j) % 2 == 0)
    for (i, f), (j, layout) in product(enumerate(TYPES), enumerate(LAYOUTS))
    if not f.startswith("nvfp4")
]
"""Every format in every layout; kinds of scales, and whether slots are given, take turns."""
Q_LENS, KV_LENS = [5, 0, 1, 11, 0], [9, 4, 30, 11, 0]
TOKENS = 19
"""Two of them padding."""


def cache_of(device: str, format: str, layout: str, scales: str, kv_heads: int = 3) -> KVCache:
    """14 pages of 8, full of 77s."""
    g = torch.Generator().manual_seed(5)
    dims = (8, 4) if format.startswith("int4") else (16, 8)
    pages = [torch.full((14, 8, kv_heads, dim), 77, dtype=torch.uint8).view(torch.uint8) for dim in dims]
    if layout == "vllm_joint":
        parts = [place("hnd", "k", torch.cat(pages, -1).repeat_interleave(TYPES[format].itemsize, -1), 4)]
    else:
        parts = [place(layout, part, p, 4).repeat_interleave(TYPES[format].itemsize, -1) for part, p in zip("kv", pages)]
    given: list[Any] = [None, None]
    if format in LARGEST:
        shape = {"tensor": (), "head": (kv_heads,), "token": (14, 8, kv_heads)}[scales]
        given = [(3.0 / LARGEST[format] * (1 + torch.rand(shape, generator=g))).to(device) for _ in "kv"]
    stored = [part.to(device).view(TYPES[format]) for part in parts]
    return KVCache.wrap(*stored, layout=layout, format=format, head_dim=16, k_scale=given[0], v_scale=given[1])


def batch_of(device: str, index: torch.dtype = torch.int32) -> tuple[Batch, torch.Tensor]:
    """Sequences with shuffled pages, and the slots that follow; padding rows have slots too, which must not be written."""
    ids = torch.randperm(14, generator=torch.Generator().manual_seed(3)).tolist()
    table, slots = torch.full((len(Q_LENS), 5), -1), []
    for row, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS)):
        for column in range(-(-kv_len // 8)):
            table[row, column] = ids.pop()
        slots += [int(table[row, at // 8]) * 8 + at % 8 for at in range(kv_len - q_len, kv_len)]
    slots += [ids.pop() * 8, ids[0] * 8 + 1]
    starts = torch.tensor([0, *Q_LENS]).cumsum(0)
    return Batch(table.to(device, index), torch.tensor(KV_LENS).to(device, index), starts.to(device, index)), torch.tensor(
        slots
    ).to(device, index)


def tokens_of(device: str, dtype: torch.dtype, kv_heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    k, v = torch.randn(TOKENS, kv_heads, 16, generator=g) * 2, torch.randn(TOKENS, kv_heads, 8, generator=g) * 2
    k[1, 0], v[2, -1] = 0.0, 1e4
    return k.to(device, dtype), v.to(device, dtype)


def same(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    slots: torch.Tensor | None,
    expected: KVCache | None = None,
    **how: Any,
) -> None:
    """Writes with both, and compares every byte of the caches."""
    expected = expected or copy(cache)
    write(k, v, cache, batch, slots, **how)
    plain.launch(k, v, expected, batch, slots)
    for name in ("k", "v", "k_scale", "v_scale"):
        mine, other = getattr(cache, name), getattr(expected, name)
        assert mine is None or torch.equal(bits(mine), bits(other)), f"{name} differs"


def copy(cache: KVCache) -> KVCache:
    parts = [cache.k, cache.v]
    if str(cache.layout) == "vllm_joint":
        joint = torch.cat([cache.k_bytes, cache.v_bytes], -1)
        parts = [joint.view(cache.k.dtype)]
    scales = [None if s is None else s.clone() for s in (cache.k_scale, cache.v_scale)]
    return KVCache.wrap(
        *(part.clone() for part in parts),
        layout=str(cache.layout), format=cache.format.name, head_dim=16, k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip


@pytest.mark.parametrize("format, layout, scales, given", CASES)
def test_every_format_in_every_layout(format: str, layout: str, scales: str, given: bool, device: str) -> None:
    batch, slots = batch_of(device)
    k, v = tokens_of(device, torch.float32 if format == "fp32" else torch.bfloat16)
    same(k, v, cache_of(device, format, layout, scales), batch, slots if given else None)


@pytest.mark.parametrize("layout, scales, given", [("nhd", "tensor", True), ("hnd", "head", False), ("nhd", "token", False)])
@pytest.mark.parametrize("formats", [("nvfp4", "nvfp4_swizzled"), ("nvfp4", "bf16"), ("int8", "nvfp4")], ids=str)
def test_scales_of_groups(formats: tuple[str, str], layout: str, scales: str, given: bool, device: str) -> None:
    k_dim, v_dim = (64 if format.endswith("swizzled") else 48 if format == "nvfp4" else 24 for format in formats)
    middle = (8, 3) if layout == "nhd" else (3, 8)
    pages = []
    for format, dim in zip(formats, (k_dim, v_dim)):
        units = dim * 9 // 16 if format.startswith("nvfp4") else dim * TYPES[format].itemsize
        pages.append(torch.full((14, *middle, units), 77, dtype=torch.uint8).view(TYPES[format]).to(device))
    shape = {"tensor": (), "head": (3,), "token": (14, 8, 3)}[scales]
    g = torch.Generator().manual_seed(5)
    k_scale, v_scale = (
        (20.0 / LARGEST[f] * (1 + torch.rand(shape, generator=g))).to(device) if f in LARGEST else None for f in formats
    )
    named = {"layout": layout, "k_format": formats[0], "v_format": formats[1]}
    cache, other = (
        KVCache.wrap(
            *(p.clone() for p in pages), **named,
            k_scale=None if k_scale is None else k_scale.clone(), v_scale=None if v_scale is None else v_scale.clone(),
        )
        for _ in range(2)
    )  # fmt: skip
    batch, slots = batch_of(device)
    k, v = (nvfp4.edge_rows(TOKENS, 3, 64, seed)[..., :dim].to(device) for seed, dim in ((1, k_dim), (2, v_dim)))
    same(k, v, cache, batch, slots if given else None, other)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_types(dtype: torch.dtype, index: torch.dtype, device: str) -> None:
    batch, slots = batch_of(device, index)
    for given in (slots, None):
        same(*tokens_of(device, dtype), cache_of(device, "e4m3fn", "nhd", "head"), batch, given)


@pytest.mark.parametrize("kv_heads", [1, 40])
def test_any_number_of_heads(kv_heads: int, device: str) -> None:
    batch, _ = batch_of(device)
    same(*tokens_of(device, torch.bfloat16, kv_heads), cache_of(device, "int8", "nhd", "token", kv_heads), batch, None)


def test_the_smallest_work_per_program(device: str) -> None:
    batch, slots = batch_of(device)
    for given in (slots, None):
        same(*tokens_of(device, torch.bfloat16), cache_of(device, "int8", "nhd", "token"), batch, given, work=SMALLEST)


def test_the_batchs_own_slots(device: str) -> None:
    batch, slots = batch_of(device)
    batch.slots = slots.flip(0)
    same(*tokens_of(device, torch.bfloat16), cache_of(device, "bf16", "hnd", "none"), batch, None)


@pytest.mark.parametrize("bad", [-1, -7, 14 * 8, 2**30])
def test_slots_that_do_not_exist_are_skipped(bad: int, device: str) -> None:
    batch, slots = batch_of(device)
    good = slots.clone()
    slots[3], good[3] = bad, -1
    cache = cache_of(device, "bf16", "nhd", "none")
    expected = copy(cache)
    plain.launch(*tokens_of(device, torch.bfloat16), expected, batch, good)
    write(*tokens_of(device, torch.bfloat16), cache, batch, slots)
    assert torch.equal(bits(cache.k), bits(expected.k)) and torch.equal(bits(cache.v), bits(expected.v))


@pytest.mark.parametrize("bad", [-1, 14, 2**30])
def test_pages_that_do_not_exist_are_skipped(bad: int, device: str) -> None:
    batch, slots = batch_of(device)
    cache = cache_of(device, "bf16", "nhd", "none")
    expected = copy(cache)
    good = slots.clone()
    good[6:14] = -1  # the first page of the fourth sequence, all of whose tokens are new
    plain.launch(*tokens_of(device, torch.bfloat16), expected, batch, good)
    batch.page_table[3, 0] = bad
    write(*tokens_of(device, torch.bfloat16), cache, batch, None)
    assert torch.equal(bits(cache.k), bits(expected.k)) and torch.equal(bits(cache.v), bits(expected.v))


def test_a_short_table_is_not_read_beyond(device: str) -> None:
    batch, slots = batch_of(device)
    cache = cache_of(device, "bf16", "nhd", "none")
    expected = copy(cache)
    good = slots.clone()
    good[[5, *range(14, 17)]] = -1  # tokens in the second column or behind it
    good[[i for i in range(5) if 4 + i >= 8]] = -1
    plain.launch(*tokens_of(device, torch.bfloat16), expected, batch, good)
    batch.page_table = batch.page_table[:, :1].contiguous()
    write(*tokens_of(device, torch.bfloat16), cache, batch, None)
    assert torch.equal(bits(cache.k), bits(expected.k)) and torch.equal(bits(cache.v), bits(expected.v))


@pytest.mark.parametrize("format", ["e4m3fn", "e4m3fnuz", "e5m2", "int8"])
def test_what_is_not_a_number(format: str, device: str) -> None:
    batch, _ = batch_of(device)
    k, v = tokens_of(device, torch.float32)
    k[0, 0, 3], k[6, 1, 2], v[7, 2, 1] = torch.nan, torch.inf, -torch.inf
    same(k, v, cache_of(device, format, "nhd", "head"), batch, None)


def test_strides(device: str) -> None:
    batch, slots = batch_of(device)
    k, v = (torch.stack((t, t), -1).flatten(-2)[..., ::2] for t in tokens_of(device, torch.bfloat16))
    strided = Batch(*(torch.stack((t, t), -1).flatten(-2)[..., ::2] for t in (batch.page_table, batch.kv_lens, batch.q_starts)))
    same(k, v, cache_of(device, "e5m2", "aiter", "head"), strided, None)
    same(k, v, cache_of(device, "e5m2", "aiter", "head"), strided, torch.stack((slots, slots), -1)[:, 0])


def test_nothing_to_write(device: str) -> None:
    batch, _ = batch_of(device)
    cache = cache_of(device, "bf16", "nhd", "none")
    k, v = tokens_of(device, torch.bfloat16)
    same(k[:0], v[:0], cache, Batch(batch.page_table, batch.kv_lens, torch.zeros_like(batch.q_starts)), None)
    same(k, v, cache, Batch(batch.page_table, batch.kv_lens, torch.zeros_like(batch.q_starts)), None)


def test_pages_beyond_2_to_31_elements(device: str) -> None:
    batch, _ = batch_of(device)
    cache = cache_of(device, "int8", "nhd", "head")
    apart = 2**28
    memory = torch.empty(apart * 13 + 2**20, dtype=torch.int8, device=device)
    far = [memory[begin:].as_strided(p.shape, (apart, *p.stride()[1:])) for p, begin in ((cache.k, 0), (cache.v, 2**19))]
    for view, part in zip(far, (cache.k, cache.v)):
        view.copy_(part)
    same(
        *tokens_of(device, torch.bfloat16),
        KVCache.wrap(*far, layout="nhd", k_scale=cache.k_scale, v_scale=cache.v_scale),
        batch,
        None,
        expected=copy(cache),
    )
