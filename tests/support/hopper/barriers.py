"""Barriers in shared memory (mbarriers): a phase completes after a number of arrivals and of copied bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.hopper.partitions import CLOCKS, THREADS, HopperError, Partition


class Barrier:
    """One barrier."""

    def __init__(self, place: Any, count: int):
        self.place, self.count = place, count
        """A view, whose name is the barrier's; the arrivals of a phase."""
        self.missing, self.bytes, self.phase = count, 0, 0
        self.known = np.zeros(CLOCKS, np.int64)
        """What the arrivals of all phases that have completed have left."""
        self.arrived = np.zeros(CLOCKS, np.int64)

    def __str__(self) -> str:
        bytes = f" and {self.bytes} bytes" if self.bytes else ""
        return f"{self.place} (phase {self.phase}: {self.missing} of {self.count} arrivals{bytes} missing)"

    def has_completed(self, parity: int) -> bool:
        """Whether the phase of this parity has completed: the current one has the other parity."""
        return self.phase & 1 != parity

    def arrive(self, count: int, left: np.ndarray) -> None:
        if count > self.missing:
            raise HopperError(f"{count} arrivals at {self}")
        self.missing -= count
        self._advance(left)

    def arrive_from(self, partition: Partition, count: int) -> None:
        """Threads of a partition arrive: all of them, or one for them."""
        self.arrive(count, partition.left_at_barrier(count == THREADS))

    def expect(self, count: int, partition: Partition) -> None:
        """One thread arrives, and the phase lasts until so many bytes have been copied."""
        self.bytes += count
        self.arrive_from(partition, 1)

    def copied(self, count: int, left: np.ndarray) -> None:
        if count > self.bytes:
            raise HopperError(f"{count} bytes are copied that are not expected at {self}")
        self.bytes -= count
        self._advance(left)

    def end(self) -> None:
        """A program that ends here must have completed every phase that it began."""
        if self.missing != self.count or self.bytes:
            raise HopperError(f"the program ends in the middle of a phase of {self}")

    def _advance(self, left: np.ndarray) -> None:
        self.arrived = np.maximum(self.arrived, left)
        if not self.missing and not self.bytes:
            self.known = np.maximum(self.known, self.arrived)
            self.missing, self.phase = self.count, self.phase + 1
