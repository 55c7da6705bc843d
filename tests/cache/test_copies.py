"""Copy-on-write copies have an id and are applied once per cache."""

import pickle

import pytest
import torch

import quire
from quire.cache.copies import AppliedCopies, Copies, CopyId


def forked():
    pool = quire.PagePool(8, 4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
    a = pool.sequence()
    quire.write(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, pool.step({a: 2}))
    return cache, pool.step({pool.fork(a): 2})


def test_two_writes_of_one_batch_keep_each_others_tokens():
    cache, batch = forked()
    k, slots = torch.tensor([5.0, 6.0]).view(2, 1, 1).expand(2, 1, 8).contiguous(), batch.slots
    for keep in (0, 1):
        quire.write(k, k, cache, batch, slots=torch.where(torch.arange(2) == keep, slots, -1))
    assert cache.k[batch.copies[0][1], :, 0, 0].tolist() == [1, 1, 5, 6]


def test_copies_are_applied_once_and_pairs_always():
    cache, batch = forked()
    ((source, target),) = copies = pickle.loads(pickle.dumps(batch.copies))
    assert isinstance(copies, Copies) and copies.id == batch.copies.id
    cache.copy_pages(batch.copies)
    cache.k[target] = 9
    cache.copy_pages(copies)
    assert (cache.k[target] == 9).all()
    cache.copy_pages([(source, target)])
    assert not (cache.k[target] == 9).any()


def test_applied_ids_in_any_order():
    applied, numbers = AppliedCopies(), [5, 3, 4, 9, 0, 1, 8, 3]
    for i, number in enumerate(numbers):
        applied.add(CopyId("a", number))
        assert [n for n in range(12) if CopyId("a", n) in applied] == sorted(set(numbers[: i + 1]))
    assert CopyId("b", 3) not in applied and len(applied._ranges["a"]) == 3


@pytest.mark.parametrize("bad", [None, 3, [1], [(0, 1, 2)], [(0, 99)], [(0, 1.5)], [("a", "b")], "ab", [(0, 1), (2, 1)]])
def test_malformed_copies_are_refused(bad):
    cache, _ = forked()
    with pytest.raises(quire.ArgumentError, match="copies: given"):
        cache.copy_pages(bad)
