"""Latent caches (`v_in_k`): V is the first elements of K. Attention and writes of every kernel of this CPU against float64 and
formulas of the tests' own; what belongs to a cache; refusals; and multi-head latent attention, absorbed and expanded."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch

import quire
from quire import ArgumentError, Batch, ContractError, KVCache, PagePool, reference
from support.kernels import each_kernel  # noqa: F401
from support.scenario import LARGEST, TYPES, build, in_bytes

FORMATS = [format for format in TYPES if format != "int4_zp" and not format.startswith("nvfp4")]
FLOATS = [format for format in FORMATS if format not in LARGEST]


# Attention.


def drawn(seed: int) -> dict[str, Any]:
    """A random mixed batch over a latent cache, with some features."""
    r = random.Random(seed)
    seqs = r.randint(1, 3)
    kv_lens = [r.choice([1, r.randint(2, 70), r.randint(2, 300)]) for _ in range(seqs)]
    q_lens = [min(r.choice([0, 1, 1, 2, 5, 20]), n) for n in kv_lens]
    q_lens[0] = max(q_lens[0], 1)
    sizes = [(24, 16), (576, 512), (96, 64), (20, 12), (192, 128), (40, 34), (33, 32), (100, 2), (33, 33), (200, 200)]
    head_dim, v_in_k = r.choice(sizes)
    format = r.choice([f for f in FORMATS if f != "int4" or not (head_dim % 2 or v_in_k % 2)])
    features: dict[str, Any] = r.choice(
        [{}, {}, {"window": 20}, {"window": (7, 3), "causal": False}, {"spans": "chunks"}, {"mask": True}]
    )
    features |= {name: value for name, value in (("softcap", 20.0), ("alibi", True), ("sinks", True)) if r.random() < 0.2}
    if r.random() < 0.2 and not features.keys() & {"spans", "mask"}:
        features["select"] = r.choice(["positions", "columns"])
    return {
        "q_lens": q_lens, "kv_lens": kv_lens, "head_dim": head_dim, "v_in_k": v_in_k, "format": format,
        "kv_heads": r.choice([1, 1, 2]), "group": r.choice([1, 3, 4, 16] if head_dim < 200 else [1, 4]),
        "page_size": r.choice([1, 4, 16, 64]), "layout": r.choice(["nhd", "hnd"]), "scales": r.choice(["tensor", "head", "token"]),
        "q_dtype": format if format in FLOATS else r.choice(FLOATS), "padding": r.choice([0, 2]),
        "form": "full" if "select" in features else r.choice(["full", "context"]),
        "index": r.choice([(torch.int32,) * 3, (torch.int64,) * 3]), **features,
    }  # fmt: skip


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("seed", range(30))
def test_random_calls(seed: int) -> None:
    s = build(seed, **drawn(seed))
    assert [v for v in quire.check(s.q, s.cache, s.batch, s.options, new=s.new) if not v.harmless] == []
    s.check(*quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True), factors=s.q.dtype)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("dims, form", [
    ((1, 1), "full"), ((33, 20), "context"), ((512, 512), "full"), ((576, 40), "full"),
    ((576, 288), "context"), ((576, 544), "full"), ((576, 576), "full"), ((576, 576), "context"),
], ids=str)  # fmt: skip
def test_every_pair_of_sizes(dims: tuple[int, int], form: str) -> None:
    """A decode whose keys are divided into units, and a prefill, with a window."""
    case: dict[str, Any] = {"head_dim": dims[0], "v_in_k": dims[1], "kv_heads": 1, "group": 2, "page_size": 16, "window": 120}
    case |= {"format": "e4m3fn", "q_dtype": "bf16", "scales": "token"} if form == "full" else {"format": "bf16", "q_dtype": "bf16"}
    s = build(5, [1, 20], [130, 30], form=form, **case)
    s.check(*quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True), factors=s.q.dtype)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("q_lens, kv_lens", [([1], [300]), ([3, 1], [90, 40]), ([40], [40])], ids=["decode", "verify", "prefill"])
@pytest.mark.parametrize("format, q_dtype", [("bf16", "bf16"), ("e4m3fn", "bf16"), ("fp32", "fp32")])
def test_the_sizes_of_deepseek(q_lens: list[int], kv_lens: list[int], format: str, q_dtype: str) -> None:
    """128 heads over one head of 576, of which 512 are values."""
    case: dict[str, Any] = {"kv_heads": 1, "group": 128, "head_dim": 576, "v_in_k": 512, "page_size": 64, "scale": 192**-0.5}
    s = build(7, q_lens, kv_lens, format=format, q_dtype=q_dtype, **case)
    s.check(*quire.attend(s.q, s.cache, s.batch, s.options, lse=True), factors=s.q.dtype)


# Writes.


def pages_of(format: str, scales: str, layout: str = "nhd", kv_heads: int = 2, dims: tuple[int, int] = (24, 16)) -> KVCache:
    """A cache of 6 pages of 4 that holds a pattern; scales are not 1."""
    head_dim, first = dims
    given: dict[str, Any] = {"layout": layout, "dtype": TYPES[format], "format": format}
    if format in LARGEST:
        one = 3.0 / LARGEST[format]
        given |= {
            "tensor": {"k_scale": one},
            "head": {"k_scale": one * torch.linspace(1, 1.5, kv_heads)},
            "token": {"scales": "token"},
        }[scales]
    cache = KVCache.allocate(PagePool(6, 4), kv_heads=kv_heads, head_dim=head_dim, v_in_k=first, **given)
    cache.k_bytes.view(torch.uint8).fill_(77)
    return cache


SLOTS = [5, -1, 23, 0, 9, 10, 11]


def expected(cache: KVCache, k: torch.Tensor, format: str, layout: str) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The bytes of K after a write of whole keys `[tokens, kv_heads, head_dim]`, and the scale of each slot that is written."""
    want = cache.k_bytes.clone().view(torch.uint8)
    by_slot = want if layout == "nhd" else want.transpose(1, 2)
    scale_of: dict[int, torch.Tensor] = {}
    for row, slot in zip(k.float(), SLOTS):
        if slot < 0:
            continue
        if format in LARGEST:
            if cache.scale_kind == "token":
                largest = row.abs().amax(-1)
                scale = torch.where(largest == 0, 1.0, largest / LARGEST[format])
            else:
                scale = cache.k_scale.expand(row.shape[0])  # type: ignore[union-attr]
            scale_of[slot] = scale
            row = (row / scale[:, None]).clamp(-LARGEST[format], LARGEST[format])
            row = row.round().to(torch.int8) if format.startswith("int") else row
        stored = row if format == "int4" else row.to(TYPES[format])
        by_slot[slot // 4, slot % 4] = in_bytes(stored, format).view(torch.uint8)
    return want, scale_of


def check_write(cache: KVCache, given: Any, k: torch.Tensor, format: str, layout: str = "nhd") -> None:
    want, scale_of = expected(cache, k, format, layout)
    quire.write(given, None, cache, slots=torch.tensor(SLOTS))
    assert torch.equal(cache.k_bytes.view(torch.uint8), want)
    for slot, scale in scale_of.items() if cache.scale_kind == "token" else ():
        assert torch.equal(cache.k_scale[slot // 4, slot % 4], scale)  # type: ignore[index]


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("format", FORMATS)
def test_write(format: str, scales: str, layout: str) -> None:
    """Whole keys, and their parts as they are computed: the same bytes, one scale for both parts."""
    for dims in ((24, 16), (38, 2), (24, 24)):
        g = torch.Generator().manual_seed(3)
        k = torch.randn(len(SLOTS), 2, dims[0], generator=g).to(torch.float32 if format == "fp32" else torch.bfloat16)
        k[0, 0, : dims[1]] *= 0.01  # the largest element is in the second part, then in the first
        k[2, 1, dims[1] :] *= 0.01
        k[3] = 0.0
        parts = k[..., : dims[1]].contiguous(), k[..., dims[1] :].contiguous()
        strided = k.transpose(0, 1).contiguous().transpose(0, 1), torch.stack((k, k), -1)[..., 0]
        for given in (k, *strided) if dims[0] == dims[1] else (k, parts, *strided):
            check_write(pages_of(format, scales, layout, dims=dims), given, k, format, layout)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("part", [0, 20])
def test_a_nan_in_either_part_makes_the_scale_nan(part: int) -> None:
    cache, k = pages_of("e4m3fn", "token"), torch.randn(len(SLOTS), 2, 24)
    k[2, 1, part] = torch.nan
    quire.write(k, None, cache, slots=torch.tensor(SLOTS))
    assert cache.k_scale is not None
    assert cache.k_scale[5, 3].isnan().tolist() == [False, True]


@pytest.mark.usefixtures("each_kernel")
def test_step_and_context_form() -> None:
    """A step with both parts, the call in context form, and write then attend: one result."""
    pool = PagePool(8, 16)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=96, v_in_k=64, dtype=torch.float32)
    a, b = pool.sequence(), pool.sequence()
    first = pool.step({a: 30, b: 3})
    quire.write(torch.randn(33, 1, 96), None, cache, first)
    batch = pool.step({a: 1, b: 20})
    q, latent, rope = torch.randn(21, 16, 96), torch.randn(21, 1, 64), torch.randn(21, 1, 32)
    k = torch.cat((latent, rope), -1)
    beside = quire.attend(q, cache, batch, new=(k, None))
    out = quire.step(q, (latent, rope), None, cache, batch)
    torch.testing.assert_close(beside, out)
    other = copy.deepcopy(cache)
    other.k.zero_()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(quire.attend(q, other, batch), out)
    assert torch.equal(quire.attend(q, cache, batch), out)
    assert torch.equal(quire.step(q, k, None, cache, batch), out)


# What belongs to a cache.


def test_views_and_sizes() -> None:
    cache = pages_of("e4m3fn", "tensor")
    assert (cache.head_dim, cache.v_head_dim, cache.v_in_k) == (24, 16, 16)
    assert cache.v.data_ptr() == cache.k.data_ptr() and cache.v.shape == (6, 4, 2, 16)
    assert cache.v_scale is cache.k_scale and cache.v_format is cache.k_format
    assert "24 (v_in_k=16)" in repr(cache)
    cache.k_scale = torch.tensor(0.5)
    assert cache.v_scale is cache.k_scale and float(cache.v_scale) == 0.5
    with pytest.raises(ArgumentError, match=r"v_scale.*k_scale"):
        cache.v_scale = torch.tensor(2.0)
    int4 = pages_of("int4", "tensor")
    assert int4.k.shape[-1] == 12 and int4.v.shape[-1] == 8


@pytest.mark.parametrize("scales", ["tensor", "token"])
def test_copies_of_a_cache(scales: str) -> None:
    """V stays a part of K, and K is copied once."""
    cache = pages_of("e4m3fn", scales)
    cache.k_bytes.copy_(torch.randint(0, 100, cache.k.shape, dtype=torch.uint8))
    if scales == "token":
        cache.k_scale.copy_(torch.rand(cache.k_scale.shape))  # type: ignore[union-attr, arg-type]
    deep, empty = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    for one in (deep, empty):
        assert one.v.data_ptr() == one.k.data_ptr() != cache.k.data_ptr() and one.storage == cache.storage and one.v_in_k == 16
        assert one.v_scale is one.k_scale
    assert torch.equal(deep.k_bytes, cache.k_bytes) and torch.equal(deep.k_scale, cache.k_scale) and not empty.k_bytes.any()
    host = cache.swap_out([4, 1])
    assert host.memory.numel() < 1.3 * 2 * (cache.k_bytes[0].numel() + 4 * 8 * (scales == "token")) + 64
    deep.k_bytes.zero_()
    deep.swap_in(host, [0, 2])
    deep.copy_pages([(0, 3)])
    for to, of in ((0, 4), (2, 1), (3, 4)):
        assert torch.equal(deep.k_bytes[to], cache.k_bytes[of])
        assert scales == "tensor" or torch.equal(deep.k_scale[to], cache.k_scale[of])  # type: ignore[index]


def test_a_ledger_counts_a_latent_cache() -> None:
    pool = PagePool(4, 4)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=24, v_in_k=16, dtype=torch.float32, ledger=True)
    batch = pool.step({pool.sequence(): 6})
    q, k = torch.randn(6, 3, 24), torch.randn(6, 1, 24)
    assert any(v.rule == "residency" for v in quire.check(q, cache, batch))
    quire.step(q, k, None, cache, batch)
    assert quire.check(q, cache, batch) == []


@pytest.mark.parametrize(
    "scales", [{"dtype": torch.float32}, {"dtype": torch.float8_e4m3fn, "scales": "token"}], ids=["fp32", "token"]
)
def test_compiled(scales: dict[str, Any]) -> None:
    """One graph; functionalization sees one tensor of pages, which is written."""
    pool = PagePool(8, 16)
    made = [KVCache.allocate(pool, kv_heads=1, head_dim=96, v_in_k=64, **scales) for _ in range(2)]
    batch = pool.step({pool.sequence(): 20})
    q, latent, rope = torch.randn(20, 8, 96), torch.randn(20, 1, 64), torch.randn(20, 1, 32)

    def model(cache: KVCache) -> tuple[torch.Tensor, ...]:
        out = quire.step(q, (latent, rope), None, cache, batch)
        k = torch.cat((latent, rope), -1)
        quire.write(k, None, cache, batch)
        return out, quire.attend(q, cache, batch, new=(k, None))

    want, got = model(made[0]), torch.compile(model, fullgraph=True, backend="aot_eager")(made[1])
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert torch.equal(made[0].k_bytes, made[1].k_bytes) and made[0].k_bytes.any()


# Refusals.


def allocate(**given: Any) -> KVCache:
    return KVCache.allocate(PagePool(4, 4), **{"kv_heads": 1, "head_dim": 24, "v_in_k": 16} | given)


@pytest.mark.parametrize("given, message", [
    ({"v_in_k": 25}, "v_in_k: given 25; allowed: at most head_dim = 24"),
    ({"v_in_k": 0}, "v_in_k: given 0"),
    ({"v_in_k": True}, "v_in_k"),
    ({"v_in_k": 577, "head_dim": 576}, "v_in_k: given 577; allowed: an int of 1 to 576"),
    ({"head_dim": 577}, "head_dim: given 577; allowed: 1 to 576"),
    ({"head_dim": 513, "v_in_k": None}, "head_dim: given 513; allowed: 1 to 512"),
    ({"v_head_dim": 16}, "v_head_dim: given 16; allowed: None with v_in_k"),
    ({"v_format": "bf16"}, "v_format"),
    ({"format": "e4m3fn", "v_scale": 2.0}, "v_scale: given 2.0; allowed: None with v_in_k"),
    ({"layout": "vllm_joint"}, "layout: given 'vllm_joint'; allowed: nhd or hnd with v_in_k"),
    ({"layout": "vllm_x"}, "layout"),
    ({"format": "int4", "k_scale": 0.5, "v_in_k": 15}, "v_in_k: given 15; allowed: a multiple of 2"),
    ({"format": "nvfp4"},
     "format: given 'nvfp4' with v_in_k; allowed: fp32, fp16, bf16, e4m3fn, e4m3fnuz, e5m2, int8, int4, fp8_ds_mla: "),
    ({"format": "int4_zp", "scales": "token", "head_dim": 24, "v_in_k": 16}, "format: given 'int4_zp' with v_in_k; allowed: fp32"),
    ({"k_format": "nvfp4", "head_dim": 576, "v_in_k": 512}, "format: given 'nvfp4' with v_in_k"),
    ({"format": "nvfp4_swizzled", "head_dim": 576, "v_in_k": 512}, "format: given 'nvfp4_swizzled' with v_in_k"),
])  # fmt: skip
def test_what_cannot_be_allocated(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        allocate(**given)
    assert message in str(caught.value)


def test_what_cannot_be_wrapped() -> None:
    pages = torch.zeros(4, 4, 1, 24)
    assert KVCache.wrap(pages, layout="nhd", v_in_k=16).v.shape[-1] == 16
    for given, name in (((pages, pages), "v_pages"), ((pages[:, :, 0],), "k_pages"), ((pages[..., :15],), "v_in_k")):
        with pytest.raises(ArgumentError, match=name):
            KVCache.wrap(*given, layout="nhd", v_in_k=16)
    for format in ("nvfp4", "nvfp4_swizzled"):
        with pytest.raises(ArgumentError, match=f"format: given '{format}' with v_in_k"):
            KVCache.wrap(torch.zeros(4, 4, 1, 72, dtype=torch.uint8), layout="nhd", format=format, v_in_k=64)


def test_what_cannot_be_written_or_attended() -> None:
    cache, batch = (
        allocate(dtype=torch.float32),
        Batch(torch.zeros(1, 1).int(), torch.tensor([2]).int(), torch.tensor([0, 2]).int()),
    )
    q, k = torch.randn(2, 3, 24), torch.randn(2, 1, 24)
    first, rest, whole = k[..., :16], k[..., 16:], allocate(v_in_k=24, dtype=torch.float32)
    plain = KVCache.allocate(PagePool(4, 4), kv_heads=1, head_dim=24, v_head_dim=16, dtype=torch.float32)
    refused: list[tuple[type[Exception], str, Any]] = [
        (ArgumentError, "v: given .*V is the first 16 elements of K", lambda: quire.write(k, first, cache, batch)),
        (ArgumentError, "k: given .*2, 24.*its parts", lambda: quire.write(k[:, 0], None, cache, batch)),
        (ArgumentError, "k: given .*16.*or a pair of its parts", lambda: quire.write(first, None, cache, batch)),
        (ArgumentError, "3 parts", lambda: quire.write((first, rest, rest), None, cache, batch)),  # type: ignore[arg-type]
        (ContractError, r"k\[1\]", lambda: quire.write((first, first), None, cache, batch)),
        (ContractError, r"k\[0\]", lambda: quire.write((rest, rest), None, cache, batch)),
        (ContractError, r"(?s)k\[1\].*the type of k\[0\]", lambda: quire.write((first, rest.half()), None, cache, batch)),
        (ContractError, "memory shared with", lambda: quire.write(cache.k[0, :2], None, cache, batch)),
        (ArgumentError, r"new\[1\]", lambda: quire.attend(q, cache, batch, new=(k, first))),
        (ContractError, r"new\[0\]", lambda: quire.attend(q, cache, batch, new=(first, None))),
        (ArgumentError, "2 parts.*V is all of K", lambda: quire.write((k, k[..., :0]), None, whole, batch)),
        (ArgumentError, "k: given .*16.*V is all of K", lambda: quire.write(first, None, whole, batch)),
        (ArgumentError, "v: given nothing", lambda: quire.write(k, None, plain, batch)),
        (ArgumentError, r"new\[1\]", lambda: quire.attend(q, plain, batch, new=(k, None))),
        (ArgumentError, "k", lambda: quire.write((first, rest), first, plain, batch)),
    ]
    before = cache.k.clone()
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(cache.k, before)


# Multi-head latent attention.


class Attention:
    """The projections of one layer of DeepSeek, small: q of `nope + rope` elements, and a latent that gives keys and values."""

    def __init__(self, heads: int = 4, latent: int = 64, nope: int = 24, rope: int = 8, value: int = 16):
        g = torch.Generator().manual_seed(1)
        self.heads, self.latent, self.nope, self.rope, self.value = heads, latent, nope, rope, value
        self.to_key = torch.randn(heads, nope, latent, generator=g, dtype=torch.float64) * latent**-0.5
        self.to_value = torch.randn(heads, value, latent, generator=g, dtype=torch.float64) * latent**-0.5
        self.scale = (nope + rope) ** -0.5

    def expanded(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[tokens, heads, nope + rope]` and values `[tokens, heads, value]` of one head each."""
        k = torch.einsum("hnl,tl->thn", self.to_key, latent)
        return torch.cat((k, rope[:, None].expand(-1, self.heads, -1)), -1), torch.einsum("hvl,tl->thv", self.to_value, latent)

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.einsum("thn,hnl->thl", q[..., : self.nope], self.to_key), q[..., self.nope :]), -1)

    def values_of(self, out: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thl,hvl->thv", out, self.to_value)


@pytest.mark.usefixtures("each_kernel")
def test_absorbed_and_expanded() -> None:
    """Both ways against plain multi-head attention in float64; and a chunk whose own keys are expanded, merged with the absorbed
    context."""
    layer, g = Attention(), torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    context, tokens = 37, 20
    latent, rope, q = (
        draw(context + tokens, layer.latent),
        draw(context + tokens, layer.rope),
        draw(tokens, layer.heads, layer.nope + layer.rope),
    )
    k, v = layer.expanded(latent, rope)
    want, want_lse = reference.attention(q, k, v, scale=layer.scale)

    pool = PagePool(8, 16)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=layer.latent + layer.rope, v_in_k=layer.latent, dtype=torch.float32)
    s = pool.sequence()
    quire.write((latent[:context, None].float(), rope[:context, None].float()), None, cache, pool.step({s: context}))
    batch, scale = pool.step({s: tokens}), quire.Options(scale=layer.scale)
    parts = latent[context:, None].float(), rope[context:, None].float()
    absorbed = layer.absorbed(q).float()
    out, lse = quire.step(absorbed, parts, None, cache, batch, scale, lse=True)
    torch.testing.assert_close(layer.values_of(out.double()), want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)

    # The context alone: nothing of the new tokens is visible to a call that sees the keys before them.
    spans = torch.tensor([[0, context]] * tokens, dtype=torch.int32)
    before = Batch(batch.page_table, batch.kv_lens, batch.q_starts, spans=spans)
    of_context, context_lse = quire.attend(absorbed, cache, before, quire.Options(scale=layer.scale), lse=True)
    # The new tokens alone: context form without a context, over a cache without pages that are read.
    empty = KVCache.allocate(PagePool(1, 16), kv_heads=layer.heads, head_dim=32, v_head_dim=layer.value, dtype=torch.float32)
    alone = Batch(torch.zeros(1, 0, dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32), batch.q_starts)
    of_new, new_lse = quire.attend(q.float(), empty, alone, scale, new=(k[context:].float(), v[context:].float()), lse=True)
    merged, merged_lse = quire.merge([layer.values_of(of_context.double()).float(), of_new], [context_lse, new_lse])
    torch.testing.assert_close(merged.double(), want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(merged_lse.double(), want_lse, atol=1e-5, rtol=1e-5)
