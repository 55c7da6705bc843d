"""The subpackages of `quire.conformance` import in one direction, inside functions, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "quire" / "conformance"
PREFIX = "quire.conformance."
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__")

# A module may import modules of its own line and of the lines above it. A module with a line of its own is not of its subpackage's.
LAYERS = (
    ("cases", "runner.threads"),
    ("oracle", "runner.target", "reporting.report"),
    ("faults", "targets"),
    ("diagnosis",),
    ("runner",),
    ("reporting", "recording"),
    ("plugin", "__main__"),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rank_of(module: str) -> int:
    """The line of a module, given by its name within the kit."""
    return next(RANK[name] for name in (module, module.partition(".")[0]) if name in RANK)


def imported(source: str) -> Iterator[str]:
    """The modules of the kit that a source imports, by their names within the kit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix(PREFIX) for alias in node.names if alias.name.startswith(PREFIX))
        elif isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(PREFIX):
            module = f"{node.module}.".removeprefix(PREFIX).rstrip(".")
            # `from quire.conformance.runner import run` imports a module, other imports take names from one.
            names = [".".join(filter(None, (module, alias.name))) for alias in node.names]
            yield from (name if is_module(name) else module for name in names)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def upward(module: str, source: str) -> list[str]:
    """The imports of a module that lie in a line below its own."""
    return [other for other in imported(source) if rank_of(other) > rank_of(module)]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    assert upward(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("faults.injected", "from quire.conformance.runner.run import examine"),
        ("diagnosis.diagnose", "def f():\n    from quire.conformance.runner import jobs"),
        ("diagnosis.diagnose", "import quire.conformance.reporting.html_report"),
        ("runner.target", "from quire.conformance import targets"),
        ("oracle.exact", "if TYPE_CHECKING:\n    from quire.conformance.faults import Fault"),
    ],
)
def test_an_upward_import_is_detected(module: str, source: str) -> None:
    assert upward(module, source)


def test_imports_of_lower_layers_are_allowed() -> None:
    source = "from quire.conformance.runner.target import Target\nfrom quire.conformance.reporting.report import Finding"
    assert upward("diagnosis.diagnose", source) == []
