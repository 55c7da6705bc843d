"""Cases divided over processes give the report of one process, even if processes crash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.conformance.cases.case import Case
from quire.conformance.diagnosis import attempt
from quire.conformance.reporting.report import INTERRUPTED, Result
from quire.conformance.runner.find_target import find
from quire.conformance.runner.jobs import _share, conform_in
from quire.conformance.runner.run import conform, survive
from quire.conformance.runner.subprocess_target import in_subprocess

ADAPTER = """
import os, time
from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.injected import compute, injected

def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window):
    call = KernelCall(q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window=window)
    if window[0] == 1:
        os.abort()
    if window[0] == 100:
        raise KeyboardInterrupt  # as Ctrl-C does
    if window[0] == 0:
        time.sleep(0.3)  # the first case is the last to be done
    (compute if window[0] is None else injected("window-ignored").run)(call)
"""
CASES = [Case(f"window-{n}", q_lens=(2, 1), kv_lens=(9, 5), kv_heads=1, window=(n, 0)) for n in (0, None, 2, 3, None, 4)]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("jobs") / "kernel.py"
    path.write_text(ADAPTER)
    return f"{path}:attention"


def gist(results: Any) -> list[tuple[str, str, list[str]]]:
    return [(result.case.name, result.status, [finding.fault for finding in result.findings]) for result in results]


def test_report_equals_that_of_one_process_and_a_crash_is_a_finding(adapter: str) -> None:
    told: list[Result] = []
    dies = CASES[0].replace(name="dies", window=(1, 0))
    known = {"window-2": "why"}
    report = conform_in(2, adapter, [*CASES, dies], "some", in_process=True, known=lambda name: known, each=told.append)
    alone = conform(find(adapter), CASES, "some", known=known)
    assert gist(report.results) == [*gist(alone.results), ("dies", "raised", ["crashes"])] == gist(told)
    assert [result.known for result in report.results] == ["", "", "why", "", "", "", ""]
    assert (report.target, report.level, report.device, report.versions) == (alone.target, "some", alone.device, alone.versions)


def test_cases_after_the_time_limit_are_skipped(adapter: str) -> None:
    late = {("skipped", "not run: the time limit --within 1e-09 s was reached")}
    alone = conform(find(adapter), CASES, within=1e-9).results
    assert {(result.status, result.reason) for result in alone[1:]} == late
    reported: list[Result] = []
    shared = _share([], CASES, {}, reported.append, start=0.0, within=1e-9)
    assert {(result.status, result.reason) for result in shared} == late and [result.case for result in reported] == CASES


def test_results_before_an_interrupt_are_reported(adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    interrupts = CASES[0].replace(name="interrupts", window=(100, 0))
    asked, rest = CASES[1:3], [("skipped", INTERRUPTED)] * 2
    alone = conform(find(adapter), [*asked, interrupts, CASES[3]]).results
    assert gist(alone)[:2] == [("window-None", "correct", []), ("window-2", "wrong", ["window-ignored"])]
    assert [(result.status, result.reason) for result in alone[2:]] == rest

    class InterruptedWorker:
        """A worker whose first request is interrupted by Ctrl-C."""

        case = None

        def request(self, *message: Any) -> None:
            raise KeyboardInterrupt

    shared = _share([InterruptedWorker()], CASES[:2], {}, lambda result: None, start=0.0, within=math.inf)  # type: ignore[list-item]
    assert [(result.status, result.reason) for result in shared] == rest
    assert main(["conform", adapter, "--in-process", "--json", "--case", str(interrupts)]) == 130
    said = json.loads(capsys.readouterr().out)
    assert said["interrupted"] and said["counts"]["skipped"] == 1


FULL = """
import torch
from quire.conformance.diagnosis import attempt

def no_memory(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has other users")

attempt.build = no_memory

def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window):
    raise AssertionError("it is not to be called")
"""


@pytest.mark.parametrize("where", ["this process", "subprocess"])
def test_out_of_memory_skips_the_case(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both if this process and if the target's subprocess has no memory for the tensors of a case."""
    monkeypatch.setattr(attempt, "build", attempt.build)  # undoes what the file does in this process
    file = tmp_path / "kernel.py"
    file.write_text(FULL)
    if where == "this process":
        result = survive(CASES[1], find(f"{file}:attention"))
    else:
        with in_subprocess(f"{file}:attention") as target:
            result = survive(CASES[1], target)
    assert (result.status, result.reason) == ("skipped", "not enough device memory: CUDA out of memory")


def test_the_command(adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Here each process has another one for the target."""
    assert (
        main(
            [
                "conform",
                adapter,
                "--jobs",
                "2",
                "--json",
                "--only",
                "^(mixed|window-1|one-of-each)$",
                "--level",
                "standard",
                "--within",
                "500",
            ]
        )
        == 1
    )
    said = json.loads(capsys.readouterr().out)
    found = [(result["name"], result["status"]) for result in said["results"]]
    assert found == [("mixed", "correct"), ("one-of-each", "correct"), ("window-1", "wrong")]


@pytest.mark.parametrize(
    "wrong", [["torch", "--jobs", "0"], ["none.py:f", "--jobs", "2", "--only", "mixed"]], ids=["no job", "no file"]
)
def test_bad_arguments(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["conform", *wrong])
    assert stop.value.code == 2


def test_jobs_report_the_same_contrast(tmp_path: Path) -> None:
    """Probes of the contrast run in a worker."""
    (tmp_path / "capped.py").write_text(
        "def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, softcap):\n"
        "    import quire\n"
        "    cache = quire.KVCache.wrap(k_pages, v_pages, layout='nhd')\n"
        "    batch = quire.Batch(page_table, kv_lens, q_starts)\n"
        "    quire.attend(q, cache, batch, quire.Options(scale=scale), out=out)\n"
    )
    cases = [Case("plain"), Case("capped", softcap=2.0), Case("longer", q_lens=(1,), kv_lens=(90,))]
    report = conform_in(2, f"{tmp_path}/capped.py:attention", cases, in_process=True)
    assert report.contrast.startswith("only with softcap (capped passes without it"), report.contrast
    assert report.findings[0][0].contrast == report.contrast
