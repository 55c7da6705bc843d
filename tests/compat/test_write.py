"""`reshape_and_cache` and `reshape_and_cache_flash`: every head, every format, any strides, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.compat.vllm import chunked_prefill_paged_decode, reshape_and_cache, reshape_and_cache_flash
from quire.errors import ArgumentError, ContractError
from quire.slot_batch import _one_sequence

STORED = {"auto": torch.float16, "float16": torch.float16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn,
          "fp8_e5m2": torch.float8_e5m2}  # fmt: skip
UNTOUCHED = 0x55


def tokens(device: str, count: int, heads: int, dim: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator(device).manual_seed(seed)
    return [torch.randn(count, heads, dim, generator=g, device=device).to(torch.float16) for _ in range(2)]


def caches(device: str, pages: int, size: int, heads: int, dim: int, x: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x-packed caches full of bytes that no test writes."""
    shapes = ((pages, heads, dim // x, size, x), (pages, heads, dim, size))
    return [torch.full((*s[:-1], s[-1] * dtype.itemsize), UNTOUCHED, dtype=torch.uint8, device=device).view(dtype) for s in shapes]


def token_at(cache: torch.Tensor, slot: int, size: int) -> torch.Tensor:
    """One token of an x-packed cache, [heads, dim]."""
    page, offset = divmod(slot, size)
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    if raw.dim() == 5:
        return raw[page, :, :, offset].flatten(1).view(cache.dtype)
    return raw[page, :, :, offset].contiguous().view(cache.dtype)


def wanted(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What is stored for a token: fp32 division, saturated, rounded once."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    return (x.float() / torch.tensor(scale, device=x.device)).clamp(-most, most).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "kv_cache_dtype, storage", [*((name, "typed") for name in STORED), *((name, "bytes") for name in STORED if "fp8" in name)]
)
def test_each_token_goes_to_its_slot(kv_cache_dtype: str, storage: str, index: torch.dtype, device: str) -> None:
    """Slots below 0 and tokens beyond slot_mapping are skipped; e5m2 is stored as e5m2; large values saturate."""
    dtype = STORED[kv_cache_dtype]
    key, value = tokens(device, 7, 3, 16)
    key[2] *= 1000
    kc, vc = caches(device, 4, 8, 3, 16, 8, dtype)
    slots = [17, -1, 3, 24, -7]
    given = [c.view(torch.uint8) if storage == "bytes" else c for c in (kc, vc)]
    scales = torch.tensor(0.25, device=device), torch.tensor([0.5], device=device)
    reshape_and_cache(key, value, *given, torch.tensor(slots, dtype=index, device=device), kv_cache_dtype, *scales)
    for cache, new, scale in ((kc, key, 0.25), (vc, value, 0.5)):
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert same(token_at(cache, slot, 8), wanted(new[token], dtype, scale))
        left = torch.full_like(cache.view(torch.uint8), UNTOUCHED)
        for slot in range(32):
            if slot not in slots:
                assert same(token_at(cache, slot, 8), token_at(left.view(dtype), slot, 8)), f"slot {slot} was touched"


@pytest.mark.parametrize("heads, dim", [(40, 128), (64, 128), (5, 104)])
def test_every_head_is_written(heads: int, dim: int, device: str) -> None:
    """Upstream gives each of at most 512 threads one chunk: of 40 heads of 128, the last 8 are never written."""
    key, value = tokens(device, 3, heads, dim)
    kc, vc = caches(device, 2, 4, heads, dim, 8, torch.float16)
    reshape_and_cache(key, value, kc, vc, torch.tensor([6, 0, 3], device=device), "auto", None, None)
    for token, slot in enumerate((6, 0, 3)):
        assert same(token_at(kc, slot, 4), key[token])
        assert same(token_at(vc, slot, 4), value[token])


def test_pages_need_not_be_packed(device: str) -> None:
    """Upstream ignores the caches' strides."""
    key, value = tokens(device, 2, 3, 16)
    kc, vc = (torch.cat((c, c), 1) for c in caches(device, 4, 8, 3, 16, 8, torch.float16))
    reshape_and_cache(key, value, kc[:, :3], vc[:, :3], torch.tensor([9, 30], device=device), "auto", None, None)
    assert same(token_at(kc[:, :3].contiguous(), 30, 8), key[1])
    assert (vc[:, 3:].contiguous().view(torch.uint8) == UNTOUCHED).all()


def test_strided_new_tokens(device: str) -> None:
    """Slices of a fused projection."""
    fused = torch.cat(tokens(device, 4, 3, 16), dim=2)
    kc, vc = caches(device, 2, 8, 3, 16, 8, torch.float16)
    reshape_and_cache(fused[..., :16], fused[..., 16:], kc, vc, torch.tensor([1, 2, 3, 15], device=device), "auto", None, None)
    assert same(token_at(kc, 15, 8), fused[3, :, :16])
    assert same(token_at(vc, 15, 8), fused[3, :, 16:])


@pytest.mark.parametrize("kv_cache_dtype", STORED)
@pytest.mark.parametrize("view", ["nhd", "hnd"])
@pytest.mark.parametrize("scales", ["tensor", "head"])
def test_token_major_caches(kv_cache_dtype: str, view: str, scales: str, device: str) -> None:
    dtype = STORED[kv_cache_dtype]
    key, value = tokens(device, 3, 2, 16)
    shape = (4, 2, 8, 16) if view == "hnd" else (4, 8, 2, 16)
    made = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
    kc, vc = (m.transpose(1, 2) if view == "hnd" else m for m in made)
    scale = torch.tensor([0.25, 2.0], device=device) if scales == "head" else torch.tensor([0.25], device=device)
    reshape_and_cache_flash(key, value, kc, vc, torch.tensor([31, 8, -1], device=device), kv_cache_dtype, scale, scale)
    for cache, new in ((kc, key), (vc, value)):
        for token, slot in enumerate((31, 8)):
            for head, of_head in enumerate(scale.expand(2).tolist()):
                bits = cache.view(torch.uint8) if dtype.itemsize == 1 else cache
                got = bits[slot // 8, slot % 8, head].contiguous().view(dtype)
                assert same(got, wanted(new[token, head], dtype, of_head))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_what_is_written_is_what_is_read(kv_cache_dtype: str, device: str) -> None:
    """Upstream's Triton writer stores e4m3 under the string that its reader takes for e5m2."""
    key, value = tokens(device, 20, 1, 16)
    kc, vc = (torch.zeros_like(c) for c in caches(device, 4, 8, 1, 16, 8, STORED[kv_cache_dtype]))
    one = torch.tensor(0.5, device=device)
    slots = torch.arange(20, device=device) + 4
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    reshape_and_cache(key, value, kc, vc, slots - 4, kv_cache_dtype, one, one)
    index: dict[str, Any] = {"dtype": torch.int32, "device": device}
    out, q = torch.zeros(1, 1, 16, dtype=torch.float16, device=device), torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    starts, lens = torch.tensor([0, 1], **index), torch.tensor([20], **index)
    chunked_prefill_paged_decode(q, key[-1:], value[-1:], out, kv_cache_dtype, kc, vc, table, starts, lens, 20, 1, one, one)
    # A query of zeros takes the mean of all values.
    step = 2e-3 if kv_cache_dtype == "auto" else 0.25 if kv_cache_dtype == "fp8_e5m2" else 0.1
    assert ((out[0, 0] - value.float().mean((0, 1))).abs() <= step).all()
    assert (out != 0).all()


@pytest.mark.parametrize(
    "slots, rule", [([3, 3], "ownership"), ([3, 32], "ownership")], ids=["a slot twice", "a slot beyond the cache"]
)
def test_bad_slots_are_named_where_the_host_sees_them(slots: list[int], rule: str) -> None:
    key, value = tokens("cpu", 2, 3, 16)
    kc, vc = caches("cpu", 4, 8, 3, 16, 8, torch.float16)
    with pytest.raises(ContractError, match=r"compat.vllm.reshape_and_cache: 1 violation(.|\n)*slot_mapping\[1\]") as broken:
        reshape_and_cache(key, value, kc, vc, torch.tensor(slots), "auto", None, None)
    assert [v.rule for v in broken.value.violations] == [rule]
    assert (kc.view(torch.uint8) == UNTOUCHED).all()


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"slot_mapping": torch.zeros(2)}, "slot_mapping"),
        ({"slot_mapping": None}, "slot_mapping"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"value_cache": torch.zeros(4, 3, 16, 9, dtype=torch.float16)}, "value_cache"),
    ],
    ids=["float slots", "no slots", "nvfp4", "another type", "another block_size"],
)
def test_refused_by_name(change: dict[str, Any], argument: str) -> None:
    key, value = tokens("cpu", 2, 3, 16)
    kc, vc = caches("cpu", 4, 8, 3, 16, 8, torch.float16)
    given = {"key": key, "value": value, "key_cache": kc, "value_cache": vc, "slot_mapping": torch.tensor([1, 2])}
    given |= {"kv_cache_dtype": "auto", "k_scale": None, "v_scale": None} | change
    with pytest.raises(ArgumentError) as refusal:
        reshape_and_cache(**given)
    assert refusal.value.argument == argument


def test_a_shape_that_does_not_fit_is_named() -> None:
    key, value = tokens("cpu", 2, 2, 16)
    kc, vc = caches("cpu", 4, 8, 3, 16, 8, torch.float16)
    with pytest.raises(ContractError, match=r"\[shapes\] key\n(.|\n)*\[shapes\] value\n"):
        reshape_and_cache(key, value, kc, vc, torch.tensor([1, 2]), "auto", None, None)


def test_constants_of_a_write_are_aligned() -> None:
    """Views into others would make every write take the compiler's way."""
    assert all(part.storage_offset() == 0 for part in _one_sequence(7, torch.device("cpu")))
