"""A feature or a format is known to few files: each name occurs in at most ten, outside of adapters to other projects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "quire"
SOURCES = {
    path.relative_to(SRC).as_posix(): path.read_text()
    for path in sorted(SRC.rglob("*"))
    if path.suffix in (".py", ".h", ".cpp") and path.is_file()
}
ADAPTERS = ("compat/", "conformance/targets/", "bench/peers/", "integrations/", "plan/config.py", "plan/models.py")
MOST_FILES = 10
NAMES = {"a feature": r"softcap", "the formats": r"(?i)e4m3|e5m2|fnuz|['\"]int[48]"}


def files_with(pattern: str, sources: dict[str, str]) -> list[str]:
    return [path for path, text in sources.items() if not path.startswith(ADAPTERS) and re.search(pattern, text)]


@pytest.mark.parametrize("pattern", NAMES.values(), ids=NAMES)
def test_few_files_know(pattern: str) -> None:
    found = files_with(pattern, SOURCES)
    assert 1 <= len(found) <= MOST_FILES, found


def test_the_law_counts_files_and_not_adapters() -> None:
    sources = {"options.py": "softcap = softcap", "kernels/native/tile.h": "softcap", "compat/vllm.py": "softcap", "batch.py": ""}
    assert files_with("softcap", sources) == ["options.py", "kernels/native/tile.h"]
