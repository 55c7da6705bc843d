"""The bench refuses to time a wrong result, and its workloads are the same in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire.bench import contestants, limits, run, worker
from quire.bench.truth import error_and_budget
from quire.bench.workloads import CPU_WORKLOADS, Workload
from quire.cli import main

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "fp32", q_heads=4, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", contestants.CONTESTANTS)
def test_contestants_are_right(name: str, dtype: str) -> None:
    workload = Workload("small", SMALL.rows, dtype, q_heads=4, kv_heads=2, head_dim=16)
    q, cache, batch = workload.build()
    error, budget = error_and_budget(contestants.CONTESTANTS[name](q, cache, batch)(), q, cache, batch)
    assert 0 < error <= budget


@pytest.mark.parametrize("fault", ["a row", "the last token", "nan"])
def test_wrong_results_exceed_the_budget(fault: str) -> None:
    q, cache, batch = SMALL.build()
    out = quire.attend(q, cache, batch)
    if fault == "a row":
        out[70] = out[69]
    elif fault == "nan":
        out[0] = torch.nan
    else:
        out[:1] = quire.attend(q[:1], cache, quire.Batch(batch.page_table[:1], batch.kv_lens[:1] - 1, torch.tensor([0, 1])))
    error, budget = error_and_budget(out, q, cache, batch)
    assert not error <= budget


def test_workloads_travel_as_json_and_are_repeatable() -> None:
    assert len({w.label for w in CPU_WORKLOADS}) == len(CPU_WORKLOADS)
    for workload in CPU_WORKLOADS:
        assert Workload.from_json(workload.to_json()) == workload
    (a, cache_a, batch_a), (b, cache_b, batch_b) = SMALL.build(), SMALL.build()
    assert torch.equal(a, b)
    assert torch.equal(cache_a.k, cache_b.k)
    assert torch.equal(batch_a.page_table, batch_b.page_table)


def test_contestants_can_map_the_same_memory(tmp_path: Path) -> None:
    (_, first, _), (_, second, _), (_, apart, _) = SMALL.build(str(tmp_path)), SMALL.build(str(tmp_path)), SMALL.build()
    assert torch.equal(first.k, apart.k)
    first.k[0, 0] = 7.0
    assert torch.equal(second.k, first.k)
    assert not torch.equal(apart.k, first.k)


def test_bytes_and_flops_are_counted_by_hand() -> None:
    w = Workload("w", ((1, 3), (2, 1)), "bf16", q_heads=4, kv_heads=2, head_dim=8)
    assert w.bytes == (2 * (4 + 3) * 2 * 8 + 2 * 3 * 4 * 8) * 2
    assert w.flops == 4 * (4 + (2 + 3)) * 4 * 8


def test_measure_runs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SECONDS", 0.01)
    rows = run.measure([SMALL], limits.Limits(1e10, 1e11), tell=lambda name: None)
    assert [row.contestant for row in rows] == ["quire", "gather + SDPA"]
    assert all(row.right and row.milliseconds and row.milliseconds > 0 for row in rows)


def test_no_speed_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, dict[str, Any]] = {"quire": {"error": 1.0, "budget": 0.1}, "gather + SDPA": {"died": "exit status -4"}}
    monkeypatch.setattr(worker.Worker, "__init__", lambda self, name, environment: setattr(self, "name", name))
    monkeypatch.setattr(worker.Worker, "ask", lambda self, command: answers[self.name])
    monkeypatch.setattr(worker.Worker, "close", lambda self: None)
    rows = run.measure([SMALL], limits.Limits(1e10, 1e11), tell=lambda name: None)
    assert [(row.milliseconds, row.right, row.note) for row in rows] == [
        (None, False, "wrong result: no speed"),
        (None, False, "exit status -4"),
    ]


def test_a_worker_that_dies_is_reported() -> None:
    dead = worker.Worker("no such contestant", {})
    try:
        assert "died" in dead.ask({"build": SMALL.to_json(), "folder": None})
    finally:
        dead.close()


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--only", "no such workload"])
    assert stop.value.code == 2
    assert "decode 16 x 4096, fp32" in capsys.readouterr().err


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.bench import workloads

    monkeypatch.setattr(run, "SECONDS", 0.01)
    monkeypatch.setattr(limits, "cpu_limits", lambda: limits.Limits(1e10, 1e11))
    monkeypatch.setattr(workloads, "CPU_WORKLOADS", (SMALL,))
    assert main(["bench", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["contestant"] for row in report["rows"]] == ["quire", "gather + SDPA"]
    assert report["rows"][0]["ratio"] > 0
    assert main(["bench"]) == 0
    assert "small, fp32" in capsys.readouterr().out


def test_plain_text_without_rich() -> None:
    code = "import sys; sys.modules['rich'] = None\nfrom quire.cli.bench import _print\n"
    row = dict.fromkeys(("milliseconds", "spread", "gigabytes_per_second", "gigaflops", "of_limit", "ratio"), 1.5)
    row |= {"workload": "w", "contestant": "quire", "note": "", "error": 0.0, "budget": 1.0, "right": True}
    report = {"platform": {"name": "cpu"}, "limits": {"read_gigabytes_per_second": 1.0, "fp32_gigaflops": 2.0}, "rows": [row]}
    done = subprocess.run([sys.executable, "-c", f"{code}_print({report!r})"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:3] == ["workload", "who", "ms"]
