"""docs/power.md is the matrix of this catalogue and these cases; three of its columns are worked out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.conformance.blind import BLIND
from quire.conformance.faults import CATALOGUE
from quire.conformance.matrix import render
from quire.conformance.power import power_of
from quire.conformance.suite import cases

PAGE = (Path(__file__).parents[2] / "docs" / "power.md").read_text()
CASES = cases("standard")
NAMES = [fault.name for fault in CATALOGUE]

ROUNDED = {"accumulated-in-16-bits"}
"""Faults that a rounding decides, and so the CPU."""


def parsed() -> list[dict[str, Any]]:
    """What each case exposes and lets pass, as the page has it."""
    rows = PAGE.split("```text\n")[1].split("```")[0].splitlines()[3:]
    width = max(map(len, NAMES))
    marks = {row[:width].strip(): [mark for n, mark in enumerate(row[width + 6 :].ljust(200)) if n % 11 != 10] for row in rows}
    assert list(marks) == NAMES
    lines = [row.split("`")[1] for row in PAGE.split("## The cases")[1].splitlines() if "`" in row and "--case" not in row]
    return [
        {
            "case": line,
            "exposed": [name for name in NAMES if marks[name][n] == "#"],
            "passed": [name for name in NAMES if marks[name][n] == "."],
        }
        for n, line in enumerate(lines)
    ]


def test_the_page_has_every_fault_and_every_case() -> None:
    found = parsed()
    assert [one["case"] for one in found] == list(map(str, CASES))
    assert render(found, NAMES) == PAGE


def test_what_the_page_lets_pass_is_stated_and_nothing_goes_unseen() -> None:
    found = parsed()
    for case, one in zip(CASES, found):
        assert set(one["passed"]) <= set(BLIND.get(case.name, ())), case.name
    assert {name for one in found for name in one["exposed"]} == set(NAMES)


@pytest.mark.parametrize("name", ["mixed", "one-of-each", "decode-everything"])
def test_a_column_worked_out_again(name: str) -> None:
    n = next(n for n, case in enumerate(CASES) if case.name == name)
    found, page = power_of(CASES[n]), parsed()[n]
    assert set(found.exposed) - ROUNDED == set(page["exposed"]) - ROUNDED
    assert set(found.passed) - ROUNDED == set(page["passed"]) - ROUNDED
