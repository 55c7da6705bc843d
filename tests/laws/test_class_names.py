"""Every class of the package has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "quire"


def repeated(sources: dict[str, str]) -> dict[str, list[str]]:
    """The class names that occur more than once, with the files that define them."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_class_names_are_unique() -> None:
    assert repeated({path.relative_to(SRC).as_posix(): path.read_text() for path in sorted(SRC.rglob("*.py"))}) == {}


def test_the_law_sees_a_second_class() -> None:
    assert repeated({"a.py": "class Call: ...", "b.py": "def f():\n    class Call: ..."}) == {"Call": ["a.py", "b.py"]}
    assert repeated({"a.py": "class Call: ...", "b.py": "class Report: ..."}) == {}
