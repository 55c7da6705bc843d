"""The lines by which a user selects Quire in an engine are the same in the README, in the list of integrations and on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "integrations"
LISTS = (ROOT / "README.md", FOLDER / "index.md")


def lines_of(table: str) -> list[tuple[str, str]]:
    """The page of each row with a link, and each line of code that the row shows."""
    found = []
    for row in re.findall(r"^\|.*\|$", table, re.MULTILINE):
        page = re.search(r"\]\((?:docs/integrations/)?(\w+\.md)(?:#\w+)?\)", row)
        if page:
            found += [(page[1], code) for code in re.findall(r"`([^`]+)`", row) if " " in code]
    return found


ENGINES = ("vllm.md", "transformers.md", "pytorch.md", "sglang.md", "flashinfer.md")
SHOWN = [(source.name, page, line) for source in LISTS for page, line in lines_of(source.read_text()) if page in ENGINES]


def test_the_tables_are_read() -> None:
    pages = {(source, page) for source, page, _ in SHOWN}
    assert pages == {(source.name, page) for source in LISTS for page in ENGINES}


@pytest.mark.parametrize("source, page, line", SHOWN)
def test_the_page_of_the_engine_has_the_line(source: str, page: str, line: str) -> None:
    code = " ".join(re.findall(r"^```\w+\n(.*?)^```$", (FOLDER / page).read_text(), re.MULTILINE | re.DOTALL))
    assert line in code, f"{source} shows a line that {page} does not have"
