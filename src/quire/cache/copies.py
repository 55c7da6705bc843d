"""The page copies that copy-on-write asks for: each step's have an id, and a cache remembers which it has applied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple


class CopyId(NamedTuple):
    """Names the copies of one step. No two steps have the same."""

    pool: str
    """Which pool: unique among pools, in any process."""
    number: int
    """Which of the pool's steps with copies, counted from 0."""


class Copies(tuple[tuple[int, int], ...]):
    """(source, target) page ids of one step, with the id of the step. A cache applies them once, however often it is asked."""

    id: CopyId

    def __new__(cls, pairs: Iterable[tuple[int, int]], id: CopyId) -> Copies:
        copies = super().__new__(cls, pairs)
        copies.id = id
        return copies

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, (tuple(self), self.id)


class AppliedCopies:
    """The ids of all copies that a cache has applied, as ranges of consecutive numbers: a cache that applies every copy of a pool
    keeps one range, and each step that it skips adds one."""

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
