"""The words of docs/vocabulary.md, nothing left for later, and no result that hangs on the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "quire"
FILES = sorted(SRC.rglob("*.py"))
PROSE = sorted({*FILES, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")})

# Where the peers' own words are quoted.
FOREIGN_FILES = ("dispatch/vllm.py", "compat/", "integrations/")
FOREIGN_FUNCTIONS = ("from_vllm", "from_flash_attn", "from_flashinfer")
# A child process inherits its parent's environment: the only reason to touch it.
MAY_READ_ENVIRONMENT = ("bench/", "prepare.py")


def inside(path: Path, places: tuple[str, ...]) -> bool:
    return path.relative_to(SRC).as_posix().startswith(places)


def given_names(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to its own things: not those it calls others by."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in FOREIGN_FUNCTIONS:
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        yield from given_names(node)


def blocks(source: str) -> list[str]:
    return [name for name in given_names(ast.parse(source)) if "block" in name.lower()]


def environment_reads(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    names = (node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", "") for node in nodes)
    return [name for name in names if name in ("environ", "environb", "getenv", "getenvb")]


def postponed(text: str) -> list[str]:
    return re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", text)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [p for p in FILES if not inside(p, FOREIGN_FILES)], ids=name)
def test_pages_are_memory_and_tiles_are_compute(path: Path) -> None:
    assert blocks(path.read_text()) == []


@pytest.mark.parametrize("path", PROSE, ids=name)
def test_nothing_is_postponed(path: Path) -> None:
    assert postponed(path.read_text()) == []


@pytest.mark.parametrize("path", [p for p in FILES if not inside(p, MAY_READ_ENVIRONMENT)], ids=name)
def test_no_result_hangs_on_the_environment(path: Path) -> None:
    assert environment_reads(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "block_size = 16",
        "def f(block_table): ...",
        "def f(*, BLOCK_M=1): ...",
        "class BlockPool: ...",
        "self.num_blocks = 1",
        "import pages as blocks",
        "for block in pages: ...",
        "class C:\n    block: int = 0",
    ],
)
def test_the_law_sees_a_block(source: str) -> None:
    assert blocks(source)


@pytest.mark.parametrize(
    "source",
    ["attend(block_table=page_table)", "tl.make_block_ptr(x)", "class Batch:\n    def from_vllm(cls, block_table): ..."],
)
def test_the_law_lets_others_speak(source: str) -> None:
    assert not blocks(source)


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['X']", "from os import environ", "import os\nos.getenv('X')", "from os import getenv as g"]
)
def test_the_law_sees_the_environment(source: str) -> None:
    assert environment_reads(source)


def test_the_law_sees_what_is_postponed() -> None:
    assert postponed("# TODO: later") and postponed("FIXME") and not postponed("method")
