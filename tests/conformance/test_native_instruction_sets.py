"""The native CPU kernel passes the standard suite: all of it with the instruction set that is chosen, a part with the others."""

from __future__ import annotations

import pytest

from quire.conformance.cases.suite import cases
from quire.conformance.runner.find_target import find
from quire.conformance.runner.run import conform
from quire.kernels.native import library
from support.kernels import levels


@pytest.mark.parametrize("place, level", list(enumerate(reversed(levels()))))
def test_standard_suite_passes(place: int, level: str) -> None:
    some = cases("standard") if place == 0 else cases("standard")[place % 3 :: 3]
    with library.forced(level):
        report = conform(find("native", "cpu"), some, "standard")
    wrong = {result.case.name: result.reason for result in report.results if result.status != "correct"}
    assert not wrong
    assert len(report.results) > (90 if place == 0 else 30)
