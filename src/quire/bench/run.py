"""The measurement: each workload in turns, contestant after contestant, so that a slow moment of the machine meets them all."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any

from quire.bench.limits import Limits
from quire.bench.worker import WITHOUT_AMX, Worker
from quire.bench.workloads import Workload

TURNS = 4
SECONDS = 0.6
"""How long a contestant runs in each of its turns."""
ENVIRONMENT = {"quire": {}, "gather + SDPA": WITHOUT_AMX}


@dataclass(frozen=True)
class Measured:
    """One contestant on one workload."""

    workload: str
    contestant: str
    milliseconds: float | None
    """Median over all turns; None if the result was wrong."""
    spread: float | None
    """Half the distance between the quartiles, as a share of the median."""
    error: float
    budget: float
    of_limit: float | None
    """The least time the machine could take, as a share of the time it took."""
    gigabytes_per_second: float | None
    gigaflops: float | None
    note: str = ""

    @property
    def right(self) -> bool:
        return self.error <= self.budget

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}


def measure(
    workloads: Sequence[Workload],
    limits: Limits,
    contestants: Sequence[str] = tuple(ENVIRONMENT),
    tell: Callable[[str], None] = print,
) -> list[Measured]:
    """Measures every contestant on every workload."""
    results = []
    for workload in workloads:
        tell(workload.label)
        workers = {name: Worker(name, ENVIRONMENT[name]) for name in contestants}
        try:
            with TemporaryDirectory(dir=_memory(2 * workload.bytes)) as folder:
                results += _one(workload, workers, limits, folder)
        finally:
            for worker in workers.values():
                worker.close()
    return results


def _memory(bytes: int) -> str | None:
    """A folder that lives in memory, if there is one with that much room; else None, for wherever temporary files go."""
    folder = "/dev/shm"
    return folder if os.path.isdir(folder) and shutil.disk_usage(folder).free > bytes else None


def _one(workload: Workload, workers: dict[str, Worker], limits: Limits, folder: str) -> list[Measured]:
    built = {name: worker.ask({"build": workload.to_json(), "folder": folder}) for name, worker in workers.items()}
    fit = [name for name, answer in built.items() if answer.get("error", float("nan")) <= answer.get("budget", 0.0)]
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(TURNS):
        for name in fit:
            seconds[name] += workers[name].ask({"time": SECONDS}).get("seconds", [])
    results = []
    for name, answer in built.items():
        taken = seconds[name]
        if not taken:
            note = answer.get("died", "wrong result: no speed")
            error, budget = answer.get("error", float("nan")), answer.get("budget", 0.0)
            results.append(Measured(workload.label, name, None, None, error, budget, None, None, None, note))
            continue
        median = statistics.median(taken)
        low, _, high = statistics.quantiles(taken, n=4)
        results.append(
            Measured(
                workload.label,
                name,
                median * 1e3,
                (high - low) / 2 / median,
                answer["error"],
                answer["budget"],
                limits.seconds(workload.bytes, workload.flops) / median,
                workload.bytes / median / 1e9,
                workload.flops / median / 1e9,
            )
        )
    return results
