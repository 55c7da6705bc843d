"""The measurement in one process, on the CPU with a clock of our own: who is timed, in which order, and who is not."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.bench import gpu, timing
from quire.bench.case import BenchCase
from quire.bench.implementations import OWN_ON_CUDA, BoundImplementation, Run, device_copy, own
from quire.bench.limits import Limits, gpu_limits
from quire.bench.workloads import Workload

SMALL = Workload("small", ((1, 40), (3, 10)), "bf16", q_heads=4, kv_heads=2, head_dim=16)
LIMITS = Limits(1e9, 1e12, 2e9)


def timer(run: Callable[[], Any]) -> list[float]:
    run()
    return [3e-3, 1e-3, 2e-3]


def measure(workload: Workload, implementations: dict[str, Any], **more: Any) -> list[Any]:
    settings = {"timer": timer, "device": "cpu", "progress": lambda name: None} | more
    return list(gpu.measure([workload], LIMITS, implementations, **settings))


def test_figures_follow_from_the_times() -> None:
    (row,) = measure(SMALL, {"quire": own})
    assert row.right and row.own and row.note == ""
    assert row.milliseconds == pytest.approx(2.0)
    assert row.gigabytes_per_second == pytest.approx(SMALL.bytes / 2e-3 / 1e9)
    assert row.gigaflops == pytest.approx(SMALL.flops / 2e-3 / 1e9)
    assert row.of_limit == pytest.approx(SMALL.bytes / 1e9 / 2e-3)
    assert 0 < row.spread < 1 and row.graph_milliseconds is None
    assert (row.bytes, row.flops, row.q_format) == (SMALL.bytes, SMALL.flops, "bf16")


def test_a_slow_turn_has_one_vote() -> None:
    repetitions = iter([[1.0] * 3, [9.0] * 50, [2.0] * 3])
    (row,) = measure(SMALL, {"quire": own}, timer=lambda run: next(repetitions))
    assert row.milliseconds == pytest.approx(2000)


def test_implementations_are_timed_in_turn() -> None:
    order: list[str] = []

    def named(name: str) -> Callable[[BenchCase], BoundImplementation]:
        def bind(case: BenchCase) -> BoundImplementation:
            bound = own(case)
            return bound._replace(run=lambda: (order.append(name), bound.run())[1])

        return bind

    measure(SMALL, {"a": named("a"), "b": named("b")}, repetitions=2)
    assert order == ["a", "b", *"abab"]


def wrong(case: BenchCase) -> BoundImplementation:
    run = own(case).run
    return BoundImplementation(lambda: run() * 1.1, "bf16")


def unwritten(case: BenchCase) -> BoundImplementation:
    out = case.out()
    return BoundImplementation(lambda: out, "bf16")


def refuses(case: BenchCase) -> BoundImplementation:
    raise RuntimeError("no such head_dim\nand a long story")


def fails(case: BenchCase) -> BoundImplementation:
    def run() -> torch.Tensor:
        raise ValueError

    return BoundImplementation(run, "bf16")


@pytest.mark.parametrize(
    "implementation, note",
    [
        (wrong, "wrong result: no speed"),
        (unwritten, "wrong result: no speed"),
        (refuses, "RuntimeError: no such head_dim"),
        (fails, "ValueError: "),
    ],
)
def test_no_speed_for_a_wrong_result(implementation: Any, note: str) -> None:
    bad, good = measure(SMALL, {"peer": implementation, "quire": own})
    assert (bad.milliseconds, bad.gigaflops, bad.of_limit, bad.right, bad.note) == (None, None, None, False, note)
    assert good.right and good.milliseconds


def test_an_exception_while_timing_is_a_note() -> None:
    calls: list[int] = []

    def sometimes(run: Callable[[], Any]) -> list[float]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return [1e-3]

    (row,) = measure(SMALL, {"quire": own}, timer=sometimes)
    assert (row.note, row.milliseconds) == ("RuntimeError: out of memory", 1.0)


def test_data_that_cannot_be_made_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(workload: Workload, device: object) -> BenchCase:
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu, "build", no_memory)
    rows = measure(SMALL, {"quire": own, "peer": own})
    assert [(row.implementation, row.note, row.right) for row in rows] == [
        ("quire", "no data: RuntimeError: no memory", False),
        ("peer", "no data: RuntimeError: no memory", False),
    ]


def test_only_those_with_an_answer_are_listed() -> None:
    implementations = OWN_ON_CUDA | {"copy": device_copy}
    assert [row.implementation for row in measure(SMALL, implementations)] == ["quire"]
    quantised = measure(replace(SMALL, format="e4m3fn"), implementations)
    assert [(row.implementation, row.q_format, row.right) for row in quantised] == [
        ("quire", "bf16", True),
        ("quire fp8 q", "e4m3fn", True),
    ]
    assert quantised[0].budget < quantised[1].budget
    written = measure(replace(SMALL, operation="write"), implementations)
    assert [(row.implementation, row.right, row.error, row.budget) for row in written] == [
        ("quire", True, 0.0, 0.0),
        ("copy", True, 0.0, 0.0),
    ]
    assert written[0].of_limit == pytest.approx(replace(SMALL, operation="write").bytes / 2e9 / 2e-3)


class Graph:
    """Plays a captured graph: what `run` gave, again into the same memory."""

    def __init__(self, run: Run, replays: bool = True):
        self.out, self.run, self.replays = run(), run, replays

    def __call__(self) -> torch.Tensor:
        return self.out.copy_(self.run()) if self.replays else self.out


def test_graphs_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def slower_than_graphs(run: Callable[[], Any]) -> list[float]:
        return [1e-3 if isinstance(run, Graph) else 2e-3]

    (row,) = measure(SMALL, {"quire": own}, capture=Graph, timer=slower_than_graphs)
    assert (row.milliseconds, row.graph_milliseconds, row.note) == (2.0, 1.0, "")


def test_a_graph_that_does_not_replay_is_seen() -> None:
    (row,) = measure(SMALL, {"quire": own}, capture=lambda run: Graph(run, replays=False))
    assert (row.milliseconds, row.graph_milliseconds, row.note) == (2.0, None, "as a graph: wrong result")


def test_what_cannot_be_captured_is_still_measured() -> None:
    def refuse(run: Run) -> Run:
        raise RuntimeError("a read from the device")

    (row,) = measure(SMALL, {"quire": own}, capture=refuse)
    assert row.right
    assert (row.milliseconds, row.graph_milliseconds) == (2.0, None)
    assert row.note == "no graph: RuntimeError: a read from the device"


@pytest.mark.parametrize("dirty", [False, True], ids=["clean", "dirty"])
def test_the_cache_is_flushed_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch, dirty: bool) -> None:
    """Events are played: flushing takes a second of the device, the run two milliseconds."""
    now, runs = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = math.nan

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    def spend(seconds: float) -> None:
        now[0] += seconds

    asked: list[bool] = []

    def flusher(dirty: bool) -> Callable[[], None]:
        asked.append(dirty)
        return lambda: spend(1.0)

    def run() -> None:
        runs.append(1)
        spend(2e-3)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "flusher", flusher)
    seconds = timing.by_events(run, dirty=dirty)
    assert asked == [dirty]
    assert seconds == pytest.approx([2e-3] * round(timing.MILLISECONDS / 2), abs=1e-6)
    assert len(runs) > len(seconds), "nothing warmed up"


def test_the_flush_reads_unless_it_shall_leave_something_to_store(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    zeros = torch.zeros

    def on_the_host(size: int, **how: Any) -> torch.Tensor:
        made.append(zeros(size >> 16, **(how | {"device": "cpu"})) + 1)
        return made[-1]

    monkeypatch.setattr(torch, "zeros", on_the_host)
    for dirty in (False, True):
        timing.flusher(dirty)()
    assert bool((made[0] == 1).all()) and bool((made[1] == 0).all())


def test_limits_are_the_best_of_all_ways() -> None:
    size, seconds = 1 << 16, iter([4.0, 2.0, 3.0, 5.0, 7.0])
    read: list[int] = []

    def clock(run: Callable[[], Any]) -> list[float]:
        best = next(seconds)
        if best != 7.0:  # torch's products of bf16 can end the process on a CPU
            run()
        return [best + 1, best]

    limits = gpu_limits(clock, lambda memory: read.append(memory.numel()), torch.device("cpu"), size)
    assert limits.bytes == 4 * size / 2.0 and limits.copied == 4 * size / 5.0
    assert limits.flops == 2 * (size >> 10) ** 3 / 7.0
    assert read == [size]


def test_the_reading_kernel_reads(tmp_path: Any) -> None:
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    import os
    import subprocess

    pytest.importorskip("triton")
    code = (
        "import torch\nfrom quire.bench.gpu_read import TILE, reads\nx = torch.randn(3 * TILE)\n"
        "torch.testing.assert_close(reads(x), x.view(3, TILE).sum(1), rtol=1e-4, atol=1e-3)"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
