"""The public surface: these names, and whatever is imported first they mean the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest

import quire

NAMES = [
    "PagePool",
    "KVCache",
    "Batch",
    "Options",
    "Rope",
    "Prefixes",
    "Select",
    "attend",
    "write",
    "step",
    "merge",
    "explain",
    "prepare",
    "check",
    "checked",
    "record",
    "Decision",
    "Violation",
    "Problem",
    "Extent",
    "Prepared",
    "Platform",
    "QuireError",
    "ArgumentError",
    "ContractError",
    "KernelError",
    "OutOfPages",
    "StaleBatch",
    "reference",
    "__version__",
]
SHADOWED = ["attend", "write", "step", "merge", "explain", "prepare", "checked"]  # a function and the module that defines it


def test_all_is_pinned() -> None:
    assert list(quire.__all__) == NAMES


def test_every_name_that_is_found_is_listed() -> None:
    """What `quire.NAME` finds, at run time and for a type checker, is in `__all__`, and with it in completion."""
    lazy = {*quire._HOMES, "reference", "__version__"}
    assert lazy == set(NAMES)
    (typed,) = (node for node in ast.parse(Path(quire.__file__).read_text()).body if isinstance(node, ast.If))
    imported = {name.asname or name.name for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported == set(NAMES) - {"__version__"}


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there(name: str) -> None:
    assert getattr(quire, name) is not None


def test_completion_shows_the_surface() -> None:
    assert dir(quire) == sorted(NAMES)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"module 'quire' has no attribute 'atend'"):
        _ = quire.atend


@pytest.mark.parametrize("name", SHADOWED)
def test_operation_is_a_function(name: str) -> None:
    assert isinstance(getattr(quire, name), FunctionType)


EACH_FIRST = """
import importlib, multiprocessing, torch

def first(name):
    module = importlib.import_module(f"quire.{name}")
    import quire
    assert getattr(quire, name) is getattr(module, name) is not module

if __name__ == "__main__":
    # Each in a process of its own; torch, which takes most of the time, is imported once.
    for name in %r:
        process = multiprocessing.get_context("fork").Process(target=first, args=(name,))
        process.start()
        process.join()
        if process.exitcode:
            print(name)
"""


def test_operation_is_a_function_when_its_module_comes_first(python: Callable) -> None:
    done = python("-c", EACH_FIRST % (SHADOWED,))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_reference_is_the_module(python: Callable) -> None:
    done = python("-c", "import quire\nprint(quire.reference.__name__)")
    assert done.stdout == "quire.reference\n", done.stderr


def test_changelog_knows_the_version(root: Path) -> None:
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == quire.__version__
