"""What is not required binds nobody, and what one sequence holds does not stop another: faults of an independent review."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from quire import Batch, ContractError, KVCache, Options, PagePool
from quire.kernels.native.library import FILE
from support.scenario import build

KERNELS = ["torch", *(["native"] if FILE.exists() else [])]


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("name", ["k", "v", "both"])
def test_a_write_of_what_lies_in_the_cache(name: str) -> None:
    """Tokens that lie in the cache would change while they are written: native gave other numbers than torch."""
    cache = KVCache.wrap(torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8), layout="nhd")
    before = cache.k.clone(), cache.v.clone()
    batch = Batch(i(1)[None], i(3), i(0, 3))
    inside = cache.k.view(-1, 2, 8)[3:6]
    k = inside if name != "v" else torch.randn(3, 2, 8)
    v = cache.v.view(-1, 2, 8)[2:5] if name == "both" else inside if name == "v" else torch.randn(3, 2, 8)
    with pytest.raises(ContractError, match=r"\[ownership\] [kv](.|\n)*memory shared with the cache's [KV]"):
        quire.write(k, v, cache, batch)
    with pytest.raises(ContractError, match=r"\[ownership\]"):
        quire.step(torch.randn(3, 2, 8), k, v, cache, batch)
    assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])
    quire.write(k.clone(), v.clone(), cache, batch)


def test_a_write_of_token_scales_lies_apart_from_them() -> None:
    pool = PagePool(4, 4)
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=8, dtype=torch.int8, scales="token")
    assert cache.k_scale is not None
    batch = pool.step({pool.sequence(): 2})
    k = cache.k_scale.view(-1)[: 2 * 2 * 8].view(2, 2, 8)
    with pytest.raises(ContractError, match="memory shared with k_scale"):
        quire.write(k, torch.ones(2, 2, 8), cache, batch)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "constant_pad_nd":
            assert sum(args[1]) < 10**6, f"a table is made {sum(args[1])} columns wider"
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_len", [2**31 - 1, -1, -(2**31)])
def test_the_length_of_an_idle_sequence_is_not_read(kv_len: int, kernel: str) -> None:
    """With a tree mask the torch kernel asked for 17 GB, and a negative length was refused."""
    mask = torch.ones(6, 4, dtype=torch.bool).tril()
    for features in ({"mask": mask}, {}, {"window": 3}, {"form": "context"}):
        s = build(80, [2, 0, 4], [20, 5, 9], **features)
        s.batch.kv_lens[1] = kv_len
        assert quire.check(s.q, s.cache, s.batch, s.options, new=s.new) == []
        with Largest() as made:
            s.check(quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, kernel=kernel))
        assert made.numel < 10**6
    s.batch.max_kv_len = 20
    with quire.checked():
        quire.attend(s.q, s.cache, s.batch, new=s.new, kernel=kernel)


@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tree_needs_no_cell_that_its_windows_hide(kernel: str, form: str) -> None:
    """Positions below the context, and windows that do not meet: what lies right of them, or between them, is don't-care."""
    mask = torch.eye(2, dtype=torch.bool)
    positions = i(1, 9)
    cache = KVCache.wrap(torch.randn(9, 2, 1, 8), torch.randn(9, 2, 1, 8), layout="nhd")
    options = Options(mask=mask, positions=positions, window=(1, 0))
    q, new = torch.randn(2, 2, 8), (torch.randn(2, 1, 8), torch.randn(2, 1, 8))
    given: dict[str, Any] = {"new": new} if form == "context" else {}
    whole = Batch(torch.arange(9)[None], i(18), i(0, 2))
    wanted = quire.attend(q, cache, whole, options, kernel=kernel, **given)
    # The first sees keys 0 and 1, the second 8 and 9, of a context of 16; both see themselves at 16 and 17.
    table = i(0, -1, 99, -1, 4, -1, 10**9, -1, 8 if form == "full" else -1)[None]
    batch = Batch(table, i(18), i(0, 2))
    assert quire.check(q, cache, batch, options, **given) == []
    assert torch.equal(quire.attend(q, cache, batch, options, kernel=kernel, **given), wanted)
    assert wanted.isfinite().all()
    for column in (0, 4, *((8,) if form == "full" else ())):
        spoilt = table.clone()
        spoilt[0, column] = -1
        found = quire.check(q, cache, Batch(spoilt, i(18), i(0, 2)), options, **given)
        assert [v.argument for v in found] == [f"page_table[0, {column}]"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_context_that_no_window_of_a_tree_shows_may_have_any_length(kernel: str) -> None:
    cache = KVCache.wrap(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8), layout="nhd")
    options = Options(mask=torch.eye(2, dtype=torch.bool), positions=i(1, 2), window=(1, 0))
    q, new = torch.randn(2, 2, 8), (torch.randn(2, 1, 8), torch.randn(2, 1, 8))
    wanted = quire.attend(q, cache, Batch(i(0, 1)[None], i(6), i(0, 2)), options, new=new, kernel=kernel)
    for kv_len in (50, 2**31 - 1, 2**50):
        batch = Batch(i(0, 1)[None], i(kv_len), i(0, 2))
        assert quire.check(q, cache, batch, options, new=new) == []
        assert torch.allclose(quire.attend(q, cache, batch, options, new=new, kernel=kernel), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_nan_token_shows_in_the_rows_that_see_it(dtype: torch.dtype, value: float, kernel: str) -> None:
    """Under scales of tokens, `write` gives it a scale that is no number. That stopped every later step of the whole batch."""
    pool = PagePool(8, 4)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=dtype, scales="token")
    first, second = pool.sequence(), pool.sequence()
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 1, 8) for _ in range(3))
    k[0, 0, 3] = value
    quire.step(q, k, v, cache, pool.step({first: 2, second: 2}), kernel=kernel)
    batch = pool.step({first: 1, second: 1})
    out = quire.step(q[:2], k[1:3], v[:2], cache, batch, kernel=kernel)
    assert out[0].isnan().all() and out[1].isfinite().all()
    found = quire.check(q[:2], cache, batch)
    assert [(v.rule, v.seq, v.harmless) for v in found] == [("quantisation", 0, True)]
    assert "k_scale" in found[0].argument
    with quire.checked(), pytest.raises(ContractError, match="k_scale"):
        quire.attend(q[:2], cache, batch)
    # No write gives a token these.
    assert cache.k_scale is not None
    for bad in (0.0, -1.0, -float("inf")):
        cache.k_scale[int(batch.page_table[1, 0]), 0, 0] = bad
        with pytest.raises(ContractError, match="k_scale"):
            quire.attend(q[:2], cache, batch, kernel=kernel)
