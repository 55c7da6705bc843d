"""The time of the collectives of a layer. It was not measured: rates and latencies are assumptions, which the report names."""

from __future__ import annotations

from typing import NamedTuple

from quire.plan.machines import Cluster

LINK_PART = 0.8
"""The part of a link's published bandwidth that a large collective reaches."""
LINK_LATENCY, NETWORK_LATENCY = 8e-6, 25e-6
"""Seconds of a collective with little data, within a node and between nodes."""


class CollectiveCost(NamedTuple):
    """One collective of a layer."""

    name: str
    ranks: int
    span: int
    """The GPUs from the first to the last rank of a group, whole groups between them included."""
    sent: float
    """Bytes that each rank sends."""

    def seconds(self, cluster: Cluster) -> float:
        if self.ranks == 1:
            return 0.0
        within = self.span <= cluster.machine.per_node
        bandwidth = cluster.machine.link if within else cluster.machine.network
        return (LINK_LATENCY if within else NETWORK_LATENCY) + self.sent / (LINK_PART * bandwidth)


def all_reduce(size: float, ranks: int, span: int, name: str = "all-reduce") -> CollectiveCost:
    """The sum of `size` bytes of every rank, in every rank: each sends its part of a reduce-scatter and of an all-gather."""
    return CollectiveCost(name, ranks, span, 2 * size * (ranks - 1) / ranks)


def all_gather(size: float, ranks: int, span: int, name: str = "all-gather") -> CollectiveCost:
    """`size` bytes in every rank, of which each rank had an equal part."""
    return CollectiveCost(name, ranks, span, size * (ranks - 1) / ranks)


def all_to_all(size: float, ranks: int, span: int, name: str = "all-to-all") -> CollectiveCost:
    """`size` bytes of every rank, of which an equal part goes to each."""
    return CollectiveCost(name, ranks, span, size * (ranks - 1) / ranks)
