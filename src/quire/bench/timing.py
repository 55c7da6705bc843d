"""Time on a GPU: by events, with the L2 cache flushed before each run; by the replay of a captured graph; and on the host alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from quire.bench.contestants import Run

WARM_UP, MILLISECONDS = 10, 40
"""How long one contestant runs in one of its turns, before and while it is timed; at least once each."""


def by_events(run: Callable[[], Any]) -> list[float]:
    """The seconds of each run, as `triton.testing.do_bench` takes them."""
    from triton.testing import do_bench

    return [ms / 1e3 for ms in do_bench(run, warmup=WARM_UP, rep=MILLISECONDS, return_mode="all")]


def capture(run: Run) -> Run:
    """The same work as a CUDA graph: what its replay leaves in the output it returns."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def on_the_host(
    run: Callable[[], Any], settle: Callable[[], None] = torch.cuda.synchronize, calls: int = 2000, burst: int = 100
) -> float:
    """The median of the seconds that a call keeps the host. The device is waited for after each burst, outside of the timing: a
    full queue would make the host wait inside."""
    for _ in range(burst):
        run()
    seconds = []
    for _ in range(calls // burst):
        settle()
        for _ in range(burst):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    settle()
    return statistics.median(seconds)
