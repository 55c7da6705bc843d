"""Tables of docs/performance.md as data."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def table_after(page: str, column: str) -> list[dict[str, str]]:
    """The first table of a Markdown page that has this column, as dictionaries by column."""
    lines = page.splitlines()
    for number, line in enumerate(lines):
        head = cells_of(line)
        if column in head and lines[number + 1].startswith("|---"):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(head, cells_of(row))))
            return rows
    raise ValueError(f"no table has a column {column!r}")


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def number(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    if not found:
        raise ValueError(f"no number in {text!r}")
    return float(found[0])


PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
GPU = table_after(PERFORMANCE, "FlashAttention-3")
CPU = table_after(PERFORMANCE, "x vLLM")
LIMITS = {row["machine"]: row for row in table_after(PERFORMANCE, "matrix product")}
