"""Swaps the pages of sequences to host memory: what a pool keeps of a sequence without pages, and the pages of one cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from quire.cache.allocation import take_free
from quire.cache.packing import PackedTensor
from quire.cache.release import release
from quire.cache.sequence import Sequence
from quire.cache.sequence_record import DROPPED, LAST, LENGTH, PAGES, ROW, WIDTH
from quire.cache.shard import keys_of
from quire.cache.transaction import Transaction
from quire.errors import ArgumentError, OutOfPages

if TYPE_CHECKING:
    from quire.cache.pool import PagePool


class SwappedSequence(NamedTuple):
    """What a pool keeps of a sequence that is swapped out."""

    first: int
    """The column of its first page: pages before it were dropped."""
    issue: numpy.ndarray | None
    """The issue numbers of its slots, `[pages, page_size]`; None if the pool keeps none."""


class HostPages(NamedTuple):
    """Pages of one cache in host memory, as `KVCache.swap_out` returns them."""

    memory: torch.Tensor
    """All bytes, uint8 `[n]`; pinned if they come from a GPU, where the copy is asynchronous."""
    parts: tuple[PackedTensor, ...]
    """K, V, then scales per token and head and the ledger's columns, if there are any: each `[pages, ...]`."""
    format: str
    layout: str

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.parts[0].shape[0]

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal in the cache that takes the pages."""
        return self.format, self.layout, tuple((part.dtype, part.shape[1:]) for part in self.parts)

    def __repr__(self) -> str:
        return f"HostPages({self.pages} pages, {self.format}, layout={self.layout}, {len(self.memory)} bytes)"


def plan_swap_out(pool: PagePool, sequence: Sequence, transaction: Transaction) -> tuple[int, ...]:
    """Plans to release all pages of a sequence that keeps its length. Returns the pages."""
    row = pool._row(sequence)
    after = row.copy()
    first, end = int(row[DROPPED]), int(row[PAGES])
    after[DROPPED], after[LAST] = end, -1
    pages = numpy.empty(0, dtype=numpy.int64)
    if end > first:
        table, columns = pool._tables[int(row[WIDTH])], slice(first, end)
        pages = table.cells[row[ROW], columns].astype(numpy.int64)
        # The first pages of a sequence are evicted last.
        release(pool, pages[::-1], transaction)
        transaction.set_cells(table, "cells", (int(row[ROW]), columns), -1)
    issue = None if pool._issue is None else pool._issue[pages]
    transaction.add_entries(pool, "_swapped", {sequence.id: SwappedSequence(first, issue)})
    transaction.set_attribute(sequence, "_chain", sequence._chain.upto(0))
    transaction.set_cells(pool, "_records", sequence._slot, after, old=row)
    transaction.set_attribute(pool, "_last", None)
    return tuple(pages.tolist())


def plan_swap_in(pool: PagePool, sequence: Sequence, transaction: Transaction) -> tuple[int, ...]:
    """Plans to allocate pages for a sequence that was swapped out. Returns the pages."""
    (slot,) = pool._slots_of((sequence,), swapped=True).tolist()
    kept = pool._swapped.get(sequence.id)
    if kept is None:
        raise ArgumentError("sequence", f"sequence {sequence.id}, which has its pages", "a sequence that is swapped out")
    row = pool._records[slot].copy()
    count = int(row[PAGES]) - kept.first
    if count > pool.free_pages:
        raise OutOfPages(count, pool.free_pages, pool.pages)
    transaction.remove_entries(pool, "_swapped", {sequence.id: kept})
    if not count:
        return ()
    pages = take_free(pool, count, transaction)
    transaction.set_cells(pool, "_holders", pages, 1, old=0)
    table = pool._tables[int(row[WIDTH])]
    transaction.set_cells(table, "cells", (int(row[ROW]), slice(kept.first, int(row[PAGES]))), pages, old=-1)
    if pool._issue is not None:
        numbers = _numbers(pool, int(row[LENGTH]), kept, count) if kept.issue is None else kept.issue
        transaction.set_cells(pool, "_issue", pages, numbers, old=-1)
    after = row.copy()
    after[DROPPED], after[LAST] = kept.first, pages[-1]
    transaction.set_cells(pool, "_records", slot, after, old=row)
    return tuple(pages.tolist())


def _numbers(pool: PagePool, length: int, kept: SwappedSequence, count: int) -> numpy.ndarray:
    """Issue numbers for tokens that are older than the pool's numbers."""
    keys = (kept.first + numpy.arange(count))[:, None] * pool.page_size + numpy.arange(pool.page_size)
    return numpy.where(keys < keys_of(pool.shard, length), pool.steps, -1)
