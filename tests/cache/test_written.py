"""What the ledger knows of writes by slots alone and of the scales of a write; and scales and tensors that are refused."""

import pytest
import torch

import quire
from quire.cache.ledger import UNPLACED


def engine(**kind):
    pool = quire.PagePool(8, 4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, ledger=True, **kind)
    return pool, cache, torch.randn(3, 5, 1, 8)


def test_slots_alone_count_as_written_at_an_unknown_position():
    pool, cache, (q, _, _) = engine(dtype=torch.float32)
    batch = pool.step({pool.sequence(): 5})
    assert len(quire.check(q, cache, batch)) == 5
    cache.record(batch.slots)
    assert cache.ledger.position[batch.slots].tolist() == [UNPLACED] * 5
    assert quire.check(q, cache, batch) == []
    again = quire.check(None, cache, batch, k=q, v=q)
    assert len(again) == 5 and "written twice: already at step 1, by a write without a batch" in again[0].given


@pytest.mark.parametrize("scale", [0.5, torch.tensor([0.5])], ids=["tensor", "head"])
def test_other_scales_than_those_of_the_write_break_a_rule(scale):
    pool, cache, (q, k, v) = engine(dtype=torch.uint8, format="e4m3fn", k_scale=scale, v_scale=scale)
    a = pool.sequence()
    quire.step(q, k, v, cache, pool.step({a: 5}))
    batch = pool.step({pool.fork(a): 1})
    cache.k_scale = cache.k_scale * 2
    found = quire.check(q[:1], cache, batch, k=k[:1], v=v[:1])
    assert {f.rule for f in found} == {"written-scales"} and [f.token for f in found] == [0, 1, 2, 3, 4]
    cache.k_scale = cache.k_scale / 2
    assert quire.check(q[:1], cache, batch, k=k[:1], v=v[:1]) == []


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0, float("inf")])
def test_bad_scale_tensors_are_refused(bad):
    pool = quire.PagePool(8, 4)
    for scale in (torch.tensor(bad), torch.tensor([1.0, bad])):
        with pytest.raises(quire.ArgumentError, match=r"v_scale: given .* that holds .*; allowed: finite numbers above 0"):
            quire.KVCache.allocate(pool, kv_heads=2, head_dim=8, dtype=torch.uint8, format="e4m3fn", v_scale=scale)


def test_what_is_no_pool_or_no_tensor_is_refused_by_name():
    with pytest.raises(quire.ArgumentError, match="pool: given nothing"):
        quire.KVCache.allocate(None, kv_heads=1, head_dim=8)
    pool, cache, (q, _, _) = engine(dtype=torch.float32)
    batch = pool.step({pool.sequence(): 5})
    with pytest.raises(quire.ArgumentError, match=r"kv_lens: given a sparse_coo tensor int64.*; allowed: a dense tensor"):
        quire.Batch(batch.page_table, torch.tensor([5]).to_sparse(), batch.q_starts)
    batch.kv_lens = None
    with pytest.raises(quire.ArgumentError, match=r"kv_lens: given nothing \(None\); allowed: a tensor of int32 or int64"):
        quire.attend(q, cache, batch)


def test_operators_refuse_a_stale_batch():
    pool, cache, (q, k, v) = engine(dtype=torch.float32)
    a = pool.sequence()
    batch = pool.step({a: 5})
    pool.trim(a, 1)
    for use in (
        lambda: quire.attend(q, cache, batch),
        lambda: quire.write(k, v, cache, batch),
        lambda: quire.step(q, k, v, cache, batch),
        lambda: quire.check(q, cache, batch),
    ):
        with pytest.raises(quire.StaleBatch):
            use()
    assert not cache.k.any()
