"""After an illegal access in a target the remaining cases are skipped, and the report is complete."""

from __future__ import annotations

import pytest

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.faults.injected import compute
from quire.conformance.runner.run import conform
from quire.conformance.runner.target import Target

CASES = [Case("first"), Case("second", window=(7, 0)), Case("third"), Case("fourth")]


def target(message: str, where: str) -> Target:
    """A target that is correct, except that it raises for a window."""

    def run(call: KernelCall) -> None:
        compute(call)
        if call.window != (None, None) and where == "at once":
            raise RuntimeError(message)

    def limits(call: KernelCall) -> str | None:
        if call.window != (None, None) and where == "later":  # an asynchronous error, reported by a later call
            raise RuntimeError(message)
        return None

    return Target("fragile", run, limits=limits)


@pytest.mark.parametrize("where", ["at once", "later"])
def test_remaining_cases_are_skipped(where: str) -> None:
    report = conform(target("CUDA error: an illegal memory access was encountered", where), CASES)
    assert [result.status for result in report.results] == ["correct", "raised", "skipped", "skipped"]
    assert "the device was lost in case second" in report.results[-1].reason
    assert report.exit_code == 1 and report.findings[0][0].fault == "raises"


def test_the_run_continues_after_other_errors() -> None:
    report = conform(target("no such window", "at once"), CASES)
    assert [result.status for result in report.results] == ["correct", "raised", "correct", "correct"]


def test_errors_of_the_kit_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="no such window"):
        conform(target("no such window", "later"), CASES)
