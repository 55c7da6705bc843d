"""Pages that sequences give back: who still holds them, and which become free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from quire.cache.change import Change
from quire.cache.hand_out import occurrences
from quire.cache.issue import FREE

if TYPE_CHECKING:
    from quire.cache.pool import PagePool


def release(pool: PagePool, pages: numpy.ndarray, change: Change) -> None:
    """Takes one holder from each of `pages`, in order, int64; a page may occur several times. One without a holder is free."""
    gone = pages
    if pool._shared:
        holders = pool._holders[pages]
        is_gone = occurrences(pages) == holders - 1
        gone = pages[is_gone]
        once, times = numpy.unique(pages, return_counts=True)
        left = pool._holders[once] - times
        change.cells(pool, "_holders", once, left)
        change.value(pool, "_shared", pool._shared - int(((left <= 1) & (left + times > 1)).sum()))
    else:
        change.cells(pool, "_holders", pages, 0, old=1)
    pool._free.exchange(change, 0, gone)
    if pool._issue is not None:
        change.cells(pool, "_issue", gone, FREE)
