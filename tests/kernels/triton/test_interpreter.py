"""The kernels in Triton's interpreter: every test of `on_device`, and every branch taken both ways.

The interpreter is switched on before Triton is imported or not at all: so these tests run in processes of their own. Each runs
some of the files, because starting it takes seconds.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

triton = pytest.importorskip("triton")
numpy = pytest.importorskip("numpy")

from support.branches import CANNOT, Branch, Counting, Taken, branches_of, outcomes  # noqa: E402
from support.once import once  # noqa: E402

ROOT = Path(__file__).parents[3]
FILES = sorted(Path(__file__).parent.glob("on_device/test_*.py"))
PARTS = {f"{part + 1} of 4": FILES[part::4] for part in range(4)}


def version(module: Any) -> tuple[int, ...]:
    return tuple(map(int, module.__version__.split(".")[:2]))


runs = pytest.mark.skipif(
    version(triton) < (3, 7) and version(numpy) >= (2, 4),
    reason=f"the interpreter of Triton {triton.__version__} does not work with NumPy {numpy.__version__}",
)


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`interpreted(part)` runs the tests of a part: how that ended, what it said, and which branches were taken."""

    def work(part: str) -> dict[str, Any]:
        return run(PARTS[part], tmp_path_factory.mktemp("interpreted") / "branches")

    return lambda part: once(tmp_path_factory, f"interpreted {part}", lambda: work(part))


def run(files: list[Path], branches: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "BRANCHES_TAKEN": str(branches), "PYTHONPATH": path}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, *map(str, files)], cwd=ROOT, env=environment, capture_output=True, text=True)
    # A process that died left no branches behind; its last line names the test.
    taken = json.loads(branches.read_text()) if branches.exists() else []
    return {"code": done.returncode, "said": done.stdout[-20000:] + done.stderr[-2000:], "taken": taken}


@runs
@pytest.mark.parametrize("part", PARTS)
def test_on_device_tests_pass(part: str, interpreted: Callable[[str], dict[str, Any]], record_property: Callable) -> None:
    found = interpreted(part)
    assert found["code"] == 0, found["said"]
    record_property(f"in the interpreter, {part}", found["said"].strip().splitlines()[-1].strip("= "))


@runs
def test_every_branch_is_taken_both_ways(interpreted: Callable[[str], dict[str, Any]], record_property: Callable) -> None:
    seen = {(tuple(place), outcome) for part in PARTS for place, outcome in interpreted(part)["taken"]}
    everything = outcomes(kernel_modules())
    missed = {named(branch, outcome) for branch, outcome in everything if (branch[:3], outcome) not in seen}
    record_property(
        "outcomes of the kernels' branches",
        f"{len(everything)}: {len(everything) - len(missed)} taken in the interpreter, {len(CANNOT)} cannot be",
    )
    assert missed - set(CANNOT) == set(), "add a test of `on_device` that goes there"
    assert set(CANNOT) - missed == set(), "taken after all, or gone: it need not be listed"


def kernel_modules() -> list[ModuleType]:
    """The modules with device code."""
    packages = [importlib.import_module(name) for name in ("quire.kernels.triton.device", "quire.kernels.gluon")]
    names = [f"{package.__name__}.{m.name}" for package in packages for m in pkgutil.iter_modules(package.__path__)]
    return [m for m in map(importlib.import_module, names) if branches_of(m)]


def named(branch: Branch, outcome: bool) -> str:
    return f"{branch} -> {'yes' if outcome else 'no'}"


def test_branches_are_found() -> None:
    found = [branch for module in kernel_modules() for branch in branches_of(module)]
    assert {
        "attend.attend_sequences: if LONG is not None",
        "attend.short_sequences: while at < end",
        "schedule.as_count: ... if C.WIDE",
    } <= set(map(str, found))
    assert not any(branch.module.endswith((".launcher", ".program", ".recipe")) for branch in found), (
        "this is host code, not device code"
    )


COUNTED = """
def f(x, many):
    y = 1 if x else 2
    if x == 1:
        y += 1
    elif x == 2:
        y += 2
    for i in range(many):
        y += i
    while y < 3:
        y += 1
    return y
"""


def test_outcomes_are_counted() -> None:
    taken = Taken()
    tree = ast.fix_missing_locations(Counting("m", 10).visit(ast.parse(COUNTED)))
    scope: dict[str, Any] = {Counting.NAME: taken.took}
    exec(compile(tree, "m", "exec"), scope)
    assert scope["f"](2, 0) == 3
    lines = {(place[1] - 10, outcome) for place, outcome in taken.seen}
    assert lines == {(3, True), (4, False), (6, True), (10, False)}
    assert scope["f"](0, 2) == 3
    assert {(place[1] - 10, outcome) for place, outcome in taken.seen} - lines == {(3, False), (6, False), (8, True)}
