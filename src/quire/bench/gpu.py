"""The measurement on a GPU: all implementations in one process, over the same tensors, timed in turn, several times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.bench.case import build
from quire.bench.implementations import BoundImplementation, Implementation, Run
from quire.bench.limits import Limits, Timer
from quire.bench.measurement import Measurement
from quire.bench.reference_check import BenchReference, SampleError
from quire.bench.workloads import Workload

REPETITIONS = 3


@dataclass
class Entry:
    """One implementation while it is measured on one workload. Whatever it raises becomes its note, and never ends the run."""

    name: str
    q_format: str
    bound: BoundImplementation | None = None
    graph: Run | None = None
    error: float = float("nan")
    budget: float = 0.0
    note: str = ""
    seconds: list[list[float]] = field(default_factory=list)
    graph_seconds: list[list[float]] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.error <= self.budget

    def attempt(self, do: Callable[..., Any], *args: Any, prefix: str = "") -> Any:
        """Calls it. If it raises: None, and the reason in the note."""
        try:
            return do(*args)
        except Exception as error:
            self.note = prefix + why(error)
            return None


def why(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def measure(
    workloads: Sequence[Workload],
    limits: Limits,
    implementations: Mapping[str, Implementation],
    *,
    timer: Timer,
    capture: Callable[[Run], Run] | None = None,
    repetitions: int = REPETITIONS,
    device: torch.device | str = "cuda",
    progress: Callable[[str], None] = print,
) -> Iterator[Measurement]:
    """Measures every implementation on every workload; with `capture`, as a graph too. `progress` is called with the label of each
    workload before it is measured. Measurements of a workload are yielded before the next one begins: after Ctrl-C the caller has
    them."""
    for workload in workloads:
        progress(workload.label)
        rows = _measure(workload, limits, implementations, timer, capture, repetitions, device)
        release_memory()
        yield from rows


def _measure(
    workload: Workload,
    limits: Limits,
    implementations: Mapping[str, Implementation],
    timer: Timer,
    capture: Callable[[Run], Run] | None,
    repetitions: int,
    device: torch.device | str,
) -> list[Measurement]:
    entries = _checked(workload, implementations, device, capture)
    for _ in range(repetitions):
        for entry in entries:
            if entry.bound is not None and entry.right:
                entry.seconds.append(entry.attempt(timer, entry.bound.run) or [])
            if entry.graph is not None:
                entry.graph_seconds.append(entry.attempt(timer, entry.graph, prefix="as a graph: ") or [])
    return [
        Measurement.of(
            workload, e.name, limits, e.seconds, e.error, e.budget, note=e.note, q_format=e.q_format, graph_seconds=e.graph_seconds
        )
        for e in entries
    ]


def _checked(
    workload: Workload,
    implementations: Mapping[str, Implementation],
    device: torch.device | str,
    capture: Callable[[Run], Run] | None,
) -> list[Entry]:
    """All implementations that support the workload, bound to its tensors, each with the error of one run. After an exception they
    have a note instead."""
    try:
        case = build(workload, device)
        reference = BenchReference(case) if workload.operation == "attend" else None
    except Exception as error:
        return [Entry(name, workload.dtype, note=f"no data: {why(error)}") for name in implementations]
    entries = []
    for name, implementation in implementations.items():
        entry = Entry(name, workload.dtype)
        bound = entry.attempt(implementation, case)
        if bound is not None:
            entry.bound, entry.q_format = bound, bound.q_format
            entry.attempt(_check, entry, bound, reference)
            if capture is not None and entry.right:
                entry.attempt(_capture, entry, bound, capture, reference, prefix="no graph: ")
        if bound is not None or entry.note:
            entries.append(entry)
    return entries


def _check(entry: Entry, bound: BoundImplementation, reference: BenchReference | None) -> None:
    entry.error, entry.budget = _error(bound, bound.run, reference)
    if not entry.right:
        entry.note = "wrong result: no speed"


def _error(bound: BoundImplementation, run: Run, reference: BenchReference | None) -> SampleError:
    """Runs it and compares. What is not attention must be equal bit by bit."""
    out = run()
    if reference is not None:
        return reference.check(out, bound.q_format)
    assert bound.difference is not None
    return SampleError(bound.difference(), 0.0)


def _capture(entry: Entry, bound: BoundImplementation, capture: Callable[[Run], Run], reference: BenchReference | None) -> None:
    """Keeps the graph if its replay, into an output that was overwritten before, is right too."""
    graph = capture(bound.run)
    graph().fill_(torch.nan if reference is not None else 0)
    if _error(bound, graph, reference).right:
        entry.graph = graph
    else:
        entry.note = "as a graph: wrong result"


def release_memory() -> None:
    """Frees the memory of a workload, graphs included."""
    gc.collect()
    # A device that has faulted raises here too. The next implementation gets that error as its note; results so far are kept.
    with suppress(Exception):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
