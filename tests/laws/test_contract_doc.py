"""docs/contract.md is printed from the rules: `make docs` writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.contract import document


def test_the_page_is_what_the_rules_print(root: Path) -> None:
    assert (root / "docs" / "contract.md").read_text() == document.render()


def test_the_command_prints_the_page(python: Callable) -> None:
    done = python("-m", "quire.contract")
    assert done.returncode == 0, done.stderr
    assert done.stdout == document.render()
    assert done.stderr == ""
