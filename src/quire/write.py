"""Cache writes: check the call, copy the pages that copy-on-write asks for, store, and record it in the ledger."""

from __future__ import annotations

import torch

from quire.attend import is_traced
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level
from quire.dispatch.kernel import Launcher
from quire.errors import ArgumentError, describe
from quire.launch import launcher_for
from quire.slots_alone import slots_batch


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch | None = None,
    *,
    slots: torch.Tensor | None = None,
    kernel: str | None = None,
    check: Level = "auto",
) -> None:
    """Puts the new keys and values `[tokens, kv_heads, dim]` of every sequence into their slots, quantising if the cache does.

    `slots` (`[tokens]`, -1 to skip) default to the batch's, and those to what its page table and lengths say. Rows beyond the
    batch's last new token are padding and are not written, whatever their slots say. The batch's copies are applied first. If a
    rule is broken, nothing is written.

    Without a batch `slots` are needed, and say all: every row is written to its slot. A ledger then records "written, position
    unknown"."""
    known = batch is not None
    if batch is None:
        if not isinstance(slots, torch.Tensor) or not isinstance(k, torch.Tensor) or not k.dim():
            raise ArgumentError("slots", describe(slots), "a tensor [tokens] of int32 or int64, or a batch")
        batch = slots_batch(k.shape[0], slots)
    if is_traced(k):
        from quire import ops

        return ops.write(k, v, cache, batch, slots, kernel, check)
    call = Call(cache, batch, k=k, v=v, slots=slots, positions_known=known)
    store(launcher_for("write", call, kernel, check, checked=False), call)


def store(launcher: Launcher, call: Call) -> None:
    """Copies pages, stores the new tokens, and records them."""
    cache, batch = call.cache, call.batch
    if batch.copies:
        cache.copy_pages(batch.copies)
    launcher(call)
    if cache.ledger is not None:
        _record(call)


def _record(call: Call) -> None:
    """Tells the ledger which position of which sequence each slot holds now."""
    cache, batch = call.cache, call.batch
    assert call.k is not None
    if not batch.seqs:
        return
    slots = batch.slots_of_tokens(call.k.shape[0], cache.page_size, call.slots)
    if not call.positions_known:
        cache.record(slots)
        return
    row = batch.rows_of_tokens(slots.shape[0])
    live = row < batch.seqs
    row = row.clamp(max=batch.seqs - 1)
    at = torch.arange(slots.shape[0], device=slots.device) - batch.q_starts.long()[row + 1] + batch.kv_lens.long()[row]
    writers = None
    if batch.sequences is not None:
        writers = torch.tensor([sequence.id for sequence in batch.sequences], device=slots.device)[row]
    cache.record(torch.where(live, slots, -1), at, writers)
