"""Cache writes: every layout and format against index formulas of the tests' own, and nothing beside the slots."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import quire
from support import nvfp4
from support.kernels import each_kernel  # noqa: F401
from support.scenario import LARGEST, TYPES, in_bytes, place

pytestmark = pytest.mark.usefixtures("each_kernel")


def written(
    layout: str, format: str, scales: str, *, kv_heads: int = 3, head_dim: int = 16, v_head_dim: int = 8, page_size: int = 8
):
    """A cache with poisoned pages, a batch, and k, v to write to it."""
    pool = quire.PagePool(12, page_size)
    g = torch.Generator().manual_seed(5)
    options = {"format": format, "layout": layout, "x": 4 if layout in ("vllm_x", "aiter") else None}
    if format in LARGEST and scales == "token":
        options["scales"] = "token"
    elif format in LARGEST:
        base = 3.0 / LARGEST[format]
        options["k_scale"] = base if scales == "tensor" else base * (1 + torch.rand(kv_heads, generator=g))
        options["v_scale"] = 2 * base if scales == "tensor" else base * (1 + torch.rand(kv_heads, generator=g))
    cache = quire.KVCache.allocate(
        pool, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, dtype=TYPES[format], **options
    )
    for pages in {id(cache.k_bytes): cache.k_bytes, id(cache.v_bytes): cache.v_bytes}.values():
        pages.fill_(77)
    q_lens, kv_lens = [5, 0, 1, 11], [9, 4, 30, 11]
    ids = list(range(12))
    random.Random(3).shuffle(ids)
    table = torch.full((4, 5), -1)
    for i, n in enumerate(kv_lens):
        for c in range(-(-n // page_size)):
            table[i, c] = ids.pop()
    starts = torch.tensor([0, 5, 5, 6, 17])
    batch = quire.Batch(table.int(), torch.tensor(kv_lens).int(), starts)
    made = torch.float32 if format == "fp32" else torch.bfloat16
    k = torch.randn(19, kv_heads, head_dim, generator=g).to(made)
    v = torch.randn(19, kv_heads, v_head_dim, generator=g).to(made)
    slots = [-1] * 19
    for i, n in enumerate(kv_lens):
        for t in range(q_lens[i]):
            at = n - q_lens[i] + t
            slots[int(starts[i]) + t] = int(table[i, at // page_size]) * page_size + at % page_size
    return cache, batch, k, v, slots


def expected_pages(before: torch.Tensor, x: torch.Tensor, slots: list[int], format: str, scale: torch.Tensor | None):
    """What `[pages, page_size, heads, dim]` must hold after the write, token by token, and the scale of each."""
    pages, size = before.shape[:2]
    after = before.clone().view(pages * size, *before.shape[2:])
    of_slot: dict[int, torch.Tensor] = {}
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        value = x[row].float()
        if format in LARGEST:
            if scale is None:
                s = value.abs().amax(-1) / LARGEST[format]
                s = torch.where(s == 0, 1.0, s)
            else:
                s = scale.expand(value.shape[0])
            of_slot[slot] = s
            value = (value / s[:, None]).clamp(-LARGEST[format], LARGEST[format])
            if format.startswith("int"):
                value = value.round()
        after[slot] = value.to(after.dtype)
    return after.view(before.shape), of_slot


@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("format", [format for format in TYPES if format != "int4_zp" and not format.startswith("nvfp4")])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"])
def test_what_is_written_is_read_back(layout: str, format: str, scales: str) -> None:
    cache, batch, k, v, slots = written(layout, format, scales)
    blank = torch.full((1,), 77, dtype=torch.uint8 if TYPES[format].itemsize == 1 else TYPES[format]).view(TYPES[format])
    quire.write(k, v, cache, batch)
    for part, x, dim in (("k", k, 16), ("v", v, 8)):
        scale = getattr(cache, f"{part}_scale")
        if format == "int4":  # 77 is 0x4D: -3 below, 4 above
            before = torch.tensor([-3, 4], dtype=torch.int8).repeat(12 * 8 * 3 * dim // 2).view(12, 8, 3, dim)
        else:
            before = blank.view(torch.uint8).repeat(12 * 8 * 3 * dim).view(TYPES[format]).view(12, 8, 3, dim)
        after, of_slot = expected_pages(before, x, slots, format, None if scales == "token" else scale)
        bits = torch.uint8 if TYPES[format].itemsize == 1 else {2: torch.int16, 4: torch.int32}[TYPES[format].itemsize]
        wanted = place("hnd" if layout == "vllm_joint" else layout, part, in_bytes(after, format), 4)
        assert torch.equal(getattr(cache, part).view(bits), wanted), f"{part} differs"
        for slot, s in of_slot.items():
            if scales == "token":
                assert torch.equal(scale[slot // 8, slot % 8], s)


@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("formats", [("nvfp4", "nvfp4_swizzled"), ("int8", "nvfp4"), ("nvfp4_swizzled", "fp32")], ids=str)
def test_scales_of_groups_are_written(formats: tuple[str, str], layout: str, scales: str) -> None:
    """Codes and scales of the groups of every token, where a definition of the page says, and nothing else."""
    pool, g = quire.PagePool(6, 8), torch.Generator().manual_seed(3)
    dims = {"k": 64, "v": 64 if formats[1] == "nvfp4_swizzled" else 48}
    named: dict[str, Any] = {"k_format": formats[0], "v_format": formats[1], "layout": layout}
    if scales == "token":
        named["scales"] = "token"
    for part, format in zip("kv", formats):
        if format in LARGEST and scales != "token":
            base = 20.0 / LARGEST[format]
            named[f"{part}_scale"] = base if scales == "tensor" else base * (1 + torch.rand(3, generator=g))
    cache = quire.KVCache.allocate(pool, kv_heads=3, head_dim=dims["k"], v_head_dim=dims["v"], **named)
    cache.k_bytes.fill_(77), cache.v_bytes.fill_(77)
    q_lens = {pool.sequence(): 9, pool.sequence(): 11}
    batch = pool.step(q_lens)
    x = {part: nvfp4.edge_rows(20, 3, 64, seed)[..., : dims[part]] for seed, part in enumerate(dims)}
    quire.write(x["k"], x["v"], cache, batch)
    slots = batch.slots_of_tokens(20, 8)
    for part, format in zip("kv", formats):
        if not format.startswith("nvfp4"):
            continue
        scale = getattr(cache, f"{part}_scale")
        if scales == "token":
            largest = x[part].abs().amax(-1) / 2688
            want = torch.where(largest == 0, 1.0, largest)
            assert torch.equal(scale.flatten(0, 1)[slots].view(torch.int32), want.view(torch.int32)), "scales per token"
            wide = want.unsqueeze(-1)
        else:
            wide = scale.reshape(-1, 1)
        # Infinity over an infinite scale is NaN, which makes the group NaN.
        made = nvfp4.encoded((x[part] / wide).clamp(-2688.0, 2688.0))
        codes = torch.tensor([13, 4], dtype=torch.uint8).repeat(48, 3, dims[part] // 2)  # 77 is 0x4D
        groups = torch.full((48, 3, dims[part] // 16), 77, dtype=torch.uint8)
        codes[slots], groups[slots] = made.codes, made.scales
        whole = nvfp4.Grouped(codes.view(6, 8, 3, -1), groups.view(6, 8, 3, -1))
        assert torch.equal(getattr(cache, part), nvfp4.pages_of(whole, layout, format == "nvfp4_swizzled")), f"{part} differs"


@pytest.mark.parametrize("formats", [("int8", "int4"), ("int4", "bf16"), ("bf16", "e4m3fn")], ids=str)
def test_keys_and_values_in_formats_of_their_own(formats: tuple[str, str]) -> None:
    pool, k, v = quire.PagePool(4, 8), torch.randn(21, 3, 16).bfloat16(), torch.randn(21, 3, 8).bfloat16()
    sizes = {"kv_heads": 3, "head_dim": 16, "v_head_dim": 8}
    batch = pool.step({pool.sequence(): 9, pool.sequence(): 12})

    def holds(k_format: str, v_format: str) -> list[torch.Tensor | None]:
        scales = "token" if {k_format, v_format} & set(LARGEST) else None
        cache = quire.KVCache.allocate(pool, **sizes, k_format=k_format, v_format=v_format, scales=scales)
        quire.write(k, v, cache, batch)
        return [cache.k_bytes, cache.k_scale, cache.v_bytes, cache.v_scale]

    got, keys, values = holds(*formats), holds(formats[0], formats[0]), holds(formats[1], formats[1])
    for mine, wanted in zip(got, (*keys[:2], *values[2:])):
        assert (mine is None and wanted is None) or torch.equal(mine, wanted)


def test_every_head_is_written_whatever_their_number() -> None:
    # 64 heads x 128: more than 512 chunks of 16 bytes a token, where a well-known writer stops.
    pool = quire.PagePool(2, 16)
    cache = quire.KVCache.allocate(pool, kv_heads=64, head_dim=128, dtype=torch.float16, layout="vllm_x")
    k, v = torch.randn(2, 3, 64, 128).half()
    quire.write(k, v, cache, pool.step({pool.sequence(): 3}))
    got_k, got_v = cache.layout.unpack(cache.k, cache.v)
    assert torch.equal(got_k.flatten(0, 1)[got_k.flatten(0, 1).abs().sum((1, 2)) > 0], k)
    assert torch.equal(got_v.flatten(0, 1)[got_v.flatten(0, 1).abs().sum((1, 2)) > 0], v)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_given_slots_win_and_minus_one_skips(dtype: torch.dtype) -> None:
    pool = quire.PagePool(4, 4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=2, dtype=torch.float32)
    batch = pool.step({pool.sequence(): 4})
    k = torch.arange(8.0).view(4, 1, 2) + 1
    quire.write(k, -k, cache, batch, slots=torch.tensor([9, -1, 2, 15], dtype=dtype))
    flat = cache.k.view(16, 2)
    assert [int(i) for i in flat.abs().sum(1).nonzero()] == [2, 9, 15]
    assert torch.equal(flat[[9, 2, 15]], k[[0, 2, 3], 0])
    assert torch.equal(cache.v.view(16, 2), -flat)


def test_views_of_one_fused_projection() -> None:
    pool = quire.PagePool(4, 4)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=8, dtype=torch.float32)
    fused = torch.randn(6, (4 + 2 + 2) * 8)
    q, k, v = (part.unflatten(1, (-1, 8)) for part in fused.split([32, 16, 16], dim=1))
    batch = pool.step({pool.sequence(): 6})
    out = quire.step(q, k, v, cache, batch)
    apart = quire.KVCache.allocate(quire.PagePool(4, 4), kv_heads=2, head_dim=8, dtype=torch.float32)
    assert torch.equal(out, quire.step(q.contiguous(), k.contiguous(), v.contiguous(), apart, batch))


def test_a_zero_row_has_scale_one() -> None:
    pool = quire.PagePool(1, 2)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=4, dtype=torch.int8, scales="token")
    quire.write(torch.zeros(2, 1, 4), torch.ones(2, 1, 4), cache, pool.step({pool.sequence(): 2}))
    assert cache.k_scale is not None and cache.v_scale is not None
    assert (cache.k_scale == 1).all()
    assert torch.allclose(cache.v_scale, torch.tensor(1 / 127))


def test_nothing_is_written_if_a_rule_fails() -> None:
    pool = quire.PagePool(4, 4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=2, dtype=torch.float32, ledger=True)
    batch = pool.step({pool.sequence(): 4})
    k = torch.ones(4, 1, 2)
    for slots in ([0, 1, 2, 16], [0, 1, 1, 2], [0, 1, -2, 3]):
        with pytest.raises(quire.ContractError, match="nothing was written"):
            quire.write(k, k, cache, batch, slots=torch.tensor(slots))
    assert not cache.k.any()
    assert cache.ledger is not None
    assert (cache.ledger.position == -1).all()
