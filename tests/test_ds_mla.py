"""Caches in vLLM's `fp8_ds_mla`: reads and writes of every kernel of this CPU against an independent decoding of the bytes, and
what is refused."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch

import quire
from quire import ArgumentError, Batch, ContractError, KVCache, PagePool
from support import ds_mla
from support.kernels import each_kernel  # noqa: F401
from support.scenario import build

SIZES: dict[str, Any] = {"head_dim": 576, "v_in_k": 512, "format": ds_mla.NAME}


def drawn(seed: int) -> dict[str, Any]:
    """A random mixed batch, with some features."""
    r = random.Random(seed)
    kv_lens = [r.choice([1, r.randint(2, 70), r.randint(2, 300)]) for _ in range(r.randint(1, 3))]
    q_lens = [min(r.choice([0, 1, 1, 2, 5, 20]), n) for n in kv_lens]
    q_lens[0] = max(q_lens[0], 1)
    features: dict[str, Any] = r.choice(
        [{}, {}, {"window": 20}, {"window": (7, 3), "causal": False}, {"spans": "chunks"}, {"mask": True}]
    )
    features |= {name: value for name, value in (("softcap", 20.0), ("alibi", True), ("sinks", True)) if r.random() < 0.2}
    if r.random() < 0.3 and not features.keys() & {"spans", "mask"}:
        features["select"] = r.choice(["positions", "columns"])
    return {
        "q_lens": q_lens, "kv_lens": kv_lens, "kv_heads": r.choice([1, 1, 2]), "group": r.choice([1, 4, 16]),
        "page_size": r.choice([1, 4, 16, 64]), "layout": r.choice(["nhd", "hnd"]), "storage": r.choice(["native", "padded"]),
        "q_dtype": r.choice(["fp32", "fp16", "bf16"]), "padding": r.choice([0, 2]),
        "form": "full" if "select" in features else r.choice(["full", "context"]), **SIZES, **features,
    }  # fmt: skip


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("seed", range(16))
def test_random_calls(seed: int) -> None:
    s = build(seed, **drawn(seed))
    assert [v for v in quire.check(s.q, s.cache, s.batch, s.options, new=s.new) if not v.harmless] == []
    s.check(*quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True), factors=s.q.dtype)


def rows(tokens: int, kv_heads: int, seed: int = 5) -> torch.Tensor:
    """Keys whose groups have any size, and groups of what rounding can do wrong: zeros, tiny numbers, ties, NaN and infinity."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kv_heads, 576, generator=g)
    groups = x[..., :512].unflatten(-1, (4, 128))
    groups *= 4.0 ** torch.randint(-6, 6, (tokens, kv_heads, 4, 1), generator=g)
    groups[0, 0, 0], groups[0, 0, 1], groups[0, 0, 2] = 0.0, -0.0, 1e-37 * torch.randn(128, generator=g)
    groups[1, 0, 0] = torch.arange(128) * 0.25 + 416.125  # at 448 and on it, the scale is about 1
    groups[2, 0, 1, 7], groups[3, 0, 2, 0], groups[3, 0, 3, 1] = torch.nan, torch.inf, -torch.inf
    x[4, 0, 513], x[5, 0, 575], x[6, 0, 512] = torch.nan, torch.inf, 1e-40
    return x


SLOTS = [5, -1, 23, 0, 9, 10, 11, 3]


def allocate(kv_heads: int = 2, **given: Any) -> KVCache:
    """A cache of 6 pages of 4 that holds a pattern."""
    cache = KVCache.allocate(PagePool(6, 4), kv_heads=kv_heads, **SIZES | given)
    cache.k.fill_(77)
    return cache


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write(dtype: torch.dtype, layout: str) -> None:
    """Whole keys, and their parts as they are computed: the bytes of the definition. Bits of a NaN are free."""
    k = rows(len(SLOTS), 2).to(dtype)
    parts = k[..., :512].contiguous(), k[..., 512:].contiguous()
    strided = torch.stack((k, k), -1)[..., 0]
    for given in (k, parts, strided):
        cache = allocate(layout=layout)
        stored, want = ds_mla.encoded(k), cache.k.clone()
        by_slot = want if layout == "nhd" else want.transpose(1, 2)
        for row, slot in zip(stored.bytes(), SLOTS):
            if slot >= 0:
                by_slot[slot // 4, slot % 4] = row
        quire.write(given, None, cache, slots=torch.tensor(SLOTS))
        assert torch.equal(without_nan(cache.k), without_nan(want))


def without_nan(pages: torch.Tensor) -> torch.Tensor:
    """Bytes, with one NaN for all."""
    pages = pages.clone()
    codes = pages[..., :512]
    codes[codes & 0x7F == 0x7F] = 0x7F
    for part, dtype in ((slice(512, 528), torch.float32), (slice(528, 656), torch.bfloat16)):
        numbers = pages[..., part].contiguous().view(dtype)
        pages[..., part] = torch.where(numbers.isnan(), torch.nan, numbers).view(torch.uint8)
    return pages


@pytest.mark.usefixtures("each_kernel")
def test_pages_of_vllm() -> None:
    """[blocks, block_size, 656] bytes, with a gap after each block, as vLLM allocates them: written and read in place."""
    memory = torch.zeros(6, 4 * 656 + 64, dtype=torch.uint8)
    pages = memory[:, : 4 * 656].unflatten(1, (4, 656))
    pool = PagePool(6, 4)
    cache = KVCache.wrap(pages.unsqueeze(2), layout="nhd", format=ds_mla.NAME, v_in_k=512, pool=pool)
    assert cache.k.data_ptr() == memory.data_ptr() and cache.v.shape == (6, 4, 1, 528)
    assert (cache.head_dim, cache.v_head_dim, cache.v_in_k, cache.scale_kind) == (576, 512, 512, "none")
    assert "576 (v_in_k=512), fp8_ds_mla" in repr(cache)
    batch = pool.step({pool.sequence(): 9})
    k, q = torch.randn(9, 1, 576), torch.randn(9, 16, 576)
    out, lse = quire.step(q, (k[..., :512], k[..., 512:]), None, cache, batch, lse=True)
    dense = ds_mla.encoded(k).double()
    want, want_lse = quire.reference.attention(q, dense, dense[..., :512])
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=1e-5)
    assert not memory[:, 4 * 656 :].any()


def test_copies_of_a_cache() -> None:
    cache = allocate(ledger=True)
    cache.k.copy_(torch.randint(0, 100, cache.k.shape, dtype=torch.uint8))
    deep, empty = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    for one in (deep, empty):
        assert one.v.data_ptr() == one.k.data_ptr() != cache.k.data_ptr() and one.storage == cache.storage
    assert torch.equal(deep.k, cache.k) and not empty.k.any()
    host = cache.swap_out([4, 1])
    deep.swap_in(host, [0, 2])
    deep.copy_pages([(0, 3)])
    for to, of in ((0, 4), (2, 1), (3, 4)):
        assert torch.equal(deep.k[to], cache.k[of])


def test_compiled() -> None:
    pool = PagePool(8, 16)
    made = [KVCache.allocate(pool, kv_heads=1, **SIZES) for _ in range(2)]
    batch = pool.step({pool.sequence(): 20})
    q, latent, rope = torch.randn(20, 8, 576), torch.randn(20, 1, 512), torch.randn(20, 1, 64)

    def model(cache: KVCache) -> torch.Tensor:
        return quire.step(q, (latent, rope), None, cache, batch)

    assert torch.equal(model(made[0]), torch.compile(model, fullgraph=True, backend="aot_eager")(made[1]))
    assert torch.equal(made[0].k, made[1].k) and made[0].k.any()


def test_no_write_warns_of_losses() -> None:
    """Scales of groups fit any numbers."""
    pool = PagePool(8, 16)
    cache = KVCache.allocate(pool, kv_heads=1, **SIZES)
    batch = pool.step({pool.sequence(): 2})
    with quire.checked():
        quire.write(torch.randn(2, 1, 576) * torch.tensor([1e-20, 1e20]).view(2, 1, 1), None, cache, batch)


BYTES = torch.zeros(4, 4, 1, 656, dtype=torch.uint8)


@pytest.mark.parametrize("given, message", [
    ({"head_dim": 512}, "head_dim: given 512; allowed: 576 with fp8_ds_mla"),
    ({"v_in_k": 256}, "v_in_k: given 256; allowed: 512 with fp8_ds_mla: V is the latent"),
    ({"v_in_k": None, "head_dim": 128}, "v_in_k: given nothing (None); allowed: 512 with fp8_ds_mla"),
    ({"v_in_k": None, "format": None, "v_format": "fp8_ds_mla", "head_dim": 128}, "v_in_k: given nothing (None)"),
    ({"layout": "vllm_x"}, "layout"),
    ({"k_scale": 2.0}, "k_scale: given 2.0; allowed: None: format fp8_ds_mla has its scales in the pages"),
    ({"scales": "token"}, "scales"),
    ({"dtype": torch.float8_e4m3fn}, "over torch.float8_e4m3fn storage"),
])  # fmt: skip
def test_what_cannot_be_allocated(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        KVCache.allocate(PagePool(4, 4), kv_heads=1, **SIZES | given)
    assert message in str(caught.value)


@pytest.mark.parametrize("pages, given, message", [
    (BYTES[..., :576], {}, "k_pages: given uint8[4, 4, 1, 576] on cpu; allowed: a last axis of 656"),
    (BYTES, {"v_in_k": None}, "v_in_k: given nothing (None); allowed: 512"),
    (torch.zeros(4, 4, 1, 658, dtype=torch.uint8)[..., :656], {}, "k_pages: given strides (2632, 658, 658, 1) from byte 0"),
    (torch.zeros(4, 4, 1, 660, dtype=torch.uint8)[..., 1:657], {}, "from byte 1; allowed: contiguous rows"),
    (BYTES, {"k_scale": 2.0}, "k_scale"),
    (BYTES.view(torch.float8_e4m3fn), {}, "format"),
], ids=["short", "no v_in_k", "strides", "offset", "scale", "type"])  # fmt: skip
def test_what_cannot_be_wrapped(pages: torch.Tensor, given: dict[str, Any], message: str) -> None:
    how: dict[str, Any] = {"layout": "nhd", "format": ds_mla.NAME, "v_in_k": 512} | given
    with pytest.raises(ArgumentError) as caught:
        KVCache.wrap(pages, **how)
    assert message in str(caught.value)


def test_batch_invariance_refuses_the_context_form() -> None:
    """New keys are exact in this call and quantised in the next one."""
    cache = allocate(kv_heads=1)
    batch = Batch(torch.zeros(1, 1).int(), torch.tensor([2]).int(), torch.tensor([0, 2]).int())
    q, k = torch.randn(2, 3, 576), torch.randn(2, 1, 576)
    with pytest.raises(ContractError, match="batch_invariant"):
        quire.attend(q, cache, batch, quire.Options(batch_invariant=True), new=(k, None))
