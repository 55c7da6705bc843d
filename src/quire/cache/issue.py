"""The numbers that a pool gives to slots, for ledgers: which step handed a slot to its token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from quire.cache.books import LAST, LENGTH, PAGES
from quire.cache.change import Change
from quire.cache.hand_out import HandOut

if TYPE_CHECKING:
    from quire.cache.pool import PagePool

FREE = -1
"""The number of a slot that no token has."""


def numbers_of_today(pool: PagePool) -> numpy.ndarray:
    """Numbers `[pages, page_size]` for a pool that kept none so far: every slot with a token gets the latest step's."""
    numbers = numpy.full((pool.pages, pool.page_size), FREE, dtype=numpy.int64)
    for sequence in pool.sequences:
        pages = numpy.array(sequence.pages, dtype=numpy.int64)
        whole = sequence.length // pool.page_size
        full, rest = pages[:whole], pages[whole:]
        numbers[full[full >= 0]] = pool.steps
        numbers[rest, : sequence.length % pool.page_size] = pool.steps
    return numbers


def number_step(pool: PagePool, given: HandOut, number: int, change: Change) -> None:
    """The number of a step on the slots of its new tokens. A copied page takes its numbers along."""
    assert pool._issue is not None
    size, offset = pool.page_size, numpy.arange(pool.page_size)
    start, end = given.before[:, LENGTH], given.after[:, LENGTH]
    # The slots behind the old tokens of a page that is partly filled; its copy if it is copied.
    partly = numpy.flatnonzero((end > start) & (start % size != 0))
    if len(partly):
        columns = (start[partly] // size)[:, None]
        pages = given.before[partly, LAST]
        sources = pages.copy()
        where = numpy.isin(partly, given.copied)
        pages[where] = given.targets[numpy.searchsorted(given.copied, partly[where])]
        held = pool._issue[sources]
        new = (offset >= (start[partly] % size)[:, None]) & (columns * size + offset < end[partly][:, None])
        old = pool._issue[pages]
        # Behind the old tokens a copy has no tokens but the new ones.
        kept = numpy.where(where[:, None] & (offset >= (start[partly] % size)[:, None]), FREE, held)
        change.cells(pool, "_issue", pages, numpy.where(new, number, kept), old=old)
    if given.runs is not None:
        numbers = numpy.full((len(given.pages), size), number, dtype=numpy.int64)
        tail = (given.after[given.grown, PAGES] - 1)[:, None] * size + offset
        numbers[numpy.cumsum(given.fresh) - 1] = numpy.where(tail < end[given.grown][:, None], number, FREE)
        change.cells(pool, "_issue", given.pages, numbers, old=FREE)
