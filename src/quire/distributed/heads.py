"""How heads are divided over ranks: contiguous and equal, and every query head stays with its KV head."""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import ArgumentError, describe


class HeadSplit(NamedTuple):
    """The heads of one rank."""

    q: slice
    """Its query heads, of all."""
    kv: slice
    """Its KV heads, of all."""
    replicas: int
    """How many ranks hold a copy of each of these KV heads."""


def split(q_heads: int, kv_heads: int, ranks: int, rank: int) -> HeadSplit:
    """The heads of `rank`. With fewer KV heads than ranks, neighbouring ranks have the same KV head and different query heads."""
    for name, value in (("q_heads", q_heads), ("kv_heads", kv_heads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(name, describe(value), "an int of 1 or more: the heads of the whole model")
    if q_heads % kv_heads:
        raise ArgumentError("q_heads", q_heads, f"a multiple of the {kv_heads} kv_heads")
    if ranks not in allowed_ranks(q_heads, kv_heads):
        allowed = ", ".join(map(str, allowed_ranks(q_heads, kv_heads)))
        raise ArgumentError("group", f"{ranks} ranks", f"{allowed} ranks for {q_heads} q_heads and {kv_heads} kv_heads")
    replicas = max(1, ranks // kv_heads)
    q, kv = q_heads // ranks, max(1, kv_heads // ranks)
    first = rank // replicas * kv
    return HeadSplit(slice(rank * q, (rank + 1) * q), slice(first, first + kv), replicas)


def allowed_ranks(q_heads: int, kv_heads: int) -> list[int]:
    """The numbers of ranks that divide these heads: they divide kv_heads, or kv_heads divides them and they divide q_heads."""
    return [n for n in range(1, q_heads + 1) if kv_heads % n == 0 or (n % kv_heads == 0 and q_heads % n == 0)]
