"""Cache writes: check the call, copy the pages that copy-on-write asks for, store, and note it in the ledger."""

from __future__ import annotations

from typing import Any

import torch

from quire.attend import Launch, capturing, is_quick, is_traced, remember
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level, enforce, recording
from quire.dispatch.choose import choose, chosen_by
from quire.dispatch.platform import Platform
from quire.kind import fact, of_batch, of_cache
from quire.problem import Problem


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    *,
    slots: torch.Tensor | None = None,
    kernel: str | None = None,
    check: Level = "auto",
) -> None:
    """Puts the new keys and values `[tokens, kv_heads, dim]` of every sequence into their slots, quantising if the cache does.

    `slots` (`[tokens]`, -1 to skip) default to the batch's, and those to what its page table and lengths say. Rows beyond the
    batch's last new token are padding and are not written, whatever their slots say. The batch's copies are applied first. If a
    rule is broken, nothing is written."""
    if is_traced(k):
        from quire import ops

        return ops.write(k, v, cache, batch, slots, kernel, check)
    key = None
    if check == "auto" and cache.ledger is None and is_quick(k, cache, batch):
        key = (of_cache(cache), of_batch(batch), fact(k), fact(v), fact(batch.given_slots if slots is None else slots), kernel)
        bound = _bound.get(key)
        if bound is not None:
            bound[0](k, v, cache, batch, slots)
            return
    enforce("write", Call(cache, batch, k=k, v=v, slots=slots), check)
    launch = choose_writer(k, v, cache, batch, slots, kernel)
    store(launch, k, v, cache, batch, slots)
    remember(_bound, key, launch)


_bound: dict[Any, tuple[Launch, ...]] = {}


def choose_writer(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None, kernel: str | None
) -> Launch:
    """A launcher for writes like this one, which keeps the contract; raises if there is none."""
    problem = Problem.of(k, cache, batch)
    platform = Platform.detect(k.device)
    decision = choose(problem, platform, operation="write", kernel=kernel, capturing=capturing(k))
    launch = chosen_by(decision).bind(k, v, cache, batch, slots)
    recorder = recording()
    return launch if recorder is None else recorder.writer(launch)


def store(launch: Launch, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None) -> None:
    """Copies, stores, and notes."""
    cache.copy_pages(batch.copies)
    launch(k, v, cache, batch, slots)
    if cache.ledger is not None:
        _note(cache, batch, batch.slots_of_tokens(k.shape[0], cache.page_size, slots))


def _note(cache: KVCache, batch: Batch, slots: torch.Tensor) -> None:
    """Tells the ledger which position of which sequence each slot holds now."""
    assert cache.ledger is not None
    if not batch.seqs:
        return
    row = batch.rows_of_tokens(slots.shape[0])
    live = row < batch.seqs
    row = row.clamp(max=batch.seqs - 1)
    at = torch.arange(slots.shape[0], device=slots.device) - batch.q_starts.long()[row + 1] + batch.kv_lens.long()[row]
    writers = None
    if batch.sequences is not None:
        writers = torch.tensor([sequence.id for sequence in batch.sequences], device=slots.device)[row]
    cache.record(torch.where(live, slots, -1), at, writers)
