"""One measurement, and how it compares with the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.limits import Limits
from quire.bench.workloads import Workload


@dataclass(frozen=True)
class Measurement:
    """One implementation on one workload."""

    workload: str
    implementation: str
    milliseconds: float | None
    """Median of the repetitions' medians; None if the result was wrong."""
    spread: float | None
    """Half the distance between the quartiles of all runs, as a share of the median."""
    error: float
    budget: float
    of_limit: float | None
    """The least time the machine could take, as a share of the time it took."""
    gigabytes_per_second: float | None
    gigaflops: float | None
    note: str = ""
    q_format: str = ""
    """The precision of the queries."""
    bytes: int = 0
    flops: int = 0
    graph_milliseconds: float | None = None
    """The same as a captured graph, if requested and if it could be captured."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        implementation: str,
        limits: Limits,
        seconds: Sequence[Sequence[float]],
        error: float,
        budget: float,
        *,
        note: str = "",
        q_format: str = "",
        graph_seconds: Sequence[Sequence[float]] = (),
    ) -> Measurement:
        """From the seconds of each run of each repetition; without any, the measurement has no speed."""
        typical, graph, least = median(seconds), median(graph_seconds), limits.seconds(workload)
        taken = sorted(s for repetition in seconds for s in repetition)
        quartiles = statistics.quantiles(taken, n=4) if len(taken) > 1 else [0.0, 0.0, 0.0]
        return cls(
            workload.label,
            implementation,
            milliseconds=None if typical is None else typical * 1e3,
            spread=None if typical is None else (quartiles[2] - quartiles[0]) / 2 / typical,
            error=error,
            budget=budget,
            of_limit=None if typical is None or least is None else least / typical,
            gigabytes_per_second=None if typical is None else workload.bytes / typical / 1e9,
            gigaflops=None if typical is None else workload.flops / typical / 1e9,
            note=note,
            q_format=q_format or workload.dtype,
            bytes=workload.bytes,
            flops=workload.flops,
            graph_milliseconds=None if graph is None else graph * 1e3,
        )

    @property
    def right(self) -> bool:
        return self.error <= self.budget

    @property
    def own(self) -> bool:
        return self.implementation.startswith("quire")

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: the error of a result that is missing or not a number is None."""
        error = self.error if math.isfinite(self.error) else None
        return asdict(self) | {"error": error, "right": self.right, "own": self.own}


def median(seconds: Sequence[Sequence[float]]) -> float | None:
    """The median of the repetitions' medians: a repetition in a slow moment of the machine counts once."""
    medians = [statistics.median(repetition) for repetition in seconds if repetition]
    return statistics.median(medians) if medians else None


def compared(rows: Iterable[Measurement]) -> list[dict[str, Any]]:
    """The rows as dicts, Quire's own with how many times as fast they are as the best peer of the same query precision."""
    rows = list(rows)
    dicts = []
    for row in rows:
        peers = [r for r in rows if not r.own and (r.workload, r.q_format) == (row.workload, row.q_format) and r.milliseconds]
        best = min(peers, key=lambda r: r.milliseconds or 0.0, default=None)
        ratios = {"ratio": None, "best_peer": None, "graph_ratio": None} | row.to_dict()
        if row.own and best is not None:
            graphs = [r.graph_milliseconds for r in peers if r.graph_milliseconds]
            ratios["best_peer"] = best.implementation
            if row.milliseconds and best.milliseconds:
                ratios["ratio"] = best.milliseconds / row.milliseconds
            if row.graph_milliseconds and graphs:
                ratios["graph_ratio"] = min(graphs) / row.graph_milliseconds
        dicts.append(ratios)
    return dicts
