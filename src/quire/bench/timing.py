"""Time on a GPU: by events, with the L2 cache flushed before each run, and by the replay of a captured graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from quire.bench.implementations import Run

WARM_UP, MILLISECONDS = 10, 40
"""How long an implementation runs in each repetition, before it is timed and while it is timed; at least once each."""
FLUSH = 2**28
"""Bytes that are touched before each run: several times any L2 cache."""


def by_events(run: Callable[[], Any], *, dirty: bool = False) -> list[float]:
    """The seconds of each run. The L2 cache is full of other memory when a run begins. If `dirty`, that memory was written: a run
    then also waits for its write-back, as with `triton.testing.do_bench`."""
    flush = flusher(dirty)
    guess = statistics.median(_timed(run, flush, 5)) * 1e3
    _timed(run, flush, int(WARM_UP / guess))
    return _timed(run, flush, max(1, int(MILLISECONDS / guess)))


def flusher(dirty: bool) -> Callable[[], Any]:
    memory = torch.zeros(FLUSH // 4, dtype=torch.int32, device="cuda")
    return memory.zero_ if dirty else memory.amax


def _timed(run: Callable[[], Any], flush: Callable[[], Any], times: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for begin, end in events:
        flush()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


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
