"""The import law: data knows nothing of rules, rules nothing of kernels' choice, kernels nothing but data, and nothing fast
knows the reference."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = sorted(SRC.rglob("*.py"))

# Each may import what stands in its own line or above it.
LAYERS = (
    ("errors", "interrupts"),
    ("cache", "batch", "options", "rope", "platform", "keywords"),
    ("problem",),
    ("contract",),
    ("dispatch",),
    ("launch", "slot_batch"),
    ("attend", "write", "step", "ops", "merge", "explain", "prepare", "checked", ""),  # "" is the package itself: `import quire`
    ("conformance", "bench", "plan", "demo", "compat", "integrations", "distributed", "html"),
    ("cli", "__main__"),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
KERNELS_MAY_IMPORT = ("errors", "cache", "batch", "options", "platform", "problem")
MAY_IMPORT_KERNELS = (
    "dispatch",
    "prepare",
    "attend",
    "write",
    "step",
    "conformance",
    "bench",
    "compat",
    "integrations",
    "distributed",
    "cli",
)
THE_LIBRARY = ("quire.kernels.native.call", "quire.kernels.native.library")  # answers for the rules, too, whether values are legal
MAY_IMPORT_REFERENCE = ("conformance", "bench", "plan", "demo", "cli")
# What a function may load from a layer above, when a user asks for it: `import quire` stays light.
LOADED_ON_REQUEST = {"": ("conformance", "reference"), "checked": ("conformance",)}
# Who may import a module whose name is not in its source: the name comes from a table, or from the user.
NAMES_FROM_DATA = {
    "quire": "the table of public names",
    "quire.dispatch.kernel": "the catalogue names the kernels' modules",
    "quire.kernels.triton.compiler.report": "every module of its own folder",
    "quire.conformance.runner.find_target": "the user names the module under test",
    "quire.conformance.targets.vllm": "a table of other packages' modules, and quire.compat.vllm",
    "quire.conformance.targets.peer": "other packages",
}
NEVER_IN_THE_KIT = ("write", "step")  # the kit fills caches by its own formula


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Import(NamedTuple):
    """One import of a file."""

    target: str
    """The module; empty if the source does not name it."""
    in_function: bool


def imported(tree: ast.AST, in_function: bool = False) -> Iterator[Import]:
    """The modules that a file imports, wherever in the file, by statement or by call, except for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imported(ast.Module([branch], []), in_function)
            continue
        yield from (Import(target, in_function) for target in named(node))
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imported(node, inside)


def named(node: ast.AST) -> Iterator[str]:
    """The modules that one node imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            yield "." * node.level + (node.module or "")
        elif node.module == "quire":
            yield from (f"quire.{alias.name}" for alias in node.names)
        else:
            yield node.module or ""
            # Under another name its calls would not be seen.
            yield from ("" for alias in node.names if alias.name in IMPORTERS and alias.asname not in (None, alias.name))
    elif isinstance(node, ast.Attribute) and node.attr == "reference" and ast.unparse(node) == "quire.reference":
        yield "quire.reference"
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
        yield literal(node.args[0]) if node.args else ""


IMPORTERS = ("import_module", "__import__")


def literal(node: ast.AST) -> str:
    """The text of a string, or what an f-string begins with up to its last dot; empty for anything else."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return literal(node.values[0]).rpartition(".")[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def part_of(module: str) -> str:
    """The part of quire that a module belongs to: its second word. A public name belongs to the package itself."""
    part = [*module.split("."), ""][1]
    return part if part in RANK or part in ("kernels", "reference") else ""


def folder_of(kernel: str) -> str:
    """A folder of kernels. Gluon is Triton one level below: theirs are one."""
    return kernel.split(".")[2].replace("gluon", "triton")


def breaches(module: str, source: str) -> list[str]:
    """What a file of this name and content does against the law."""
    part, found = part_of(module), []
    for target, in_function in imported(ast.parse(source)):
        if not target:
            if module not in NAMES_FROM_DATA:
                found.append(f"{module} imports a module that the source does not name")
            continue
        if target.startswith("."):
            found.append(f"{module} imports {target}: write the full name")
        if target.split(".")[0] != "quire":
            if part == "reference" and target.split(".")[0] not in ("torch", "__future__"):
                found.append(f"{module} imports {target}: the reference imports only torch")
            continue
        other = part_of(target)
        if in_function and other in LOADED_ON_REQUEST.get(part, ()):
            allowed = True
        elif part == "reference":
            allowed = False
        elif other == "reference":
            allowed = part in MAY_IMPORT_REFERENCE
        elif other == "kernels":
            own_folder = part == "kernels" and folder_of(module) == folder_of(target)
            allowed = own_folder if part == "kernels" else part in MAY_IMPORT_KERNELS
            allowed = allowed or (part == "contract" and target in THE_LIBRARY)
        elif part == "kernels":
            allowed = other in KERNELS_MAY_IMPORT
        elif part == "conformance" and other in NEVER_IN_THE_KIT:
            allowed = False
        else:
            allowed = RANK[other] <= RANK[part]
        if not allowed:
            found.append(f"{module} imports {target}")
    return found


def test_files_keep_the_law() -> None:
    assert [breach for path in FILES for breach in breaches(module_name(path), path.read_text())] == []


def test_every_folder_is_a_package() -> None:
    assert [str(path.parent) for path in FILES if not (path.parent / "__init__.py").exists()] == []


def test_every_part_has_a_place() -> None:
    parts = {module_name(path).partition(".")[2].partition(".")[0] for path in FILES}
    assert parts <= {*RANK, "kernels", "reference"}


AGAINST = {
    "data imports rules": ("quire.batch", "from quire.contract.rule import Rule"),
    "rules import dispatch": ("quire.contract.rules", "import quire.dispatch.choose"),
    "inside a function": ("quire.problem", "def f():\n    from quire.attend import attend"),
    "dispatch imports an operation": ("quire.dispatch.choose", "from quire.attend import attend"),
    "an operation imports the package": ("quire.dispatch.choose", "import quire"),
    "the launch path imports an operation": ("quire.launch", "from quire.attend import attend"),
    "dispatch imports the launch path": ("quire.dispatch.choose", "from quire.launch import launcher_for"),
    "by a public name": ("quire.contract.check", "from quire import attend"),
    "a kernel imports dispatch": ("quire.kernels.torch.attend", "from quire.dispatch.choose import choose"),
    "a kernel imports another folder": ("quire.kernels.triton.decode", "from quire.kernels.torch.read import read"),
    "rules import a kernel": ("quire.contract.check", "from quire.kernels.torch.attend import attend"),
    "rules import a native kernel": ("quire.contract.validated", "from quire.kernels.native.attend import launch"),
    "a kernel imports the reference": ("quire.kernels.torch.attend", "from quire.reference import attention"),
    "an operation imports the reference": ("quire.attend", "from quire import reference"),
    "an operation uses the reference": ("quire.attend", "import quire\nquire.reference.attention()"),
    "the reference imports quire": ("quire.reference", "from quire.errors import QuireError"),
    "the reference imports more than torch": ("quire.reference", "import numpy"),
    "the kit writes by quire.write": ("quire.conformance.cases.build", "from quire.write import write"),
    "dispatch imports the operators of graphs": ("quire.dispatch.choose", "from quire import ops"),
    "an operation imports the kit": ("quire.step", "from quire.conformance.runner.run import run"),
    "the kit imports the command line": ("quire.conformance.runner.run", "from quire.cli.demo import demo"),
    "by import_module": (
        "quire.contract.check",
        "from importlib import import_module\nimport_module('quire.conformance.x')",
    ),
    "by importlib": (
        "quire.attend",
        "import importlib\ndef f():\n    importlib.import_module('quire.conformance.x').Judge()",
    ),
    "by an f-string": ("quire.attend", "import importlib\nimportlib.import_module(f'quire.cli.{verb}')"),
    "by __import__": ("quire.batch", "__import__('quire.contract.rule')"),
    "by a name that the source does not say": ("quire.batch", "import importlib\nimportlib.import_module('quire' + '.cli')"),
    "by import_module under another name": ("quire.batch", "from importlib import import_module as load\nload('quire.cli')"),
    "the package loads the kit at once": ("quire", "from quire.conformance.recording.record import record"),
    "checked loads the kit at once": ("quire.checked", "from quire.conformance.recording.result_checks import Judge"),
    "checked loads the command line": ("quire.checked", "def f():\n    from quire.cli.demo import demo"),
    "a relative import": ("quire.cache.pool", "from . import ledger"),
    "after TYPE_CHECKING": ("quire.errors", "if TYPE_CHECKING:\n    pass\nelse:\n    import quire.batch"),
}
WITHIN = {
    "an operation imports dispatch": ("quire.attend", "from quire.dispatch.choose import choose"),
    "an operation imports another": ("quire.step", "from quire.write import write"),
    "an operation becomes one of a graph": ("quire.attend", "def f():\n    from quire import ops"),
    "a kernel imports its own folder": ("quire.kernels.triton.decode", "from quire.kernels.triton.tile import load"),
    "rules ask the library": ("quire.contract.validated", "from quire.kernels.native.library import library"),
    "a kernel imports the machine": ("quire.kernels.triton.decode", "from quire.platform import Platform"),
    "an operation imports the launch path": ("quire.attend", "from quire.launch import launcher_for"),
    "a kernel imports data": ("quire.kernels.triton.decode", "from quire.cache.kv_cache import KVCache"),
    "the kit imports the reference": ("quire.conformance.runner.run", "from quire import reference"),
    "for type checkers alone": ("quire.errors", "if TYPE_CHECKING:\n    from quire.dispatch.decision import Decision"),
    "the package loads the kit on request": ("quire", "def f():\n    from quire.conformance.recording.record import record"),
    "checked loads the kit on request": (
        "quire.checked",
        "def f():\n    from quire.conformance.x import Judge",
    ),
    "the command line loads a verb": ("quire.cli", "from importlib import import_module\nimport_module(f'quire.cli.{verb}')"),
    "the command line imports anything": ("quire.cli.demo", "import quire\nfrom quire.bench.run import run"),
}


@pytest.mark.parametrize("module, source", AGAINST.values(), ids=AGAINST)
def test_the_law_sees(module: str, source: str) -> None:
    assert breaches(module, source)


@pytest.mark.parametrize("module, source", WITHIN.values(), ids=WITHIN)
def test_the_law_allows(module: str, source: str) -> None:
    assert not breaches(module, source)
