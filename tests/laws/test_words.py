"""The terms of docs/vocabulary.md, no retired terms, nothing postponed, and no result that depends on the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "quire"
FILES = sorted(SRC.rglob("*.py"))
SOURCES = {path for suffix in ("h", "cpp", "j2") for path in SRC.rglob(f"*.{suffix}")}
EXAMPLES = {*ROOT.glob("examples/**/*.py"), *ROOT.glob("tools/**/*.py")}
PROSE = sorted({*FILES, *SOURCES, *EXAMPLES, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")})

# Files that use the names of other projects.
FOREIGN_FILES = ("compat/", "integrations/")
FOREIGN_FUNCTIONS = ("from_vllm", "from_flash_attn", "from_flashinfer")
# Terms that Quire does not use, each with the one to use instead. In prose of the package, the examples and the documents:
RETIRED_IN_PROSE = {
    "whoever": "the component by its name",
    "the seeds": "the ROCm story, or vLLM's test",
    "borne out": "confirmed",
    "not asked": "not run, with the reason",
    "decode row": "decode sequence",
    "prefill row": "prefill sequence",
    "idle row": "empty sequence",
    "handed out": "allocated",
    "nobody": "no sequence, no kernel, no caller: the component by its name",
    "somebody": "the component by its name",
    "anybody": "any kernel, any user",
    "foretold": "predicted",
    "honest": "correct, or straightforward",
    "who sees whom": "the visibility mask",
    "what one sees": "the effect",
    "all the same": "still, anyway",
    "anew": "again",
}
# In the names of the package:
RETIRED_IN_NAMES = {
    "meet": "attend",
    "moody": "determinism",
    "settle": "finish",
    "telling": "report",
    "workshop": "tile",
    "whoever": "the component",
    "sight": "visibility",
    "mains": "main programs",
    "apart": "subprocess, separate",
    "room": "capacity, workspace",
    "alike": "equivalent",
    "nobody": "none",
    "honest": "correct",
}
# A child process inherits its parent's environment; and the command line asks it about shell completion and colors, and shows the
# settings of engines, of which the vLLM plugin has its own. The package `kernels` finds a kernel's folder by a variable.
MAY_READ_ENVIRONMENT = (
    "bench/",
    "prepare.py",
    "cli/__init__.py",
    "cli/engines.py",
    "cli/sheet.py",
    "integrations/vllm/",
    "integrations/transformers/hub.py",
    "integrations/transformers/registration.py",
)


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


def parts_of(name: str) -> set[str]:
    """The words of a name: of `meet_all` and of `HopperTile`."""
    return {part.lower() for part in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)}


def retired_names(source: str) -> list[str]:
    return [name for name in given_names(ast.parse(source)) if parts_of(name) & set(RETIRED_IN_NAMES)]


def retired_phrases(text: str) -> list[str]:
    """The retired terms of a text, also across line breaks. What is quoted in `code` is not prose."""
    prose = re.sub(r"\s+#?\s*", " ", re.sub(r"`[^`\n]*`", "", text)).lower()
    return [term for term in RETIRED_IN_PROSE if re.search(rf"\b{term}s?\b", prose)]


def environment_reads(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    names = (node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", "") for node in nodes)
    return [name for name in names if name in ("environ", "environb", "getenv", "getenvb")]


def postponed(text: str) -> list[str]:
    return re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", text)


def found_in(paths: Iterable[Path], law: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """What a law finds, by file."""
    return {path.relative_to(ROOT).as_posix(): found for path in paths if (found := law(path.read_text()))}


def test_pages_are_memory_and_tiles_are_compute() -> None:
    assert found_in((path for path in FILES if not inside(path, FOREIGN_FILES)), blocks) == {}


def test_prose_uses_the_fields_terms() -> None:
    assert found_in(PROSE, retired_phrases) == {}


def test_names_use_the_fields_terms() -> None:
    assert found_in(FILES, retired_names) == {}
    assert [path for path in FILES if set(path.stem.split("_")) & set(RETIRED_IN_NAMES)] == []


def test_nothing_is_postponed() -> None:
    assert found_in(PROSE, postponed) == {}


def test_no_result_depends_on_the_environment() -> None:
    assert found_in((path for path in FILES if not inside(path, MAY_READ_ENVIRONMENT)), environment_reads) == {}


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
def test_quotations_are_allowed(source: str) -> None:
    assert not blocks(source)


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['X']", "from os import environ", "import os\nos.getenv('X')", "from os import getenv as g"]
)
def test_the_law_sees_the_environment(source: str) -> None:
    assert environment_reads(source)


@pytest.mark.parametrize("text", ["# taken by whoever\n# is ready", "Decode rows are skipped", "slots handed\n    out again"])
def test_the_law_sees_a_retired_phrase(text: str) -> None:
    assert retired_phrases(text)


@pytest.mark.parametrize(
    "text", ["a row of q", "`decode row` is vLLM's term", "the seed of a generator", "a function handed outputs"]
)
def test_the_law_allows_plain_prose(text: str) -> None:
    assert not retired_phrases(text)


@pytest.mark.parametrize("source", ["def meet_all(): ...", "class HopperWorkshop: ...", "is_moody = True"])
def test_the_law_sees_a_retired_name(source: str) -> None:
    assert retired_names(source)
    assert not retired_names(source.replace("meet", "attend").replace("Workshop", "Tile").replace("moody", "steady"))


def test_the_law_sees_what_is_postponed() -> None:
    assert postponed("# TODO: later") and postponed("FIXME") and not postponed("method")
