"""Issue numbers: for each slot, the number of the step that allocated it. A ledger compares them to find stale slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from quire.cache.sequence_record import LAST, LENGTH, PAGES
from quire.cache.shard import keys_of
from quire.cache.transaction import Transaction

if TYPE_CHECKING:
    from quire.cache.allocation import Allocation
    from quire.cache.pool import PagePool

FREE = -1
"""The number of a slot that is not allocated."""


def initial_numbers(pool: PagePool) -> numpy.ndarray:
    """Numbers `[pages, page_size]` for a pool that kept none before: every allocated slot gets the number of the latest step."""
    numbers = numpy.full((pool.pages, pool.page_size), FREE, dtype=numpy.int64)
    for sequence in pool.sequences:
        pages = numpy.array(sequence.pages, dtype=numpy.int64)
        keys = keys_of(pool.shard, sequence.length)
        whole = keys // pool.page_size
        full, rest = pages[:whole], pages[whole:]
        numbers[full[full >= 0]] = pool.steps
        numbers[rest[rest >= 0], : keys % pool.page_size] = pool.steps
    if pool._prefixes is not None:
        numbers[pool._prefixes.cached(numpy.arange(pool.pages))] = pool.steps
    return numbers


def number_step(pool: PagePool, given: Allocation, number: int, transaction: Transaction) -> None:
    """Assigns `number` to the slots of the new tokens of a step. A page copied by copy-on-write keeps the numbers of its source."""
    assert pool._issue is not None
    size, offset = pool.page_size, numpy.arange(pool.page_size)
    start, end = keys_of(pool.shard, given.before[:, LENGTH]), keys_of(pool.shard, given.after[:, LENGTH])
    # The free slots of pages that are partly filled; of the copy, if the page is copied.
    partly = numpy.flatnonzero((end > start) & (start % size != 0))
    if len(partly):
        columns = (start[partly] // size)[:, None]
        pages = given.before[partly, LAST]
        sources = pages.copy()
        where = numpy.isin(partly, given.copied)
        pages[where] = given.targets[numpy.searchsorted(given.copied, partly[where])]
        held = pool._issue[sources]
        new = (offset >= (start[partly] % size)[:, None]) & (columns * size + offset < end[partly][:, None])
        old = numpy.where(where[:, None], FREE, pool._issue[pages])
        # After the old tokens, a copy holds only the new ones.
        kept = numpy.where(where[:, None] & (offset >= (start[partly] % size)[:, None]), FREE, held)
        transaction.set_cells(pool, "_issue", pages, numpy.where(new, number, kept), old=old)
    if given.runs is not None:
        numbers = numpy.full((len(given.pages), size), number, dtype=numpy.int64)
        tail = (given.after[given.grown, PAGES] - 1)[:, None] * size + offset
        numbers[numpy.cumsum(given.fresh) - 1] = numpy.where(tail < end[given.grown][:, None], number, FREE)
        transaction.set_cells(pool, "_issue", given.pages, numbers, old=FREE)
