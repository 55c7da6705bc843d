"""constraints.txt pins everything that an installation of Quire and its tools brings in."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = (Path(__file__).parents[2] / "constraints.txt").read_text()


def pinned(text: str) -> set[str]:
    return {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


def brought_in(package: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The packages that one package needs here, those that they need, and so on."""
    if (package, extras) in seen:
        return set()
    seen.add((package, extras))
    found = {package}
    for line in metadata.requires(package) or ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found |= brought_in(canonicalize_name(need.name), frozenset(need.extras), seen)
    return found


def test_everything_is_pinned() -> None:
    try:
        everything = brought_in("quire", frozenset({"test", "lint"}), set())
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"not installed here: {missing}")
    assert everything - pinned(PINS) == {"quire"}


def test_pins_are_exact() -> None:
    lines = [line for line in PINS.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.\d+")?', line)] == []


def test_the_law_sees_a_missing_pin() -> None:
    assert "torch" not in pinned(re.sub(r"^torch==.*$", "", PINS, flags=re.MULTILINE))
    assert "pluggy" in brought_in("pytest", frozenset(), set())
