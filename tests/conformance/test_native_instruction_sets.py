"""The native CPU kernel passes the standard suite on every instruction set of this CPU."""

from __future__ import annotations

import pytest

from quire.conformance.cases.suite import cases
from quire.conformance.runner.find_target import find
from quire.conformance.runner.run import conform
from quire.kernels.native import library
from support.kernels import levels


@pytest.mark.parametrize("level", levels())
def test_standard_suite_passes(level: str) -> None:
    with library.forced(level):
        report = conform(find("native", "cpu"), cases("standard"), "standard")
    wrong = {result.case.name: result.reason for result in report.results if result.status != "correct"}
    assert not wrong
    assert len(report.results) > 90
