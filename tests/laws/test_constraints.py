"""constraints.txt, and its twin for torch 2.15, pin everything that an installation of Quire and its tools brings in."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILES = {path.name: path.read_text() for path in sorted(Path(__file__).parents[2].glob("constraints*.txt"))}
PINS = FILES["constraints.txt"]


def pinned(text: str) -> set[str]:
    return {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


def brought_in(package: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The packages that one package needs here, those that they need, and so on; but not what the package itself pins exactly, as
    torch does with its CUDA parts."""
    if (package, extras) in seen:
        return set()
    seen.add((package, extras))
    found = {package}
    for line in metadata.requires(package) or ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            name = canonicalize_name(need.name)
            found |= brought_in(name, frozenset(need.extras), seen) - {name}
            if not any(specifier.operator == "==" for specifier in need.specifier):
                found.add(name)
    return found


def test_everything_is_pinned() -> None:
    try:
        everything = brought_in("quire", frozenset({"test", "lint", "docs"}), set())
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"not installed here: {missing}")
    for text in FILES.values():
        assert everything - pinned(text) == {"quire"}


def pins_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_files_differ_in_torch_and_triton_alone() -> None:
    own = re.compile(r"(torch|triton)==")
    others = {name: [line for line in pins_of(text) if not own.match(line)] for name, text in FILES.items()}
    assert others["constraints-torch-2.15.txt"] == others["constraints.txt"]
    assert [line for line in pins_of(FILES["constraints-torch-2.15.txt"]) if own.match(line)] == ["torch==2.15.0", "triton==3.9.0"]


@pytest.mark.parametrize("name", FILES)
def test_pins_are_exact(name: str) -> None:
    lines = pins_of(FILES[name])
    assert [line for line in lines if not re.fullmatch(r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.\d+")?', line)] == []


def test_the_law_sees_a_missing_pin() -> None:
    assert "torch" not in pinned(re.sub(r"^torch==.*$", "", PINS, flags=re.MULTILINE))
    assert "pluggy" in brought_in("pytest", frozenset(), set())
