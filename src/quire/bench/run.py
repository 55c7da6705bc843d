"""The measurement on a CPU. Each implementation runs in its own process, over the same memory. They are timed in turn, several
times, so that a slow moment of the machine affects all of them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.bench.limits import Limits
from quire.bench.measurement import Measurement
from quire.bench.worker import WITHOUT_AMX, Worker
from quire.bench.workloads import Workload

REPETITIONS = 4
SECONDS = 0.6
"""How long an implementation runs in each repetition."""
ALWAYS = ("quire", "quire without AMX", "quire torch", "gather + SDPA")
EVERYONE = (*ALWAYS, "FlexAttention")
"""Also what is compiled for every workload, which takes some seconds and a C++ compiler."""
VLLM = ("vLLM", "vLLM vec")
"""Those that need an interpreter with another package."""
ENVIRONMENT = {"gather + SDPA": WITHOUT_AMX, "FlexAttention": WITHOUT_AMX} | dict.fromkeys(VLLM, WITHOUT_AMX)


def measure(
    workloads: Sequence[Workload],
    limits: Limits,
    implementations: Sequence[str] = ALWAYS,
    *,
    repetitions: int = REPETITIONS,
    progress: Callable[[str], None] = print,
    vllm: str | None = None,
) -> Iterator[Measurement]:
    """Measures every implementation on every workload. `vllm` is an interpreter that has vLLM. `progress` is called with the label
    of each workload before it is measured. Measurements of a workload are yielded before the next one begins: after Ctrl-C the
    caller has them."""
    pythons = {} if vllm is None else dict.fromkeys(VLLM, vllm)
    for workload in workloads:
        progress(workload.label)
        workers = {
            name: Worker(name, ENVIRONMENT.get(name, {}) | _PATH, pythons.get(name, sys.executable))
            for name in (*implementations, *pythons)
        }
        try:
            with TemporaryDirectory(dir=_memory(2 * workload.bytes)) as folder:
                results = _measure(workload, workers, limits, folder, repetitions)
        finally:
            for worker in workers.values():
                worker.close()
        yield from results


_PATH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))}
"""Another interpreter finds Quire where this one did."""


def _memory(bytes: int) -> str | None:
    """A folder in memory, if there is one with that much space; else None, which means the folder for temporary files."""
    folder = "/dev/shm"
    return folder if os.path.isdir(folder) and shutil.disk_usage(folder).free > bytes else None


def _measure(workload: Workload, workers: dict[str, Worker], limits: Limits, folder: str, repetitions: int) -> list[Measurement]:
    replies = {name: worker.request({"build": workload.to_json(), "folder": folder}) for name, worker in workers.items()}
    built = {name: answer for name, answer in replies.items() if not answer.get("absent")}
    right = [name for name, answer in built.items() if answer.get("error", float("nan")) <= answer.get("budget", 0.0)]
    seconds: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _ in range(repetitions):
        for name in right:
            seconds[name].append(workers[name].request({"time": SECONDS}).get("seconds", []))
    results = []
    for name, answer in built.items():
        error, budget = answer.get("error", float("nan")), answer.get("budget", 0.0)
        note = "" if any(seconds[name]) else answer.get("died", "wrong result: no speed")
        results.append(Measurement.of(workload, name, limits, seconds[name], error, budget, note=note))
    return results
