"""The handle of one sequence of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.cache.token_ids import NO_SALT, KeyChain

if TYPE_CHECKING:
    from quire.cache.pool import PagePool

Runs = list[tuple[int, int]]


class StateNumber:
    """A counter of a pool's state. A batch that aliases the pool's page table stores the value it was made at, so that a stale
    batch is detected."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


NO_POOL = StateNumber()
"""The state of batches that alias no pool: it never changes."""


class Sequence:
    """A handle of one sequence of a `PagePool`. Its properties read the pool's records; only the pool changes them."""

    __slots__ = ("_chain", "_pool", "_runs", "_slot", "id")

    def __init__(self, pool: PagePool, id: int, slot: int):
        self.id: int = id
        """The number of the sequence, unique in its pool."""
        self._pool, self._slot = pool, slot
        self._runs: Runs = []
        self._chain: KeyChain = NO_SALT

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self._pool.length_of(self)

    @property
    def runs(self) -> Runs:
        """Which sequence wrote which positions, as a list of (first position, sequence id). A fork starts with the runs of its
        parent. A change replaces the list."""
        return self._pool.runs_of(self)

    @property
    def pages(self) -> list[int]:
        """Page ids in order, -1 where `drop` released a page."""
        return self._pool.pages_of(self)

    def __repr__(self) -> str:
        state = f"{self.length} tokens" if self._pool.is_live(self) else "freed"
        return f"Sequence({self.id}: {state})"


class SequenceSnapshot(NamedTuple):
    """The state of a sequence when its batch was pickled: what a ledger reads, without the pool."""

    id: int
    length: int
    runs: Runs
