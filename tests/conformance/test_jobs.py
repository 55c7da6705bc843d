"""Cases shared among processes give the report of one process, whatever becomes of those processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.conformance.cases.case import Case
from quire.conformance.reporting.report import INTERRUPTED, Result
from quire.conformance.runner import run
from quire.conformance.runner.jobs import _share, conform_in
from quire.conformance.runner.run import conform, survive
from quire.conformance.runner.subprocess_target import apart
from quire.conformance.runner.target import find

ADAPTER = """
import os, time
from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.injected import compute, injected

def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window):
    call = KernelCall(q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window=window)
    if window[0] == 1:
        os.abort()
    if window[0] == 100:
        raise KeyboardInterrupt  # as if somebody had pressed Ctrl-C then
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


def test_the_report_is_that_of_one_process_and_a_death_is_a_finding(adapter: str) -> None:
    told: list[Result] = []
    dies = CASES[0].replace(name="dies", window=(1, 0))
    known = {"window-2": "why"}
    report = conform_in(2, adapter, [*CASES, dies], "some", in_process=True, known=lambda name: known, each=told.append)
    alone = conform(find(adapter), CASES, "some", known=known)
    assert gist(report.results) == [*gist(alone.results), ("dies", "raised", ["crashes"])] == gist(told)
    assert [result.known for result in report.results] == ["", "", "why", "", "", "", ""]
    assert (report.target, report.level, report.device, report.versions) == (alone.target, "some", alone.device, alone.versions)


def test_what_is_too_late_is_not_asked(adapter: str) -> None:
    late = {("unsupported", "the 1e-09 s were over")}
    alone = conform(find(adapter), CASES, within=1e-9).results
    assert {(result.status, result.reason) for result in alone[1:]} == late
    told: list[Result] = []
    shared = _share([], CASES, {}, told.append, start=0.0, within=1e-9)
    assert {(result.status, result.reason) for result in shared} == late and [result.case for result in told] == CASES


def test_an_interrupt_loses_nothing(adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    interrupts = CASES[0].replace(name="interrupts", window=(100, 0))
    asked, rest = CASES[1:3], [("unsupported", INTERRUPTED)] * 2
    alone = conform(find(adapter), [*asked, interrupts, CASES[3]]).results
    assert gist(alone)[:2] == [("window-None", "right", []), ("window-2", "wrong", ["window-ignored"])]
    assert [(result.status, result.reason) for result in alone[2:]] == rest

    class Impatient:
        """Somebody presses Ctrl-C when it is asked."""

        case = None

        def ask(self, *question: Any) -> None:
            raise KeyboardInterrupt

    shared = _share([Impatient()], CASES[:2], {}, lambda result: None, start=0.0, within=math.inf)  # type: ignore[list-item]
    assert [(result.status, result.reason) for result in shared] == rest
    assert main(["conform", adapter, "--in-process", "--json", "--case", str(interrupts)]) == 130
    said = json.loads(capsys.readouterr().out)
    assert said["interrupted"] and said["counts"]["unsupported"] == 1


FULL = """
import torch
from quire.conformance.runner import subprocess_target as apart
from quire.conformance.runner import run

def no_room(*question):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has other users")

IN.build = no_room

def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window):
    raise AssertionError("it is not to be called")
"""


@pytest.mark.parametrize("where", ["run", "apart"])
def test_a_full_card_is_no_fault_of_the_target(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if this process, nor if the target's own has no memory for the tensors of a case."""
    monkeypatch.setattr(run, "build", run.build)  # undoes what the file does in this process
    file = tmp_path / "kernel.py"
    file.write_text(FULL.replace("IN", where))
    if where == "run":
        result = survive(CASES[1], find(f"{file}:attention"))
    else:
        with apart(f"{file}:attention") as target:
            result = survive(CASES[1], target)
    assert (result.status, result.reason) == ("unsupported", "no room for it on the device: CUDA out of memory")


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
    assert found == [("mixed", "right"), ("one-of-each", "right"), ("window-1", "wrong")]


@pytest.mark.parametrize(
    "wrong", [["torch", "--jobs", "0"], ["none.py:f", "--jobs", "2", "--only", "mixed"]], ids=["no job", "no file"]
)
def test_bad_questions(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["conform", *wrong])
    assert stop.value.code == 2
