"""Caches whose keys are Hadamard-transformed: the transform against its definition, unchanged scores, less error with large dims,
and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import quire
from quire import ArgumentError, Batch, KVCache, PagePool
from quire.cache.hadamard import hadamard
from support.kernels import each_kernel  # noqa: F401


def matrix(n: int) -> torch.Tensor:
    """By its definition: the sign of an entry is the parity of the common bits of its row and column."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)], dtype=torch.float64) / n**0.5


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128, 256, 512])
def test_the_transform(n: int) -> None:
    x = torch.randn(5, 3, n, generator=torch.Generator().manual_seed(n))
    want = x.double() @ matrix(n)
    # log2(n) additions, each rounded once, of numbers no larger than the sum of all; a product.
    bound = (n.bit_length() + 1) * 2.0**-24 * x.double().abs().sum(-1, keepdim=True) / n**0.5
    assert ((hadamard(x).double() - want).abs() <= bound).all()
    assert torch.equal(hadamard(x)[2:3], hadamard(x[2:3])), "the bits of a row depend on other rows"
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    half = x.to(torch.bfloat16)
    assert torch.equal(hadamard(half), hadamard(half.float()).to(torch.bfloat16))


def test_a_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 2, 16)
    x[1, 0, 3] = torch.nan
    assert hadamard(x).isnan().any(-1).tolist() == [[False, False], [True, False], [False, False]]


def drawn(outliers: bool, tokens: int = 90) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, heads, 64, generator=g) for heads in (8, 2, 2))
    if outliers:
        k[..., :2] *= 10
        q[..., :2] /= 10
    return q, k, v


def cache_of(pool: PagePool, **given: Any) -> KVCache:
    return KVCache.allocate(pool, kv_heads=2, head_dim=64, **{"format": "int4", "v_format": "bf16", "scales": "token"} | given)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("options", [{}, {"window": 20, "sinks": torch.zeros(8)}], ids=["plain", "window"])
def test_an_output_is_that_of_transformed_queries_and_keys(options: dict[str, Any]) -> None:
    """Bit for bit, in full and in context form."""
    pool, how = PagePool(32, 16), quire.Options(**options)
    inside, outside = cache_of(pool, hadamard=True), cache_of(pool)
    a, b = pool.sequence(), pool.sequence()
    q, k, v = drawn(outliers=True)
    batch = pool.step({a: 60, b: 30})
    out, lse = quire.step(q, k, v, inside, batch, how, lse=True)
    want, want_lse = quire.step(hadamard(q), hadamard(k), v, outside, batch, how, lse=True)
    assert torch.equal(inside.k, outside.k) and torch.equal(inside.k_scale, outside.k_scale)  # type: ignore[arg-type]
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    batch = pool.step({a: 1, b: 3})
    q, k, v = q[:4], k[:4], v[:4]
    assert torch.equal(
        quire.attend(q, inside, batch, how, new=(k, v)), quire.attend(hadamard(q), outside, batch, how, new=(hadamard(k), v))
    )
    quire.write(k, v, inside, batch)
    quire.write(hadamard(k), v, outside, batch)
    assert torch.equal(inside.k, outside.k)
    assert torch.equal(quire.attend(q, inside, batch, how), quire.attend(hadamard(q), outside, batch, how))


def error_of(format: str, outliers: bool, **given: Any) -> float:
    """The relative error of the output against float64 over the numbers as they were given."""
    pool = PagePool(32, 16)
    cache = cache_of(pool, format=format, **given)
    q, k, v = drawn(outliers)
    v = v.bfloat16().float()
    out = quire.step(q, k, v, cache, pool.step({pool.sequence(): 90}))
    want, _ = quire.reference.attention(q, k, v)
    return float((out.double() - want).norm() / want.norm())


def test_large_dims_cost_less_accuracy() -> None:
    """Two dims of 64, ten times as large as the others, set the scale of a head of keys: with the transform they are spread over
    all dims. Without large dims it changes little."""
    for format in ("int4", "int8"):
        assert error_of(format, True, hadamard=True) < 0.5 * error_of(format, True)
        assert error_of(format, False, hadamard=True) < 1.25 * error_of(format, False)


def test_a_fine_format_shows_that_scores_do_not_change() -> None:
    assert error_of("int8", False, hadamard=True) < 0.01


def test_what_belongs_to_a_cache() -> None:
    pool = PagePool(8, 16)
    cache = cache_of(pool, hadamard=True)
    assert cache.hadamard and "hadamard int4/bf16" in repr(cache) and not cache_of(pool).hadamard
    for other in (copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.hadamard
    cache.swap_in(cache.swap_out([1]), [2])
    with pytest.raises(ArgumentError, match="host"):
        cache_of(pool).swap_in(cache.swap_out([1]), [2])
    k, v = (torch.zeros(8, 16, 2, n, dtype=torch.uint8) for n in (32, 32))
    assert KVCache.wrap(k, v, layout="nhd", format="int4", k_scale=0.5, v_scale=0.5, hadamard=True).hadamard


def test_checks_and_ledger() -> None:
    pool = PagePool(8, 16)
    cache = cache_of(pool, hadamard=True, ledger=True)
    q, k, v = drawn(True, tokens=20)
    with quire.checked(results=True):
        batch = pool.step({pool.sequence(): 20})
        quire.step(q, k, v, cache, batch)
        assert quire.check(q, cache, batch) == []


def test_compiled() -> None:
    pool = PagePool(8, 16)
    made = [cache_of(pool, hadamard=True) for _ in range(2)]
    batch = pool.step({pool.sequence(): 20})
    q, k, v = drawn(True, tokens=20)

    def model(cache: KVCache) -> torch.Tensor:
        return quire.step(q, k, v, cache, batch)

    assert torch.equal(model(made[0]), torch.compile(model, fullgraph=True, backend="aot_eager")(made[1]))
    assert torch.equal(made[0].k, made[1].k)


def test_batch_invariance() -> None:
    """The bits of a row do not depend on the others."""
    pool = PagePool(32, 16)
    cache = cache_of(pool, hadamard=True)
    a, b = pool.sequence(), pool.sequence()
    q, k, v = drawn(True)
    batch, options = pool.step({a: 60, b: 30}), quire.Options(batch_invariant=True)
    both = quire.step(q, k, v, cache, batch, options)
    alone = Batch(batch.page_table[1:], batch.kv_lens[1:], torch.tensor([0, 30], dtype=batch.q_starts.dtype))
    assert torch.equal(quire.attend(q[60:], cache, alone, options), both[60:])


@pytest.mark.parametrize("given, message", [
    ({"hadamard": 1}, "hadamard: given 1; allowed: True or False"),
    ({"head_dim": 80}, "hadamard: given True with head_dim = 80; allowed: a head_dim that is a power of two"),
    ({"format": "bf16", "scales": None}, "hadamard: given True with K in bf16; allowed: a quantised format of K"),
    ({"v_in_k": 32}, "hadamard: given True; allowed: False with v_in_k"),
])  # fmt: skip
def test_what_cannot_be_allocated(given: dict[str, Any], message: str) -> None:
    how = {"kv_heads": 2, "head_dim": 64, "format": "int8", "scales": "token", "hadamard": True}
    with pytest.raises(ArgumentError) as caught:
        KVCache.allocate(PagePool(4, 4), **how | given)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_what_is_refused() -> None:
    pool = PagePool(8, 16)
    cache = cache_of(pool, hadamard=True, format="e4m3fn", v_format="e4m3fn")
    batch = pool.step({pool.sequence(): 3})
    q, k, v = (x[:3] for x in drawn(False))
    rope = quire.Rope(torch.ones(4, 32), torch.zeros(4, 32))
    for call in (lambda: quire.write(k, v, cache, batch, rope=rope), lambda: quire.step(q, k, v, cache, batch, rope=rope)):
        with pytest.raises(ArgumentError, match=r"rope.*rope\.rotate"):
            call()
    quire.write(k, v, cache, batch)
    with pytest.raises(ArgumentError, match=r"q: .*fp8 would be rounded again"):
        quire.attend(q.to(torch.float8_e4m3fn), cache, batch, quire.Options(q_scale=1.0))
    with pytest.raises(quire.ContractError, match="q"):
        quire.attend(q[..., :32], cache, batch)
