"""The partitions of a program, and the order of their accesses.

Every partition has a clock for its own accesses, one for each of its three queues of asynchronous operations, and one for its
fences. What a partition knows is a vector of times, one for each clock: all accesses up to these times are ordered before what it
does next. A partition that arrives at a barrier leaves there what it knows, one that has waited for the barrier's phase knows it
too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

THREADS = 128
"""Threads of a partition."""
MOST_PARTITIONS = 5
PRODUCTS, COPIES, BOXES, FENCES = (n * MOST_PARTITIONS for n in (1, 2, 3, 4))
"""Where the clocks of each kind begin. Those of the partitions' own accesses come first."""
CLOCKS = 5 * MOST_PARTITIONS
READERS = 2 * MOST_PARTITIONS
"""The first clocks: those of partitions and of products. Copies read nothing in shared memory."""


class HopperError(Exception):
    """What would be undefined, or never end, on a GPU."""


class Partition:
    """Warps that run one function."""

    def __init__(self, number: int, name: str, known: np.ndarray):
        self.number, self.name = number, name
        self.products, self.copies, self.boxes = (number + kind for kind in (PRODUCTS, COPIES, BOXES))
        """The clocks of its asynchronous operations: matrix products, copies of elements, and copies of boxes."""
        self.known, self.of_all_threads = known.copy(), known.copy()
        """And what all of its threads knew at their last barrier: what one thread may pass on for all of them."""
        self.known[number] = 1
        self.started = np.zeros(CLOCKS, np.int64)
        """How many asynchronous operations of each kind it has started."""
        self.ended = False
        self.waits_for: tuple[Any, int] | None = None
        """A barrier and a parity."""

    def synchronise(self) -> None:
        """All threads of the partition wait for each other."""
        self.of_all_threads = self.known.copy()
        self.known[self.number] += 1

    def left_at_barrier(self, by_all: bool) -> np.ndarray:
        """What an arrival leaves at a barrier."""
        left = self.known.copy() if by_all else self.of_all_threads
        self.known[self.number] += 1
        return left

    def fence(self) -> None:
        """What it has stored until now is visible to asynchronous operations."""
        self.known[self.number + FENCES] = self.known[self.number]
        self.known[self.number] += 1

    def start(self, clock: int) -> int:
        """The time of an asynchronous operation that starts now."""
        self.started[clock] += 1
        return int(self.started[clock])

    def complete(self, clock: int, outstanding: int = 0) -> None:
        """It waits until at most so many of its operations are under way."""
        self.known[clock] = max(self.known[clock], self.started[clock] - outstanding)


class Program:
    """One program. Its partitions are threads, of which one runs at a time, until it waits for a barrier."""

    def __init__(self) -> None:
        self.main = Partition(0, "the whole program", np.zeros(CLOCKS, np.int64))
        self.now = self.main
        self.barriers: list[Any] = []
        self.names = [self.main.name]

    def wait(self, barrier: Any, parity: int) -> None:
        """Lets other partitions run until the barrier's phase of this parity has completed."""
        me = self.now
        me.waits_for = (barrier, parity)
        while not barrier.has_completed(parity):
            if me is self.main:
                raise HopperError(f"{me.name} waits for {barrier} alone")
            self._yield()
        me.waits_for = None
        me.known = np.maximum(me.known, barrier.known)

    def run(self, functions: list[tuple[str, Callable[[], None]]]) -> None:
        """Runs partitions until all have ended."""
        self.names += [name for name, _ in functions]
        self.main.synchronise()
        self._back, self._turns, self._stop = threading.Semaphore(0), {}, False
        self._failure: BaseException | None = None
        running = [Partition(i, name, self.main.known) for i, (name, _) in enumerate(functions, start=1)]
        threads = []
        for partition, (_, function) in zip(running, functions):
            self._turns[partition] = threading.Semaphore(0)
            threads.append(threading.Thread(target=self._body, args=(partition, function), daemon=True))
            threads[-1].start()
        everyone, left = running, list(running)
        while left and self._failure is None:
            ready = [one for one in left if one.waits_for is None or one.waits_for[0].has_completed(one.waits_for[1])]
            if not ready:
                self._failure = HopperError(f"deadlock: {'; '.join(map(_waiting, left))}")
                break
            for one in ready:
                self.now = one
                self._turns[one].release()
                self._back.acquire()
                if self._failure is not None:
                    break
            left = [one for one in left if not one.ended]
        self._stop = True
        for one, thread in zip(everyone, threads):
            self._turns[one].release()
            thread.join()
        self.now = self.main
        if self._failure is not None:
            raise self._failure
        for one in everyone:
            self.main.known = np.maximum(self.main.known, one.known)

    def name_of(self, clock: int) -> str:
        """What has this clock."""
        return ("", "products of ", "copies of ", "boxes of ")[clock // MOST_PARTITIONS] + self.names[clock % MOST_PARTITIONS]

    def end(self) -> None:
        """Nothing may be left over."""
        for barrier in self.barriers:
            barrier.end()

    def _body(self, partition: Partition, function: Callable[[], None]) -> None:
        self._turns[partition].acquire()
        try:
            if not self._stop:
                with np.errstate(all="ignore"):
                    function()
                if partition.known[partition.copies] < partition.started[partition.copies]:
                    raise HopperError(f"{partition.name} ended and has not waited for its copies")
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        partition.ended = True
        self._back.release()

    def _yield(self) -> None:
        me = self.now
        self._back.release()
        self._turns[me].acquire()
        if self._stop:
            raise _Stopped


class _Stopped(BaseException):
    """Ends a partition because another one has failed."""


def _waiting(partition: Partition) -> str:
    assert partition.waits_for is not None
    barrier, parity = partition.waits_for
    return f"{partition.name} waits for parity {parity} of {barrier}"
