"""The adapter of examples/05 is correct in every case that it supports; it returns no LSE."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.conformance.cases.case import Case
from quire.conformance.runner.find_target import find
from quire.conformance.runner.run import examine

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_is_my_kernel_right.py"


@pytest.mark.parametrize(
    "function, case, status, fault",
    [
        ("attention", Case("lse", lse=True), "correct", None),
        ("attention", Case("window", window=(7, 0), tail="-1"), "correct", None),
        ("attention", Case("softcap", softcap=3.0), "skipped", None),
        ("one_key_short", Case("window", window=(7, 0)), "wrong", "window-left-off"),
        ("rows_swapped", Case("lse", lse=True), "wrong", "rows-swapped"),
    ],
)
def test_verdicts_of_the_example(function: str, case: Case, status: str, fault: str | None) -> None:
    result = examine(case, find(f"{EXAMPLE}:{function}"))
    assert result.status == status, result.reason
    assert (result.findings[0].fault if result.findings else None) == fault
