"""The documentation site builds without a warning, needs no network, and documents every public name; its figures are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]
FIGURES = sorted((ROOT / "docs" / "figures").glob("*.svg"))


def run(*args: str) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), *sys.path])
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (find_spec("mkdocs") and find_spec("mkdocstrings")):
        pytest.skip("mkdocs is not installed here: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # Not with -q: warnings that are not logged do not count as errors.
    run("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    return folder


def test_no_page_needs_the_network(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^\s>]*")
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    assert {page.name: loaded.findall(page.read_text()) for page in pages if loaded.search(page.read_text())} == {}


def test_every_public_name_is_documented(site: Path) -> None:
    page = (site / "api.html").read_text()
    names = [name for name in quire.__all__ if name != "__version__"]
    assert [name for name in names if not re.search(rf"<h2 id=[^>]*>.{{0,200}}?quire\.{name}\b", page, re.DOTALL)] == []


def test_the_reference_shows_fields_and_no_internals(site: Path) -> None:
    page = (site / "api.html").read_text()
    for anchor in ("Decision.chosen", "Violation.given", "Batch.page_table", "Extent.seqs", "Prepared.seconds", "Problem.softcap"):
        assert re.search(rf'id="?quire\.{anchor}\b', page), anchor
    for internal in ("NOT_GIVEN", "NoReturn", "KVCache.packed", "Batch.validated", "Options.too_large", "KVCache.__copy__"):
        assert internal not in page, internal


def test_figures_have_narrow_variants(site: Path) -> None:
    sources = re.findall(r'srcset="?(figures/\w+_narrow\.svg)', (site / "performance.html").read_text())
    assert len(sources) == 3 and all((site / source).exists() for source in sources)


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_white_text_on_colored_cells_can_be_read() -> None:
    text = (ROOT / "tools" / "figures" / "style.py").read_text()
    colors = re.findall(r"#[0-9a-f]{6}", text[text.index("COLORS = ") :].splitlines()[0])
    assert len(colors) == 6
    assert [color for color in colors if 1.05 / (luminance(color) + 0.05) < 4.5] == []


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not find_spec("matplotlib"):
        pytest.skip("matplotlib is not installed here: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("figures")
    run("tools/figures", str(folder))
    return folder


def test_figures_are_current(drawn: Path) -> None:
    assert [path.name for path in FIGURES] == sorted(path.name for path in drawn.iterdir())
    assert [path.name for path in FIGURES if path.read_text() != (drawn / path.name).read_text()] == [], "run: make figures"
