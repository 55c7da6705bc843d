"""One sequence of a pool, as its users hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.cache.pool import PagePool

Runs = list[tuple[int, int]]


class Sequence:
    """One sequence of a pool: a handle, equal only to itself. What it says is read from the pool, which alone changes it."""

    __slots__ = ("_pool", "_runs", "_slot", "id")

    def __init__(self, pool: PagePool, id: int, slot: int):
        self.id = id
        self._pool, self._slot = pool, slot
        self._runs: Runs = []

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self._pool.length_of(self)

    @property
    def runs(self) -> Runs:
        """Who wrote which positions, as (first position, sequence id): a fork starts with the runs of its parent. A new list
        replaces it when it changes."""
        return self._pool.runs_of(self)

    @property
    def pages(self) -> list[int]:
        """Its page ids in order, -1 where `drop` gave a page back."""
        return self._pool.pages_of(self)

    def __repr__(self) -> str:
        state = f"{self.length} tokens" if self._pool.is_live(self) else "freed"
        return f"Sequence({self.id}: {state})"


class SequenceSnapshot(NamedTuple):
    """A sequence as it was when its batch was pickled: what a ledger asks of it, without the pool."""

    id: int
    length: int
    runs: Runs
