"""What the charts and tables of the bench reports share: colors, a logarithmic axis, a table with groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

ResultRow = Mapping[str, Any]
"""One measurement of a report, as its JSON has it."""


class LogAxis:
    """A logarithmic axis: whole decades of numbers, pixels from start to end."""

    def __init__(self, values: Iterable[float], start: float, end: float):
        known = list(values)
        # A value that exceeds a decade by less than 1 % does not add another one.
        self.low, self.high = math.floor(math.log10(min(known) * 1.01)), math.ceil(math.log10(max(known) / 1.01))
        self.high = max(self.high, self.low + 1)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """A color for each implementation, Quire's first."""
    ordered = sorted(dict.fromkeys(names), key=lambda name: (not name.startswith("quire"), name))
    return {name: f"var(--c{min(i, 6)})" for i, name in enumerate(ordered)}


def grouped_table(
    head: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[ResultRow], colors: Mapping[str, str]
) -> dict[str, Any]:
    """The lines of a table, grouped by their first cell. The second cell names the implementation."""
    groups = []
    for name, members in groupby(zip(lines, rows), key=lambda pair: pair[0][0]):
        entries = [
            {"name": line[1], "cells": line[2:], "color": colors.get(row["implementation"], "var(--c6)"), "marks": _marks(row)}
            for line, row in members
        ]
        groups.append({"name": name, "lines": entries})
    return {"head": (head[0], *head[2:]), "groups": groups}


def software_of(report: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.get("software", {}).items())


def _marks(row: ResultRow) -> str:
    marks = {"own": row["implementation"].startswith("quire"), "wrong": not row.get("right", True)}
    return " ".join(mark for mark, on in marks.items() if on)
