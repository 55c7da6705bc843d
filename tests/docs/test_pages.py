"""The Python code of the documentation runs as it is shown, from top to bottom of a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["index.md", "migrating.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    parts = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(parts) >= 3
    session: dict[str, object] = {}
    for part in parts:
        exec(compile(part, page, "exec"), session)
    assert session["out"].isfinite().all()
