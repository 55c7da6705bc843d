"""The cases of each level. A case is one line of a text file in this directory; a level includes the levels before it.

    smoke      smoke.txt                      handwritten, one edge case each: seconds
    standard   standard.txt and pairs.txt     more handwritten cases, and all pairs of parameter values: up to a minute
    full       full.txt and triples.txt       large sizes, and all triples of parameter values: minutes

Those of writes are in write_smoke.txt, and so on.

`quire.conformance.cases.parameters` generates pairs.txt and triples.txt.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from quire.conformance.cases.case import Case
from quire.errors import ArgumentError

LEVELS = {"smoke": ("smoke",), "standard": ("standard", "pairs"), "full": ("full", "triples")}
"""The files that each level adds."""


PREFIX = {"attend": "", "write": "write_"}
"""How the names of the files of each operation begin."""


def cases(level: str, operation: str = "attend") -> list[Case]:
    """The cases of a level, of one operation."""
    if level not in LEVELS:
        raise ArgumentError("level", level, ", ".join(LEVELS))
    levels = [*LEVELS]
    files = [f"{PREFIX[operation]}{name}" for each in levels[: levels.index(level) + 1] for name in LEVELS[each]]
    return [case for name in files for case in cases_of(name)]


def all_cases() -> list[Case]:
    """Every case, of both operations."""
    return [*cases("full"), *cases("full", "write")]


def case_named(name: str) -> Case | None:
    """The case with this name, of any level, or None."""
    return next((case for case in all_cases() if case.name == name), None)


@lru_cache
def cases_of(name: str) -> tuple[Case, ...]:
    """The cases of one file of this directory, such as `smoke`."""
    return tuple(map(Case.parse, lines_of(Path(__file__).with_name(f"{name}.txt"))))


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file of cases, without comments and empty lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return (line for line in lines if line and not line.startswith("#"))
