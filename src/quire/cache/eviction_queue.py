"""Free pages whose content can be used again, in the order of their eviction."""

from __future__ import annotations

import numpy

from quire.cache.transaction import Transaction


class EvictionQueue:
    """Pages in the order in which they were pushed: the first is popped first. Pages can be removed from the middle.

    A removed page leaves its entry behind, which later operations skip: an entry counts only if its page refers to it. A
    transaction has at most one operation on the queue."""

    def __init__(self, pages: int) -> None:
        self._entries = numpy.empty(0, dtype=numpy.int32)
        self._index = numpy.full(pages, -1, dtype=numpy.int64)
        self._first = self._end = 0
        self.count = 0
        """Number of pages in the queue."""

    def push(self, pages: numpy.ndarray, transaction: Transaction) -> None:
        """Plans to append pages that are not in the queue."""
        entries, end = self._entries, self._end
        if end + len(pages) > len(entries):
            kept = self.listed()
            entries, end = numpy.empty(max(64, 2 * (len(kept) + len(pages))), dtype=numpy.int32), len(kept)
            entries[:end] = kept
            transaction.set_cells(self, "_index", kept, numpy.arange(end))
            transaction.set_attribute(self, "_entries", entries)
            transaction.set_attribute(self, "_first", 0)
        last = end + len(pages)
        # Entries after the end hold nothing, so they are written now.
        entries[end:last] = pages
        transaction.set_cells(self, "_index", pages, numpy.arange(end, last), old=-1)
        transaction.set_attribute(self, "_end", last)
        transaction.set_attribute(self, "count", self.count + len(pages))

    def pop(self, count: int, transaction: Transaction) -> numpy.ndarray:
        """Plans to take the first `count` pages, int64. The queue has that many."""
        at, missing, found = self._first, count, []
        while missing:
            entries = self._entries[at : min(at + 2 * missing + 64, self._end)]
            counted = self._counted(at, entries)[:missing]
            found.append(entries[counted])
            missing -= len(counted)
            at += len(entries) if missing else int(counted[-1]) + 1
        pages = numpy.concatenate(found).astype(numpy.int64)
        transaction.set_cells(self, "_index", pages, -1)
        transaction.set_attribute(self, "_first", at)
        transaction.set_attribute(self, "count", self.count - count)
        return pages

    def remove(self, pages: numpy.ndarray, transaction: Transaction) -> None:
        """Plans to remove those of `pages` that are in the queue."""
        index = self._index[pages]
        inside = index >= 0
        transaction.set_cells(self, "_index", pages[inside], -1, old=index[inside])
        transaction.set_attribute(self, "count", self.count - int(inside.sum()))

    def listed(self) -> numpy.ndarray:
        """The pages in order."""
        entries = self._entries[self._first : self._end]
        return entries[self._counted(self._first, entries)]

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes + self._index.nbytes

    def _counted(self, first: int, entries: numpy.ndarray) -> numpy.ndarray:
        """The indices of those `entries`, which start at entry `first`, that count."""
        return numpy.flatnonzero(self._index[entries] == numpy.arange(first, first + len(entries)))
