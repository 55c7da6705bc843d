"""The measurement on a CPU: workers in processes of their own, and no time for a wrong result."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.bench import run, worker
from quire.bench.limits import Limits
from quire.bench.workloads import Workload

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "fp32", q_heads=4, kv_heads=2, head_dim=16)


def test_measure_runs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SECONDS", 0.01)
    rows = list(run.measure([SMALL], Limits(1e10, 1e11), run.ALWAYS, repetitions=2, progress=lambda name: None))
    # Without AMX there is nothing to measure without it.
    names = [row.implementation for row in rows if row.implementation != "quire without AMX"]
    assert names == ["quire", "quire torch", "gather + SDPA"]
    assert all(row.right and row.milliseconds and row.milliseconds > 0 for row in rows)


def test_no_speed_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, dict[str, Any]] = {"quire": {"error": 1.0, "budget": 0.1}, "gather + SDPA": {"died": "exit status -4"}}
    monkeypatch.setattr(worker.Worker, "__init__", lambda self, name, *how: setattr(self, "name", name))
    monkeypatch.setattr(
        worker.Worker, "request", lambda self, command: answers[self.name] if "build" in command else {"seconds": [1.0]}
    )
    monkeypatch.setattr(worker.Worker, "close", lambda self: None)
    rows = run.measure([SMALL], Limits(1e10, 1e11), tuple(answers), progress=lambda name: None)
    assert [(row.milliseconds, row.right, row.note) for row in rows] == [
        (None, False, "wrong result: no speed"),
        (None, False, "exit status -4"),
    ]


def test_repetitions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def request(self: Any, command: dict[str, Any]) -> dict[str, Any]:
        asked.append((self.name, *command))
        return {"error": 0.0, "budget": 0.1, "seconds": [1e-3]}

    monkeypatch.setattr(worker.Worker, "__init__", lambda self, name, *how: setattr(self, "name", name))
    monkeypatch.setattr(worker.Worker, "request", request)
    monkeypatch.setattr(worker.Worker, "close", lambda self: None)
    list(run.measure([SMALL], Limits(1e10, 1e11), ("quire", "gather + SDPA"), repetitions=3, progress=lambda name: None))
    assert [name for name, *command in asked if command == ["time"]] == ["quire", "gather + SDPA"] * 3


def test_a_worker_that_dies_is_reported() -> None:
    dead = worker.Worker("no such implementation", {})
    try:
        assert "died" in dead.request({"build": SMALL.to_json(), "folder": None})
    finally:
        dead.close()


def test_an_implementation_that_does_not_support_a_workload_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SECONDS", 0.01)
    rows = run.measure(
        [replace(SMALL, format="int8")], Limits(1e10, 1e11), ("quire", "gather + SDPA"), repetitions=1, progress=print
    )
    assert [(row.implementation, row.right) for row in rows] == [("quire", True)]


def test_another_interpreter_runs_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds Quire where this one did, and a peer that cannot be imported there is a note in its rows."""
    monkeypatch.setattr(run, "SECONDS", 0.01)
    rows = list(run.measure([SMALL], Limits(1e10, 1e11), (), repetitions=1, progress=print, vllm=sys.executable))
    assert [(row.implementation, row.milliseconds) for row in rows] == [("vLLM", None), ("vLLM vec", None)]
    assert all(row.note.startswith("exit status") for row in rows)


def test_a_worker_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LIMIT", 0.0)
    slow = worker.Worker("quire", {})
    try:
        assert slow.request({"build": SMALL.to_json(), "folder": "."}) == {"died": "no answer in 0 s"}
    finally:
        slow.close()


def test_a_limit_that_was_measured_in_another_type_says_nothing() -> None:
    """A product in fp32 bounds none in bf16; memory bounds both."""
    bf16, by_work, by_memory = (
        replace(SMALL, dtype="bf16"),
        Limits(1e15, 1e9, faster=("bf16",)),
        Limits(1e9, 1e15, faster=("bf16",)),
    )
    assert by_work.seconds(bf16) is None and by_work.seconds(SMALL) == SMALL.flops / 1e9
    assert by_memory.seconds(bf16) == bf16.bytes / 1e9


def test_an_interrupt_keeps_what_was_measured_and_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second workload: the first one was yielded, and no worker lives on."""
    workers: list[worker.Worker] = []

    class Recorded(worker.Worker):
        def __init__(self, *args: Any):
            super().__init__(*args)
            workers.append(self)

        def request(self, command: dict[str, Any]) -> dict[str, Any]:
            if len(workers) > 1:
                raise KeyboardInterrupt
            return {"error": 0.0, "budget": 1.0, "seconds": [1.0]}

    monkeypatch.setattr(run, "Worker", Recorded)
    rows: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        rows.extend(run.measure([SMALL, SMALL], Limits(1e10, 1e11), ("quire",), repetitions=1, progress=lambda name: None))
    assert [row.implementation for row in rows] == ["quire"]
    assert [one.process.poll() is not None for one in workers] == [True, True]
    # A worker has a session of its own: Ctrl-C in a terminal does not reach it, and it prints no traceback.
    child = worker.Worker("quire", {})
    try:
        assert os.getsid(child.process.pid) == child.process.pid
    finally:
        child.close()
