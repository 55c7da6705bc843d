"""An illegal access in a target ends the questions, not the report."""

from __future__ import annotations

import pytest

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.faults.injected import compute
from quire.conformance.runner.run import conform
from quire.conformance.runner.target import Target

CASES = [Case("first"), Case("second", window=(7, 0)), Case("third"), Case("fourth")]


def target(message: str, where: str) -> Target:
    """Right, until a window is asked for."""

    def run(call: KernelCall) -> None:
        compute(call)
        if call.window != (None, None) and where == "at once":
            raise RuntimeError(message)

    def limits(call: KernelCall) -> str | None:
        if call.window != (None, None) and where == "later":  # where somebody waits next
            raise RuntimeError(message)
        return None

    return Target("fragile", run, limits=limits)


@pytest.mark.parametrize("where", ["at once", "later"])
def test_the_rest_is_not_asked(where: str) -> None:
    report = conform(target("CUDA error: an illegal memory access was encountered", where), CASES)
    assert [result.status for result in report.results] == ["right", "raised", "unsupported", "unsupported"]
    assert "the device was lost in case second" in report.results[-1].reason
    assert report.exit_code == 1 and report.findings[0][0].fault == "raises"


def test_other_errors_of_a_kernel_go_on() -> None:
    report = conform(target("no such window", "at once"), CASES)
    assert [result.status for result in report.results] == ["right", "raised", "right", "right"]


def test_errors_of_the_kit_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="no such window"):
        conform(target("no such window", "later"), CASES)
