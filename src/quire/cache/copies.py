"""Page copies required by copy-on-write. The copies of a step have an id, so that a cache applies them once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple


class CopyId(NamedTuple):
    """Identifies the copies of one step; unique among steps and pools."""

    pool: str
    """The pool's name, unique across processes."""
    number: int
    """Counts the pool's steps that had copies, from 0."""


class Copies(tuple[tuple[int, int], ...]):
    """(source, target) page ids of one step, with their id. A cache applies them once."""

    id: CopyId

    def __new__(cls, pairs: Iterable[tuple[int, int]], id: CopyId) -> Copies:
        copies = super().__new__(cls, pairs)
        copies.id = id
        return copies

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, (tuple(self), self.id)


class AppliedCopies:
    """The set of copy ids that a cache has applied, stored as ranges of consecutive numbers: one range if every copy of a pool was
    applied, and one more for each step that was skipped."""

    def __init__(self) -> None:
        self._ranges: dict[str, list[list[int]]] = {}

    def __contains__(self, id: CopyId) -> bool:
        ranges = self._ranges.get(id.pool, [])
        at = bisect_right(ranges, id.number, key=_start)
        return at > 0 and id.number < ranges[at - 1][1]

    def add(self, id: CopyId) -> None:
        if id in self:
            return
        ranges = self._ranges.setdefault(id.pool, [])
        at = bisect_right(ranges, id.number, key=_start)
        start, stop = id.number, id.number + 1
        before = at > 0 and ranges[at - 1][1] == start
        after = at < len(ranges) and ranges[at][0] == stop
        low, high = at - before, at + after
        ranges[low:high] = [[ranges[low][0] if before else start, ranges[high - 1][1] if after else stop]]


def _start(range: list[int]) -> int:
    return range[0]
