"""What this machine can do, measured in the same run: the bound that every figure is compared with."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Limits(NamedTuple):
    """Bytes read and floating-point operations per second."""

    bytes: float
    flops: float

    def seconds(self, bytes: int, flops: int) -> float:
        """The least time that this much work can take."""
        return max(bytes / self.bytes, flops / self.flops)


def cpu_limits() -> Limits:
    """The best of a few runs: a sum over memory that no cache holds, and a product of fp32 matrices."""
    memory, a = torch.ones(1 << 27), torch.randn(2048, 2048)
    return Limits(memory.nbytes / _best(memory.sum), 2 * 2048**3 / _best(lambda: a @ a))


def _best(run: object) -> float:
    assert callable(run)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
