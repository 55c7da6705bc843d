"""Cache writes on the GPU, bit for bit what the torch writer stores on the CPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import quire
from gpu.calls import DEVICE, bits, needs_gpu
from quire.kernels.torch import write as plain
from support.scenario import LARGEST, TYPES

LAYOUTS = ["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"]
SCALES = ["tensor", "head", "token"]
Q_LENS, KV_LENS = [5, 0, 1, 11], [9, 4, 30, 11]
TOKENS = 19
"""Two of them padding."""
CASES = [
    (
        format,
        layout,
        "token" if format == "int4_zp" else SCALES[(at + other) % 3],
        ("given", "derived")[(at + other) % 2],
        ("native", "bytes")[(at // 2 + other) % 2],
    )
    for (at, format), (other, layout) in product(enumerate(TYPES), enumerate(LAYOUTS))
]
"""Every format in every layout; kinds of scales, ways to say the slots and kinds of storage take turns."""


def make_cache(device: str, format: str, layout: str, scales: str, storage: str = "native", **shape: int) -> quire.KVCache:
    """Pages full of 77s."""
    size = {"kv_heads": 3, "head_dim": 16, "v_head_dim": 8} | shape
    pool = quire.PagePool(14, 8, device=device)
    given: dict[str, Any] = {"format": format, "layout": layout, "x": 4 if layout in ("vllm_x", "aiter") else None}
    if format in LARGEST and scales == "token":
        given["scales"] = "token"
    elif format in LARGEST:
        g = torch.Generator().manual_seed(5)
        for part in ("k_scale", "v_scale"):
            scale = 3.0 / LARGEST[format] * (1 + torch.rand(size["kv_heads"], generator=g))
            given[part] = (scale if scales == "head" else scale[0]).to(device)
    dtype = torch.uint8 if storage == "bytes" and format in LARGEST else TYPES[format]
    cache = quire.KVCache.allocate(pool, dtype=dtype, **size, **given)
    cache.k_bytes.fill_(77)
    cache.v_bytes.fill_(77)
    return cache


def make_batch(device: str, index: torch.dtype = torch.int32) -> tuple[quire.Batch, torch.Tensor]:
    """Sequences with shuffled pages, and the slots that follow; padding rows have slots too, which nobody may use."""
    ids = torch.randperm(14, generator=torch.Generator().manual_seed(3)).tolist()
    table, slots = torch.full((4, 5), -1), []
    for row, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS)):
        for column in range(-(-kv_len // 8)):
            table[row, column] = ids.pop()
        slots += [int(table[row, at // 8]) * 8 + at % 8 for at in range(kv_len - q_len, kv_len)]
    slots += [ids.pop() * 8, ids[0] * 8 + 1]
    starts = torch.tensor([0, *Q_LENS]).cumsum(0)
    batch = quire.Batch(table.to(index).to(device), torch.tensor(KV_LENS).to(index).to(device), starts.to(index).to(device))
    return batch, torch.tensor(slots).to(index).to(device)


def numbers(heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ordinary ones, and a token each of those that are not. The last head of those is zeros."""
    x = torch.randn(TOKENS, heads, dim, generator=torch.Generator().manual_seed(seed)) * 2
    x[0, 0, dim // 2] = torch.nan
    x[1, 0, 1], x[1, 1, 2] = torch.inf, -torch.inf
    x[2] = -0.0
    x[3] *= 1e-39
    x[4] *= 1e30
    x[6] *= 1e-3
    x[7] *= 1e-2
    x[8, :, ::2] *= 1e4
    x[:9, heads - 1] = 0.0
    return x.to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, format: str) -> bool:
    """Bit for bit; a NaN may have any sign and payload."""
    got, wanted = got.cpu(), wanted.cpu()
    if got.dtype is torch.uint8:
        got, wanted = got.view(TYPES[format]), wanted.view(TYPES[format])
    nan = wanted.float().isnan()
    size = wanted.dtype.itemsize
    equal = bits(got).view(-1, size) == bits(wanted).view(-1, size)
    return torch.equal(got.float().isnan(), nan) and bool((equal.all(1) | nan.reshape(-1)).all())


def compare(cache: quire.KVCache, wanted: quire.KVCache, format: str) -> None:
    assert same(cache.k, wanted.k, format), "K differs"
    assert same(cache.v, wanted.v, format), "V differs"
    for got, scale in ((cache.k_scale, wanted.k_scale), (cache.v_scale, wanted.v_scale)):
        assert (got is None) == (scale is None)
        assert scale is None or same(got, scale, "fp32"), "scales differ"


@pytest.mark.parametrize(("format", "layout", "scales", "slots", "storage"), CASES, ids=["-".join(case) for case in CASES])
def test_every_format_in_every_layout(format: str, layout: str, scales: str, slots: str, storage: str) -> None:
    made = torch.float32 if format == "fp32" or scales == "head" else torch.float16 if format == "fp16" else torch.bfloat16
    k, v = numbers(3, 16, made, 1), numbers(3, 8, made, 2)
    wanted = make_cache("cpu", format, layout, scales, storage)
    batch, where = make_batch("cpu")
    plain.launch(k, v, wanted, batch, where if slots == "given" else None)
    batch, where = make_batch(DEVICE)
    for _ in range(2):
        cache = make_cache(DEVICE, format, layout, scales, storage)
        quire.write(k.to(DEVICE), v.to(DEVICE), cache, batch, slots=where if slots == "given" else None, kernel="triton")
        compare(cache, wanted, format)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_minus_one_skips(index: torch.dtype) -> None:
    k, v = torch.randn(TOKENS, 3, 16).bfloat16(), torch.randn(TOKENS, 3, 8).bfloat16()
    batch, slots = make_batch("cpu", index)
    slots[[0, 7, 16]] = -1
    wanted = make_cache("cpu", "e4m3fn", "nhd", "token")
    plain.launch(k, v, wanted, batch, slots)
    for of_batch in (False, True):
        cache = make_cache(DEVICE, "e4m3fn", "nhd", "token")
        batch, _ = make_batch(DEVICE, index)
        batch.slots = slots.to(DEVICE) if of_batch else None
        quire.write(k.to(DEVICE), v.to(DEVICE), cache, batch, slots=None if of_batch else slots.to(DEVICE), kernel="triton")
        compare(cache, wanted, "e4m3fn")


@needs_gpu
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("bad", [14, -1, -(2**31), 2**31 - 1, 2**40 + 3])
def test_pages_that_do_not_exist_are_skipped(bad: int, index: torch.dtype) -> None:
    if index is torch.int32 and bad >= 2**31:
        pytest.skip("no such int32")
    k, v = torch.randn(TOKENS, 3, 16), torch.randn(TOKENS, 3, 8)
    batch, _ = make_batch("cpu", index)
    wanted = make_cache("cpu", "fp32", "nhd", "tensor")
    batch.page_table[3, 1] = batch.page_table[0, 1] = -1
    plain.launch(k, v, wanted, batch, None)
    batch, _ = make_batch(DEVICE, index)
    batch.page_table[3, 1] = batch.page_table[0, 1] = bad
    cache = make_cache(DEVICE, "fp32", "nhd", "tensor")
    quire.write(k.to(DEVICE), v.to(DEVICE), cache, batch, kernel="triton")
    compare(cache, wanted, "fp32")


@needs_gpu
@pytest.mark.parametrize("bad", [14 * 8, 2**31 - 1, 2**44, -2])
def test_slots_that_do_not_exist_are_skipped(bad: int) -> None:
    k, v = torch.randn(TOKENS, 3, 16), torch.randn(TOKENS, 3, 8)
    wanted, cache = make_cache("cpu", "fp32", "hnd", "tensor"), make_cache(DEVICE, "fp32", "hnd", "tensor")
    batch, slots = make_batch("cpu", torch.int64)
    slots[[2, 9]] = -1
    plain.launch(k, v, wanted, batch, slots)
    batch, slots = make_batch(DEVICE, torch.int64)
    slots[[2, 9]] = bad
    quire.write(k.to(DEVICE), v.to(DEVICE), cache, batch, slots=slots, kernel="triton")
    compare(cache, wanted, "fp32")


def test_every_head_is_written_whatever_their_number() -> None:
    shape = {"kv_heads": 64, "head_dim": 128, "v_head_dim": 128}
    k, v = torch.randn(TOKENS, 64, 128).half(), torch.randn(TOKENS, 64, 128).half()
    wanted, cache = (make_cache(device, "fp16", "vllm_x", "tensor", **shape) for device in ("cpu", DEVICE))
    plain.launch(k, v, wanted, make_batch("cpu")[0], None)
    quire.write(k.to(DEVICE), v.to(DEVICE), cache, make_batch(DEVICE)[0], kernel="triton")
    compare(cache, wanted, "fp16")


def test_strides_and_alignment() -> None:
    """K and V as views of one projection, in memory that is aligned, then as good as not, then aligned."""
    width = (3 * 16 + 3 * 8) * TOKENS
    values = torch.randn(width).bfloat16()
    wanted = make_cache("cpu", "bf16", "nhd", "tensor")
    batch, _ = make_batch("cpu")
    parts = [part.unflatten(1, (3, -1)) for part in values.view(TOKENS, -1).split([48, 24], 1)]
    plain.launch(*parts, wanted, batch, None)
    batch, _ = make_batch(DEVICE)
    for offset in (0, 1, 0):
        memory = torch.zeros(width + 8, dtype=torch.bfloat16, device=DEVICE)
        fused = memory[offset : offset + width].view(TOKENS, -1)
        fused.copy_(values.view(TOKENS, -1))
        cache = make_cache(DEVICE, "bf16", "nhd", "tensor")
        k, v = (part.unflatten(1, (3, -1)) for part in fused.split([48, 24], 1))
        quire.write(k, v, cache, batch, kernel="triton")
        compare(cache, wanted, "bf16")
