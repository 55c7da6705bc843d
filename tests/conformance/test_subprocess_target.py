"""A target in a subprocess: if it crashes, hangs or raises, that is a finding and the run continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli import main
from quire.conformance.cases.build import build
from quire.conformance.cases.case import Case
from quire.conformance.runner.run import conform
from quire.conformance.runner.subprocess_target import in_subprocess
from quire.conformance.runner.target import Failure
from quire.errors import ArgumentError

ADAPTER = """
import ctypes, os, sys, time, torch
from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.injected import compute

count = 0

def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window, softcap, lse):
    global count
    count += 1
    print("a target may print")
    call = KernelCall(q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window=window, softcap=softcap, lse=lse)
    if window[0] == 1:
        ctypes.string_at(0)
    if window[0] == 2:
        os.abort()
    if window[0] == 3:
        sys.exit(7)
    if window[0] == 4:
        while True: time.sleep(1)  # one line, so that the traceback always shows it
    if window[0] == 5:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if window[0] == 6 and count > 1:
        os.abort()
    compute(call)
    if window[0] == 7:
        q[:1] *= 2
    if window[0] == 8:
        raise ValueError("no such window")
"""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("target") / "kernel.py"
    path.write_text(ADAPTER)
    return str(path)


def case(window: int | None = None, name: str = "") -> Case:
    return Case(name or f"window-{window}", q_lens=(2,), kv_lens=(9,), window=(window, 0), kv_heads=1, lse=True)


EXPECTED = {
    1: ("crashes", "its process died with SIGSEGV (at kernel.py:14)"),
    3: ("crashes", "its process died with exit status 7"),
    5: ("crashes", "an illegal memory access"),  # a lost device ends with its process
    6: ("crashes", "it fails only in some calls: its process died with SIGABRT"),
    7: ("changes-inputs", ""),  # checksums are compared where the target ran
    8: ("raises", "ValueError: no such window (at kernel.py:29)"),
}


def test_a_crash_is_a_finding_and_the_run_continues(adapter: str) -> None:
    cases = [case(None, "plain"), *map(case, EXPECTED), case(None, "after")]
    with in_subprocess(f"{adapter}:attention") as target:
        results = conform(target, cases).results
    assert [results[n].status for n in (0, -1)] == ["correct", "correct"]
    for result, (fault, text) in zip(results[1:-1], EXPECTED.values()):
        (finding,) = result.findings
        assert finding.fault == fault and text in finding.summary and finding.reproduce == str(result.case)


def test_a_call_that_hangs_is_killed_and_later_cases_are_skipped(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.conformance.runner.subprocess_target.MOST_TIMEOUTS", 1)
    with in_subprocess(f"{adapter}:attention", seconds=5) as target:
        with pytest.raises(Failure, match=r"no result within 5 s") as caught:
            target.run(build(case(4)))
        assert caught.value.fault == "hangs" and caught.value.at == "kernel.py:20"
        assert "timed out 1 times" in (target.missing(build(case(None))) or "")


def test_errors_of_arguments_are_those_of_find(adapter: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a function that .*: attention"), in_subprocess(f"{adapter}:nothing"):
        pass
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    with pytest.raises(ArgumentError, match="ModuleNotFoundError"), in_subprocess(f"{broken}:attention"):
        pass


def test_command_reports_a_crash(adapter: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And what a target prints is no part of the report."""
    assert main(["conform", f"{adapter}:attention", "--case", str(case(2))]) == 1
    said = capfd.readouterr()
    assert "crashes: its process died with SIGABRT" in said.out and "a target may print" not in said.out
    assert main(["conform", f"{adapter}:attention", "--case", str(case(8)), "--in-process"]) == 1
    assert "a target may print" in capfd.readouterr().out
