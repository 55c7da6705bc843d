"""int4 with zero points: what is written, by numpy from its definition; edge rows; vLLM's bytes; what else holds scales."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import quire
from quire import KVCache, PagePool
from quire.cache.format import FORMATS
from quire.errors import ArgumentError
from support.kernels import each_kernel  # noqa: F401
from support.scenario import place

FORMAT = FORMATS["int4_zp"]
SIZES: dict[str, Any] = {"kv_heads": 2, "head_dim": 16, "v_head_dim": 8}


def bits(x: np.ndarray[Any, Any] | np.float32) -> int:
    return int(np.float32(x).view(np.uint32))


def stored_row(x: np.ndarray[Any, Any]) -> tuple[list[int], int, float]:
    """The codes of one row, its zero point and its scale. Codes 0 to 15 cover its numbers and 0; fp32 as a kernel computes it."""
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
        scale = np.uint32(bits(high / np.float32(15) - low / np.float32(15)) // 16 * 16).view(np.float32)
        scale = np.float32(1) if scale == 0 else scale
        zero = min(15, int(np.rint(-low / scale)))
        return [min(15, max(0, int(np.rint(one / scale)) + zero)) for one in x], zero, float(scale)


def rows(seed: int, tokens: int, dim: int) -> torch.Tensor:
    """Rows of many magnitudes and offsets; rows of one sign, of one number, of zeros; the ends of fp32."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 2, dim, generator=g) * torch.exp2(torch.randint(-20, 20, (tokens, 2, 1), generator=g).float())
    x += x.abs().amax(-1, keepdim=True) * torch.randn(tokens, 2, 1, generator=g)
    x[0], x[1, 0], x[1, 1], x[2, 0], x[2, 1] = 0.0, 0.1, -7.0, x[2, 0].abs(), -x[2, 1].abs()
    x[3, 0], x[3, 1], x[4, 0], x[4, 1] = 1e-45, 3e-44, 0.0, -0.0
    x[3, 0, 0], x[3, 1, 1], x[4, 0, :2], x[4, 1, 0] = 2e-44, -1e-44, torch.tensor([3.4e38, -3.4e38]), 1e-45
    return x


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"])
def test_what_is_written(layout: str) -> None:
    pool = PagePool(5, 8)
    cache = KVCache.allocate(pool, **SIZES, layout=layout, x=4 if layout in ("vllm_x", "aiter") else None, format="int4_zp",
                             scales="token")  # fmt: skip
    cache.k_bytes.fill_(77), cache.v_bytes.fill_(77)
    batch = pool.step({pool.sequence(): 9, pool.sequence(): 12})
    slots = batch.slots_of_tokens(21, 8)
    x = {"k": rows(0, 21, 16), "v": rows(1, 21, 8)}
    quire.write(x["k"], x["v"], cache, batch)
    for part, numbers in x.items():
        scale = getattr(cache, f"{part}_scale").view(40, 2)
        pages = torch.full((40, 2, numbers.shape[2] // 2), 77, dtype=torch.uint8)
        for token, slot in enumerate(slots.tolist()):
            for head in range(2):
                codes, zero, factor = stored_row(numbers[token, head].numpy())
                pages[slot, head] = torch.tensor([a + 16 * b for a, b in zip(codes[::2], codes[1::2])], dtype=torch.uint8)
                assert bits(scale[slot, head].numpy()) == bits(np.float32(factor)) + zero, f"{part} of token {token}, head {head}"
        wanted = place("hnd" if layout == "vllm_joint" else layout, part, pages.view(5, 8, 2, -1), 4)
        assert torch.equal(getattr(cache, f"{part}_bytes"), wanted), f"{part} differs"
        unused = torch.ones(40, dtype=torch.bool)
        unused[slots] = False
        assert (scale[unused] == 1).all()


@pytest.mark.usefixtures("each_kernel")
def test_a_row_of_one_number_is_nearly_exact() -> None:
    """The scale has 20 bits of mantissa: closer than one bit of fp16 or bf16."""
    pool = PagePool(4, 4)
    cache = KVCache.allocate(pool, **SIZES, format="int4_zp", scales="token")
    numbers = torch.tensor([3.3, -0.007, 250.0, 0.0]).view(4, 1, 1)
    batch = pool.step({pool.sequence(): 1 for _ in range(4)})
    out = quire.step(torch.randn(4, 4, 16), torch.randn(4, 2, 16), numbers.repeat(1, 2, 8), cache, batch)
    assert torch.allclose(out, numbers.expand_as(out), rtol=2.0**-18, atol=0)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_token_spoils_its_own_head_and_sequence_alone(bad: float) -> None:
    pool, g = PagePool(8, 4), torch.Generator().manual_seed(3)
    cache = KVCache.allocate(pool, **SIZES, format="int4_zp", scales="token")
    a, b = pool.sequence(), pool.sequence()
    q, k, v = (torch.randn(14, heads, dim, generator=g) for heads, dim in ((4, 16), (2, 16), (2, 8)))
    clean = KVCache.allocate(pool, **SIZES, format="int4_zp", scales="token")
    batch = pool.step({a: 9, b: 5})
    want = quire.step(q, k, v, clean, batch)
    k[6, 1, 3], v[7, 1, 2] = bad, bad
    got = quire.step(q, k, v, cache, batch)
    assert torch.equal(got[9:], want[9:]), "the other sequence"
    assert torch.equal(got[:, :2], want[:, :2]), "the other key head"
    assert got[6:9, 2:].isnan().all()
    for part, token in (("k", 6), ("v", 7)):
        scale = getattr(cache, f"{part}_scale").view(-1, 2)[batch.slots_of_tokens(14, 4)[token]]
        assert scale[0].isfinite() and not scale[1].isfinite()
    found = [one for one in quire.check(q[:1], cache, pool.step({a: 1})) if "_scale[" in one.argument]
    assert {one.argument[:7] for one in found} == {"k_scale", "v_scale"} and all(one.harmless for one in found)


def vllm_stores(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes and scales of `_reshape_cache_int4_kernel` of vLLM, for rows that its `single_rht` has rotated."""
    low, high = x.amin(-1), x.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = torch.trunc(-low / scale + torch.where(low <= 0, 0.5, -0.5)).clamp(0, 15)
    moved = x * (1 / scale).unsqueeze(-1) + zero.unsqueeze(-1)
    codes = torch.trunc(moved + torch.where(moved >= 0, 0.5, -0.5)).clamp(0, 15).to(torch.uint8)
    packed = (scale.view(torch.int32) & -16) | (zero.to(torch.int32) & 15)
    return codes[..., ::2] | codes[..., 1::2] << 4, packed.view(torch.float32)


@pytest.mark.usefixtures("each_kernel")
def test_pages_of_vllm_are_wrapped() -> None:
    """vLLM's slots hold K, its scale, V and its scale: views with large strides. It reads what Quire writes, too: codes are equal
    but where a quotient is close to the middle between two."""
    g = torch.Generator().manual_seed(5)
    k, v = (torch.randn(24, 2, dim, generator=g) for dim in (16, 8))
    (k_codes, k_scale), (v_codes, v_scale) = vllm_stores(k), vllm_stores(v)
    slots = torch.cat([k_codes, k_scale.unsqueeze(-1).view(torch.uint8), v_codes, v_scale.unsqueeze(-1).view(torch.uint8)], -1)
    pages = slots.view(6, 4, 2, 20)
    scales = pages.view(torch.float32)
    cache = KVCache.wrap(
        pages[..., :8], pages[..., 12:16], layout="nhd", format="int4_zp", k_scale=scales[..., 2], v_scale=scales[..., 4]
    )
    # What vLLM's attention computes with.
    read = [
        (torch.stack((codes & 15, codes >> 4), -1).flatten(-2).double() - (scale.view(torch.int32) & 15).double().unsqueeze(-1))
        * (scale.view(torch.int32) & -16).view(torch.float32).double().unsqueeze(-1)
        for codes, scale in ((k_codes, k_scale), (v_codes, v_scale))
    ]
    q = torch.randn(1, 4, 16, generator=g)
    batch = quire.Batch(torch.tensor([[2, 0, 5]]), torch.tensor([11]), torch.tensor([0, 1]))
    seen = torch.cat([torch.arange(4) + 4 * page for page in (2, 0, 5)])[:11]
    want = quire.reference.attention(q.double(), read[0][seen], read[1][seen])[0]
    assert torch.allclose(quire.attend(q, cache, batch).double(), want, rtol=0, atol=1e-5)
    before = pages.clone()
    quire.write(k, v, cache, slots=torch.arange(24))
    near = [FORMAT.unpack(x[..., :8]).int() for x in (pages, before)]
    assert ((near[0] - near[1]).abs() <= 1).all() and (near[0] == near[1]).float().mean() > 0.95


def test_copies_of_pages_have_their_zero_points() -> None:
    pool = PagePool(6, 4)
    cache = KVCache.allocate(pool, **SIZES, format="int4_zp", scales="token", ledger=True)
    batch = pool.step({pool.sequence(): 7})
    quire.write(torch.randn(7, 2, 16) + 1, torch.randn(7, 2, 8) - 1, cache, batch)
    held = [t.clone() for t in (cache.k, cache.v, cache.k_scale, cache.v_scale) if t is not None]
    pages = batch.page_table[0, :2].tolist()
    host = cache.swap_out(pages)
    free = [page for page in range(6) if page not in pages][:2]
    cache.swap_in(host, free)
    cache.copy_pages([(free[0], pages[1])])
    for before, now in zip(held, (cache.k, cache.v, cache.k_scale, cache.v_scale)):
        assert now is not None
        for source, target in ((pages[0], free[0]), (pages[1], free[1]), (pages[0], pages[1])):
            assert torch.equal(before[source].view(torch.uint8), now[target].view(torch.uint8))
    assert pickle.loads(pickle.dumps(cache)).format is FORMAT
    assert "int4_zp, layout=nhd, scales=token" in repr(cache)


PAGES = torch.zeros(2, 4, 2, 8, dtype=torch.uint8)
TOKEN = torch.ones(2, 4, 2)
SHAPE = r"float32 of shape \[pages, page_size, kv_heads\] \(or scales='token'\): int4_zp has a zero point in each scale"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "without": ({}, f"k_scale: given nothing \\(None\\); allowed: {SHAPE}"),
    "number": ({"k_scale": 0.5, "v_scale": 0.5}, f"k_scale: given 0.5; allowed: {SHAPE}"),
    "per-head": ({"k_scale": torch.ones(2), "v_scale": TOKEN}, f"k_scale: .*; allowed: {SHAPE}"),
    "shape": ({"k_scale": TOKEN[:1], "v_scale": TOKEN.clone()}, r"k_scale: .*; allowed: float32 of shape .*\[2, 4, 2\]"),
    "type": ({"k_scale": TOKEN.double(), "v_scale": TOKEN}, "k_scale: .*float64.*; allowed: float32"),
    "shared": ({"k_scale": TOKEN, "v_scale": TOKEN}, "v_scale|k_scale: given scales that share memory"),
}


@pytest.mark.parametrize("given, message", WRONG.values(), ids=WRONG)
def test_scales_without_room_for_zero_points_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KVCache.wrap(PAGES.clone(), PAGES.clone(), layout="nhd", format="int4_zp", **given)
    with pytest.raises(ArgumentError, match=SHAPE):
        KVCache.allocate(PagePool(2, 4), kv_heads=2, head_dim=16, format="int4_zp", v_scale=1.0, k_scale=1.0)
