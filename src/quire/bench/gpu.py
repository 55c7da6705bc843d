"""The measurement on a GPU: all contestants in one process, over the same tensors, in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.bench.case import build
from quire.bench.contestants import Bound, Contestant, Run
from quire.bench.limits import Limits, Timer
from quire.bench.measured import Measured
from quire.bench.truth import Truth
from quire.bench.workloads import Workload

TURNS = 3


@dataclass
class Entry:
    """One contestant while it is measured on one workload. Whatever it raises becomes its note, and never ends the run."""

    name: str
    q_format: str
    bound: Bound | None = None
    graph: Run | None = None
    error: float = float("nan")
    budget: float = 0.0
    note: str = ""
    turns: list[list[float]] = field(default_factory=list)
    graph_turns: list[list[float]] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.error <= self.budget

    def attempt(self, do: Callable[..., Any], *args: Any, prefix: str = "") -> Any:
        """Does it. If that fails: None, and why in the note."""
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
    contestants: Mapping[str, Contestant],
    *,
    timer: Timer,
    capture: Callable[[Run], Run] | None = None,
    turns: int = TURNS,
    device: torch.device | str = "cuda",
    tell: Callable[[str], None] = print,
) -> Iterator[Measured]:
    """Measures every contestant on every workload; with `capture`, as a graph too."""
    for workload in workloads:
        tell(workload.label)
        rows = _race(workload, limits, contestants, timer, capture, turns, device)
        _release()
        yield from rows


def _race(
    workload: Workload,
    limits: Limits,
    contestants: Mapping[str, Contestant],
    timer: Timer,
    capture: Callable[[Run], Run] | None,
    turns: int,
    device: torch.device | str,
) -> list[Measured]:
    entries = _checked(workload, contestants, device, capture)
    for _ in range(turns):
        for entry in entries:
            if entry.bound is not None and entry.right:
                entry.turns.append(entry.attempt(timer, entry.bound.run) or [])
            if entry.graph is not None:
                entry.graph_turns.append(entry.attempt(timer, entry.graph, prefix="as a graph: ") or [])
    return [
        Measured.of(
            workload, e.name, limits, e.turns, e.error, e.budget, note=e.note, q_format=e.q_format, graph_turns=e.graph_turns
        )
        for e in entries
    ]


def _checked(
    workload: Workload,
    contestants: Mapping[str, Contestant],
    device: torch.device | str,
    capture: Callable[[Run], Run] | None,
) -> list[Entry]:
    """All contestants that have an answer to the workload, bound to its tensors, each with the error of one run. Those without data
    or with an exception have a note instead."""
    try:
        case = build(workload, device)
        truth = Truth(case) if workload.operation == "attend" else None
    except Exception as error:
        return [Entry(name, workload.dtype, note=f"no data: {why(error)}") for name in contestants]
    entries = []
    for name, contestant in contestants.items():
        entry = Entry(name, workload.dtype)
        bound = entry.attempt(contestant, case)
        if bound is not None:
            entry.bound, entry.q_format = bound, bound.q_format
            entry.attempt(_check, entry, bound, truth)
            if capture is not None and entry.right:
                entry.attempt(_capture, entry, bound, capture, truth, prefix="no graph: ")
        if bound is not None or entry.note:
            entries.append(entry)
    return entries


def _check(entry: Entry, bound: Bound, truth: Truth | None) -> None:
    entry.budget = 0.0 if truth is None else truth.budget(bound.q_format)
    entry.error = _error(bound, bound.run, truth)
    if not entry.right:
        entry.note = "wrong result: no speed"


def _error(bound: Bound, run: Run, truth: Truth | None) -> float:
    out = run()
    if truth is not None:
        return truth.error(out)
    assert bound.difference is not None
    return bound.difference()


def _capture(entry: Entry, bound: Bound, capture: Callable[[Run], Run], truth: Truth | None) -> None:
    """Keeps the graph if its replay is right too, into an output that was wiped."""
    graph = capture(bound.run)
    graph().fill_(torch.nan if truth is not None else 0)
    if _error(bound, graph, truth) <= entry.budget:
        entry.graph = graph
    else:
        entry.note = "as a graph: wrong result"


def _release() -> None:
    """Gives the workload's memory back, graphs included."""
    gc.collect()
    # A card that has faulted raises here too. It says so in the note of whatever meets it next, and what is known is not lost.
    with suppress(Exception):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
