"""Every example runs as it stands, says something, and complains about nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert [path.name[:3] for path in EXAMPLES][:4] == ["01_", "02_", "03_", "04_"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, python: Callable) -> None:
    done = python(str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout
