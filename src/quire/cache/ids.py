"""Which ids are free: a stack of those that came back, and all that were never taken."""

from __future__ import annotations

import numpy

from quire.cache.change import Change


class Ids:
    """Free ids from 0 on. The one that came back last is the next; those that were never taken follow in order.

    Its memory grows without a change of what it says, so a change that was planned before stays right."""

    def __init__(self, room: int = 0) -> None:
        # Written once, so that later no write waits for the system to provide memory.
        self._returned = numpy.full(room, -1, dtype=numpy.int32)
        self.count = 0
        """How many of the ids that came back are free."""
        self.used = 0
        """The lowest id that was never taken."""
        self._kept = 0
        """Entries above the free ones that the latest change took: a rollback puts them back."""

    def next(self, count: int) -> numpy.ndarray:
        """The next `count` ids, in the order in which they are taken. They stay free until a change takes them."""
        # As int64, which numpy indexes with directly.
        again = self._returned[max(self.count - count, 0) : self.count][::-1].astype(numpy.int64)
        if len(again) == count:
            return again
        new = numpy.arange(self.used, self.used + count - len(again))
        return numpy.concatenate([again, new]) if len(again) else new

    def exchange(self, change: Change, taken: int, returned: numpy.ndarray | None = None) -> None:
        """Takes the next ids, then puts others back. At most once in a change."""
        again = min(taken, self.count)
        low = self.count - again
        high = low if returned is None else low + len(returned)
        if returned is not None:
            self._make_room(high)
            # What is free now, or was before the latest change, is written by this change alone; behind that nothing is lost.
            safe = min(max(self.count + self._kept, low), high)
            self._returned[safe:high] = returned[safe - low :]
            if safe > low:
                change.cells(self, "_returned", slice(low, safe), returned[: safe - low])
        change.value(self, "_kept", max(self.count - high, 0))
        change.value(self, "count", high)
        change.value(self, "used", self.used + taken - again)

    def listed(self, total: int) -> list[int]:
        """The free ids below `total`, the next one last."""
        return [*range(total - 1, self.used - 1, -1), *self._returned[: self.count].tolist()]

    @property
    def nbytes(self) -> int:
        return self._returned.nbytes

    def _make_room(self, size: int) -> None:
        if len(self._returned) < size:
            larger = numpy.empty(max(size, len(self._returned) * 3 // 2, 16), dtype=numpy.int32)
            larger[: len(self._returned)] = self._returned
            self._returned = larger
