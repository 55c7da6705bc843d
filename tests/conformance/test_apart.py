"""A target in a process of its own: whatever it does to that process, the run goes on and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli import main
from quire.conformance.cases.build import build
from quire.conformance.cases.case import Case
from quire.conformance.runner.run import conform
from quire.conformance.runner.subprocess_target import apart
from quire.conformance.runner.target import Failure
from quire.errors import ArgumentError

ADAPTER = """
import ctypes, os, sys, torch
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
        while True: pass  # one line, so that it hangs there wherever it is looked at
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
    path = tmp_path_factory.mktemp("apart") / "kernel.py"
    path.write_text(ADAPTER)
    return str(path)


def case(window: int | None = None, name: str = "") -> Case:
    return Case(name or f"window-{window}", q_lens=(2,), kv_lens=(9,), window=(window, 0), kv_heads=1, lse=True)


EXPECTED = {
    1: ("crashes", "its process died with SIGSEGV (at kernel.py:14)"),
    3: ("crashes", "its process died with exit status 7"),
    5: ("crashes", "an illegal memory access"),  # a lost device ends with its process
    6: ("crashes", "it answers, but not each time: its process died with SIGABRT"),
    7: ("changes-inputs", ""),  # seals are looked at where the target ran
    8: ("raises", "ValueError: no such window (at kernel.py:29)"),
}


def test_whatever_happens_is_a_finding_and_the_run_goes_on(adapter: str) -> None:
    asked = [case(None, "plain"), *map(case, EXPECTED), case(None, "after")]
    with apart(f"{adapter}:attention") as target:
        results = conform(target, asked).results
    assert [results[n].status for n in (0, -1)] == ["right", "right"]
    for result, (fault, said) in zip(results[1:-1], EXPECTED.values()):
        (finding,) = result.findings
        assert finding.fault == fault and said in finding.summary and finding.reproduce == str(result.case)


def test_a_call_without_an_end_is_ended_and_not_asked_for_ever(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.conformance.runner.subprocess_target.PATIENCE", 1)
    with apart(f"{adapter}:attention", seconds=5) as target:
        with pytest.raises(Failure, match=r"no answer within 5 s") as caught:
            target.run(build(case(4)))
        assert caught.value.fault == "hangs" and caught.value.at == "kernel.py:20"
        assert "no answer" in (target.missing(build(case(None))) or "")


def test_bad_questions_are_answered_as_ever(adapter: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a function that .*: attention"), apart(f"{adapter}:nothing"):
        pass
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    with pytest.raises(ArgumentError, match="ModuleNotFoundError"), apart(f"{broken}:attention"):
        pass


def test_the_command_line_survives(adapter: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And what a target prints is no part of the report."""
    assert main(["conform", f"{adapter}:attention", "--case", str(case(2))]) == 1
    said = capfd.readouterr()
    assert "crashes: its process died with SIGABRT" in said.out and "a target may print" not in said.out
    assert main(["conform", f"{adapter}:attention", "--case", str(case(8)), "--in-process"]) == 1
    assert "a target may print" in capfd.readouterr().out
