"""Releases pages: decrements their reference counts and frees those that reach zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from quire.cache.allocation import occurrences
from quire.cache.issue_numbers import FREE
from quire.cache.transaction import Transaction

if TYPE_CHECKING:
    from quire.cache.pool import PagePool


def release(pool: PagePool, pages: numpy.ndarray, transaction: Transaction) -> None:
    """Decrements the reference count of each of `pages` (int64, a page may occur several times). A page with count zero becomes
    free; a cached page stays cached."""
    gone = pages
    if pool._shared:
        holders = pool._holders[pages]
        is_gone = occurrences(pages) == holders - 1
        gone = pages[is_gone]
        once, times = numpy.unique(pages, return_counts=True)
        left = pool._holders[once] - times
        transaction.set_cells(pool, "_holders", once, left)
        transaction.set_attribute(pool, "_shared", pool._shared - int(((left <= 1) & (left + times > 1)).sum()))
    else:
        transaction.set_cells(pool, "_holders", pages, 0, old=1)
    if pool._prefixes is not None:
        is_cached = pool._prefixes.is_cached(gone)
        pool._prefixes.unheld.push(gone[is_cached], transaction)
        gone = gone[~is_cached]
    pool._free.exchange(transaction, 0, gone)
    if pool._issue is not None:
        transaction.set_cells(pool, "_issue", gone, FREE)
