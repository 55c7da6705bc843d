"""The measurement on a CPU: each contestant in a process of its own, over the same memory, in turns, so that a slow moment of the
machine meets them all."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.bench.limits import Limits
from quire.bench.measured import Measured
from quire.bench.worker import WITHOUT_AMX, Worker
from quire.bench.workloads import Workload

TURNS = 4
SECONDS = 0.6
"""How long a contestant runs in each of its turns."""
ALWAYS = ("quire", "quire without AMX", "quire torch", "gather + SDPA")
EVERYONE = (*ALWAYS, "FlexAttention")
"""Also what is compiled anew for every workload, which takes its time and a C++ compiler."""
VLLM = ("vLLM", "vLLM vec")
"""Those that need an interpreter with another package."""
ENVIRONMENT = {"gather + SDPA": WITHOUT_AMX, "FlexAttention": WITHOUT_AMX} | dict.fromkeys(VLLM, WITHOUT_AMX)


def measure(
    workloads: Sequence[Workload],
    limits: Limits,
    contestants: Sequence[str] = ALWAYS,
    *,
    turns: int = TURNS,
    tell: Callable[[str], None] = print,
    vllm: str | None = None,
) -> Iterator[Measured]:
    """Measures every contestant on every workload. `vllm` is an interpreter that has it."""
    pythons = {} if vllm is None else dict.fromkeys(VLLM, vllm)
    for workload in workloads:
        tell(workload.label)
        workers = {
            name: Worker(name, ENVIRONMENT.get(name, {}) | _PATH, pythons.get(name, sys.executable))
            for name in (*contestants, *pythons)
        }
        try:
            with TemporaryDirectory(dir=_memory(2 * workload.bytes)) as folder:
                yield from _one(workload, workers, limits, folder, turns)
        finally:
            for worker in workers.values():
                worker.close()


_PATH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))}
"""Another interpreter finds Quire where this one did."""


def _memory(bytes: int) -> str | None:
    """A folder that lives in memory, if there is one with that much room; else None, for wherever temporary files go."""
    folder = "/dev/shm"
    return folder if os.path.isdir(folder) and shutil.disk_usage(folder).free > bytes else None


def _one(workload: Workload, workers: dict[str, Worker], limits: Limits, folder: str, turns: int) -> list[Measured]:
    answers = {name: worker.ask({"build": workload.to_json(), "folder": folder}) for name, worker in workers.items()}
    built = {name: answer for name, answer in answers.items() if not answer.get("absent")}
    fit = [name for name, answer in built.items() if answer.get("error", float("nan")) <= answer.get("budget", 0.0)]
    seconds: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _ in range(turns):
        for name in fit:
            seconds[name].append(workers[name].ask({"time": SECONDS}).get("seconds", []))
    results = []
    for name, answer in built.items():
        error, budget = answer.get("error", float("nan")), answer.get("budget", 0.0)
        note = "" if any(seconds[name]) else answer.get("died", "wrong result: no speed")
        results.append(Measured.of(workload, name, limits, seconds[name], error, budget, note=note))
    return results
