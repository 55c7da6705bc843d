"""Writes without a batch: slots say where every token goes."""

from __future__ import annotations

import pytest
import torch

import quire
from quire import KVCache, PagePool


def test_slots_alone_are_enough() -> None:
    """What an engine's layer has: no batch. Rows with slot -1 are skipped, and the ledger knows no positions."""
    pool = PagePool(pages=6, page_size=4)
    cache, same = (KVCache.allocate(pool, kv_heads=2, head_dim=8, dtype=torch.float32, ledger=ledger) for ledger in (True, False))
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    sequence = pool.sequence()
    batch = pool.step({sequence: 5})
    slots = batch.slots.clone()
    slots[1] = -1
    quire.write(k, v, cache, slots=slots)
    quire.write(k, v, same, batch.clone(), slots=slots)
    assert torch.equal(cache.k, same.k) and torch.equal(cache.v, same.v)
    with pytest.raises(quire.ContractError, match="never written"):
        quire.attend(torch.randn(5, 2, 8), cache, batch)
    quire.write(k[1:2], v[1:2], cache, slots=batch.slots[1:2])
    assert quire.attend(torch.randn(5, 2, 8), cache, batch).isfinite().all()


@pytest.mark.parametrize("slots", [None, 3, [0, 1]])
def test_without_a_batch_slots_are_needed(slots: object) -> None:
    cache = KVCache.allocate(PagePool(2, 4), kv_heads=1, head_dim=8)
    with pytest.raises(quire.ArgumentError, match="slots"):
        quire.write(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), cache, slots=slots)  # type: ignore[arg-type]


def test_scales_that_a_slot_was_not_written_with_break_a_rule() -> None:
    pool = PagePool(pages=2, page_size=4)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=0.25, ledger=True)
    batch = pool.step({pool.sequence(): 3})
    quire.write(torch.randn(3, 1, 8), torch.randn(3, 1, 8), cache, slots=batch.slots)
    q = torch.randn(3, 1, 8)
    assert quire.check(q, cache, batch) == []
    cache.v_scale = torch.tensor(0.5)
    assert {violation.rule for violation in quire.check(q, cache, batch)} == {"written-scales"}
