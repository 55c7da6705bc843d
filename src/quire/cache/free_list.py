"""A free list of ids: a stack of released ids, followed by the ids that were never allocated."""

from __future__ import annotations

import numpy

from quire.cache.transaction import Transaction


class FreeList:
    """Free ids, counted from 0. The id released last is allocated first; ids that were never allocated follow in order.

    Growing the list's memory does not change its content, so a planned transaction stays valid."""

    def __init__(self, capacity: int = 0) -> None:
        # Written here, so that the operating system maps the memory now and not in a later step.
        self._returned = numpy.full(capacity, -1, dtype=numpy.int32)
        self.count = 0
        """Number of released ids that are free."""
        self.used = 0
        """The lowest id that was never allocated."""
        self._kept = 0
        """Number of entries above `count` that the latest transaction allocated: a rollback restores them."""

    def next(self, count: int) -> numpy.ndarray:
        """The next `count` ids in allocation order. They stay free until a transaction allocates them."""
        # As int64, which numpy indexes with directly.
        again = self._returned[max(self.count - count, 0) : self.count][::-1].astype(numpy.int64)
        if len(again) == count:
            return again
        new = numpy.arange(self.used, self.used + count - len(again))
        return numpy.concatenate([again, new]) if len(again) else new

    def exchange(self, transaction: Transaction, taken: int, returned: numpy.ndarray | None = None) -> None:
        """Plans to allocate the next `taken` ids, then to release others. At most once in a transaction."""
        again = min(taken, self.count)
        low = self.count - again
        high = low if returned is None else low + len(returned)
        if returned is not None:
            self._grow(high)
            # Entries that are free now, or were before the latest transaction, are written by this transaction only, so that it can
            # be undone. Entries after those hold nothing and are written now.
            safe = min(max(self.count + self._kept, low), high)
            self._returned[safe:high] = returned[safe - low :]
            if safe > low:
                transaction.set_cells(self, "_returned", slice(low, safe), returned[: safe - low])
        transaction.set_attribute(self, "_kept", max(self.count - high, 0))
        transaction.set_attribute(self, "count", high)
        transaction.set_attribute(self, "used", self.used + taken - again)

    def listed(self, total: int) -> list[int]:
        """The free ids below `total`; the last one is allocated next."""
        return [*range(total - 1, self.used - 1, -1), *self._returned[: self.count].tolist()]

    @property
    def nbytes(self) -> int:
        return self._returned.nbytes

    def _grow(self, size: int) -> None:
        if len(self._returned) < size:
            larger = numpy.empty(max(size, len(self._returned) * 3 // 2, 16), dtype=numpy.int32)
            larger[: len(self._returned)] = self._returned
            self._returned = larger
