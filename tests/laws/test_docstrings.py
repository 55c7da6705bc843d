"""Examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
WITH_EXAMPLES = [path for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text()]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=module_name)
def test_docstring_examples(path: Path) -> None:
    result = doctest.testmod(importlib.import_module(module_name(path)), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert result.failed == 0
