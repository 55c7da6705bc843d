"""The bandwidth and the arithmetic throughput of this machine, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quire.bench.workloads import Workload

Timer = Callable[[Callable[[], Any]], list[float]]
"""Runs something many times and returns the seconds of each run."""


class Limits(NamedTuple):
    """Bytes read, floating-point operations, and bytes copied (read and written both counted) per second."""

    bytes: float
    flops: float
    copied: float = float("nan")
    faster: tuple[str, ...] = ()
    """Types whose products may be faster than the one that was measured."""

    def seconds(self, workload: Workload) -> float | None:
        """The least time that the workload can take; None if no limit was measured for its type."""
        if workload.operation == "write":
            return workload.bytes / self.copied
        read, computed = workload.bytes / self.bytes, workload.flops / self.flops
        return None if computed > read and workload.dtype in self.faster else max(read, computed)


def cpu_limits() -> Limits:
    """The best of a few runs: a sum over memory that no cache holds, and a product of fp32 matrices. (One of bf16 would end the
    process on some CPUs.)"""
    memory, a = torch.ones(1 << 27, device="cpu"), torch.randn(2048, 2048, device="cpu")
    return Limits(memory.nbytes / _best(memory.sum), 2 * 2048**3 / _best(lambda: a @ a), faster=("bf16",))


def _best(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def gpu_limits(timer: Timer, reads: Callable[[torch.Tensor], Any], device: torch.device, size: int = 1 << 30) -> Limits:
    """The best of many runs, over random data (zeros would be faster): `size` fp32 numbers read in the ways torch has and by
    `reads`, half of them copied to the other half, and a product of bf16 matrices."""
    memory = torch.randn(size, device=device)
    ways = (memory.sum, memory.amax, lambda: reads(memory))
    read = min(second for way in ways for second in timer(way))
    source, target = memory.chunk(2)
    copied = min(timer(lambda: target.copy_(source)))
    n = min(8192, size >> 10)
    a, b = torch.randn(2, n, n, dtype=torch.bfloat16, device=device)
    product = min(timer(lambda: a @ b))
    return Limits(memory.nbytes / read, 2 * n**3 / product, memory.nbytes / copied)
