"""Wheels are tagged for what is in them, a source distribution has everything, and the README's links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "quire/kernels/native/libquire.so"
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources, with a library that is newer than they are: nothing is compiled."""
    tree = tmp_path / "tree"
    names = ".git .venv* build dist site __pycache__ *.so *.egg-info .hypothesis .*_cache"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*names.split()))
    (tree / "src" / LIBRARY).write_bytes(b"a library")
    os.utime(tree / "src" / LIBRARY, (2**31, 2**31))
    return tree


def build(tree: Path, what: str, **environment: str) -> Path:
    line = [sys.executable, "setup.py", "-q", what, "-d", "dist"]
    done = subprocess.run(line, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = (tree / "dist").iterdir()
    return made


def text_of(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as files:
        return files.read(next(found for found in files.namelist() if found.endswith(name))).decode()


def test_a_wheel_with_the_library_is_for_this_platform_and_any_python(tree: Path) -> None:
    wheel = build(tree, "bdist_wheel")
    assert re.fullmatch(r"quire-[\d.]+-py3-none-(linux|macosx|win)\w*\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {LIBRARY, "quire/examples/01_first_batch.py", "quire/py.typed"} <= names
    assert not [name for name in names if name.endswith(".pyc") or name.startswith("tests/")]
    metadata = text_of(wheel, "METADATA")
    assert not re.search(r"\]\((?!\w+:|#)", metadata), "a link that leads nowhere on a package index"
    assert "Project-URL" not in metadata


@pytest.mark.parametrize("environment", [{"QUIRE_PURE": "1"}, {"CXX": "/no/compiler"}], ids=["asked for", "without a compiler"])
def test_a_wheel_without_it_is_for_all(tree: Path, environment: dict[str, str]) -> None:
    (tree / "src" / LIBRARY).unlink()
    wheel = build(tree, "bdist_wheel", **environment, QUIRE_PROJECT_URL="https://example.org/quire")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
    assert "Root-Is-Purelib: true" in text_of(wheel, "WHEEL")
    metadata = text_of(wheel, "METADATA")
    assert "Project-URL: Source, https://example.org/quire" in metadata
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    assert links and all(link.startswith("https://") for link in links)


def test_a_source_distribution_is_complete(tree: Path) -> None:
    with tarfile.open(build(tree, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = [path.relative_to(tree) for path in tree.rglob("*") if path.is_file()]
    parts = ("src/quire", "tests", "docs", "examples", ".ci")
    wanted = {str(path) for path in listed if str(path).startswith(parts) or len(path.parts) == 1}
    missing = {name for name in wanted - names if not name.endswith((".so", ".pyc", ".gitignore", ".git"))}
    assert missing == set()
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_script_handles_interrupts_first() -> None:
    assert '\nquire = "quire.__main__:main"\n' in (ROOT / "pyproject.toml").read_text()


def make(*line: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "QUIRE_PROJECT_URL"}
    return subprocess.run(["make", *line], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_release_needs_the_address_of_the_repository() -> None:
    refused = make("dist")
    assert refused.returncode and "make dist QUIRE_PROJECT_URL=https://" in refused.stderr
    assert "setup.py -q sdist -d dist bdist_wheel -d dist" in make("--dry-run", "dist", "QUIRE_PROJECT_URL=https://x").stdout
    assert "QUIRE_PROJECT_URL" in (ROOT / "CONTRIBUTING.md").read_text()


def test_help_of_make_fits_a_terminal() -> None:
    lines = make("help").stdout.splitlines()
    assert "  make dist " in "\n".join(lines) and max(map(len, lines)) <= 80
