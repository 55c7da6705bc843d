"""Every public name is documented: what it is, its arguments, the errors it raises, and an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire

SRC = Path(__file__).parents[2] / "src"
WITH_EXAMPLES = [path for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text()]
NAMES = [name for name in quire.__all__ if name != "__version__"]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(quire, name))]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(quire, name))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=module_name)
def test_docstring_examples(path: Path) -> None:
    result = doctest.testmod(importlib.import_module(module_name(path)), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert result.failed == 0


def missing(function: Any) -> Iterator[str]:
    """The parts that the docstring of a function with parameters lacks."""
    text = inspect.getdoc(function) or ""
    # `**unknown` only makes the error for a misspelled argument.
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls", "unknown")]
    documented = re.findall(r"^ *([\w, ]+): ", text, re.MULTILINE)
    yield from (name for name in parameters if name not in re.split(r", ", ", ".join(documented)))
    yield from (part for part in ("Args:", "Raises:", "Example:") if parameters and part not in text)


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_an_example(name: str) -> None:
    documented = getattr(quire, name)
    examples = doctest.DocTestFinder(recurse=inspect.ismodule(documented)).find(documented, name)
    assert any(example.examples for example in examples)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_documents_arguments_and_errors(name: str) -> None:
    assert list(missing(getattr(quire, name))) == []


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_have_docstrings(name: str) -> None:
    members = inspect.getmembers(getattr(quire, name), lambda m: inspect.isroutine(m) or isinstance(m, property))
    own = [(each, member) for each, member in members if each in vars(getattr(quire, name)) and not each.startswith("_")]
    assert [each for each, member in own if not inspect.getdoc(member)] == []


def undocumented(q: int, k: int) -> None:
    """Attends.

    Args:
        q: Queries.

    Example:
        >>> 1
    """


def test_the_law_sees_what_is_missing() -> None:
    assert list(missing(undocumented)) == ["k", "Raises:"]
