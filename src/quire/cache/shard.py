"""A context-parallel shard: which keys of a sequence one rank holds, and where.

The keys of a sequence are dealt to the ranks in turns, `interleave` keys at a time. Position p belongs to rank
`p // interleave % ranks`. Keys of a rank are numbered in order of their positions: key j of the shard is in page `j // page_size`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from quire.errors import ArgumentError, describe

LARGEST_CYCLE = 2**31 - 1
"""The most that `ranks * interleave` may be: kernels compute positions in 32 bits where lengths are int32."""

Ints = TypeVar("Ints", int, Any)
"""An int, or an integer tensor or array: the functions below are computed elementwise."""


class Shard(NamedTuple):
    """The keys that one of several ranks holds.

    Example:
        >>> from quire.cache.shard import Shard
        >>> shard = Shard(rank=1, ranks=2, interleave=3)
        >>> [p for p in range(14) if shard.owns(p)]
        [3, 4, 5, 9, 10, 11]
        >>> shard.count(14), shard.count(10), shard.position(4)
        (6, 4, 10)
    """

    rank: int
    ranks: int
    interleave: int

    @classmethod
    def of(cls, given: object) -> Shard | None:
        """The shard of an argument, None for None and for a single rank. Raises ArgumentError if it is not a valid shard."""
        if given is None:
            return None
        allowed = "(rank, ranks, interleave): ints with 0 <= rank < ranks and interleave >= 1, or None"
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise ArgumentError("shard", describe(given), allowed)
        rank, ranks, interleave = given
        if any(not isinstance(x, int) or isinstance(x, bool) for x in given) or not 0 <= rank < ranks or interleave < 1:
            raise ArgumentError("shard", repr(tuple(given)), allowed)
        if ranks * interleave > LARGEST_CYCLE:
            raise ArgumentError("shard", repr(tuple(given)), f"ranks * interleave of at most {LARGEST_CYCLE}")
        return None if ranks == 1 else cls(rank, ranks, interleave)

    def count(self, length: Ints) -> Ints:
        """How many of the first `length` positions of a sequence belong to the shard: also the key from which the keys at position
        `length` and after it start. 0 for a negative length."""
        cycle = self.ranks * self.interleave
        rest = length % cycle - self.rank * self.interleave
        return _clamp(length // cycle * self.interleave + _clamp(rest, 0, self.interleave), 0, None)

    def owns(self, position: Ints) -> Any:
        """Whether a position belongs to the shard."""
        return position // self.interleave % self.ranks == self.rank

    def position(self, key: Ints) -> Ints:
        """The position of key `key` of the shard."""
        return (key // self.interleave * self.ranks + self.rank) * self.interleave + key % self.interleave


def _clamp(value: Ints, low: int, high: int | None) -> Ints:
    if isinstance(value, int):
        return max(low, value) if high is None else min(max(low, value), high)
    return value.clip(low, high)


def keys_of(shard: Shard | None, length: Ints) -> Ints:
    """`Shard.count`, or `length` without a shard."""
    return length if shard is None else shard.count(length)


def positions_of(shard: Shard | None, keys: Ints) -> Ints:
    """`Shard.position`, or `keys` without a shard."""
    return keys if shard is None else shard.position(keys)
