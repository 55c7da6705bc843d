"""The lines by which a user selects Quire in an engine are the same in the README, in the list of integrations and on the page. The
code, the extras and the page name the same releases of an engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.integrations.engines import ENGINES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "integrations"
PROJECT = (ROOT / "pyproject.toml").read_text()
LISTS = (ROOT / "README.md", FOLDER / "index.md")


def lines_of(table: str) -> list[tuple[str, str]]:
    """The page of each row with a link, and each line of code that the row shows."""
    found = []
    for row in re.findall(r"^\|.*\|$", table, re.MULTILINE):
        page = re.search(r"\]\((?:docs/integrations/)?(\w+\.md)(?:#\w+)?\)", row)
        if page:
            found += [(page[1], code) for code in re.findall(r"`([^`]+)`", row) if " " in code]
    return found


PAGES = ("vllm.md", "transformers.md", "pytorch.md", "sglang.md", "flashinfer.md")
SHOWN = [(source.name, page, line) for source in LISTS for page, line in lines_of(source.read_text()) if page in PAGES]


def test_the_tables_are_read() -> None:
    pages = {(source, page) for source, page, _ in SHOWN}
    assert pages == {(source.name, page) for source in LISTS for page in PAGES}


@pytest.mark.parametrize("source, page, line", SHOWN)
def test_the_page_of_the_engine_has_the_line(source: str, page: str, line: str) -> None:
    code = " ".join(re.findall(r"^```\w+\n(.*?)^```$", (FOLDER / page).read_text(), re.MULTILINE | re.DOTALL))
    assert line in code, f"{source} shows a line that {page} does not have"


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release without zeros at the end."""
    return tuple(map(int, re.sub(r"(\.0)+$", "", version).split(".")))


def after(version: str) -> str:
    """The first release that does not begin with a version: 0.33 after 0.32."""
    first, _, last = version.rpartition(".")
    return f"{first}.{int(last) + 1}"


@pytest.mark.parametrize("name", ENGINES)
def test_the_extra_installs_the_supported_releases(name: str) -> None:
    engine = ENGINES[name]
    extra = re.search(rf'^{engine.extra} = \["{engine.distributions[0]}>=([\d.]+),<([\d.]+)"', PROJECT, re.MULTILINE)
    assert extra and tuple(map(numbers, extra.groups())) == (numbers(engine.oldest), numbers(engine.before))


@pytest.mark.parametrize("name", ENGINES)
def test_the_page_names_the_supported_releases(name: str) -> None:
    """Either "0.7.2 and newer, before 0.8", or one version that stands for all that begin with it."""
    page = " ".join((FOLDER / f"{name}.md").read_text().split())
    found = re.search(r"[Ss]upported (?:release )?is (?:\w+ )?(\d[\d.]*\d)(?: and newer, before (\d[\d.]*\d))?", page)
    assert found
    engine = ENGINES[name]
    assert (numbers(found[1]), numbers(found[2] or after(found[1]))) == (numbers(engine.oldest), numbers(engine.before))
