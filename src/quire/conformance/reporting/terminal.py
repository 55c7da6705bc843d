"""Prints headings, paragraphs, quotes, items and tables: in color on a terminal, as plain text elsewhere."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Protocol

WIDTH = 110
"""The most columns that a line takes."""

INDENT = 11
"""The column at which the text of an item begins, after its label."""
GOOD, BAD = "ok", "WRONG"
COLORS = {
    **dict.fromkeys((GOOD, "yes", "confirmed", "cures", "PASS", "correct"), "green"),
    **dict.fromkeys((BAD, "no", "rejected", "FAIL", "wrong"), "red"),
}
"""Words that a table shows in color when a cell begins with one."""


class Printer(Protocol):
    """Prints a report."""

    def heading(self, text: str) -> None: ...
    def text(self, text: str) -> None: ...
    def quote(self, text: str) -> None: ...
    def item(self, label: str, title: str, *lines: str) -> None: ...
    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...


def printer() -> Printer:
    """With color if standard output is a terminal."""
    return ColorPrinter() if sys.stdout.isatty() else PlainPrinter()


class PlainPrinter:
    """Text for a file or a pipe."""

    def heading(self, text: str) -> None:
        print(f"\n{text}\n{'=' * len(text)}")

    def text(self, text: str) -> None:
        print(textwrap.fill(text, WIDTH))

    def quote(self, text: str) -> None:
        print(textwrap.indent(text, "    | ", lambda line: True))

    def item(self, label: str, title: str, *lines: str) -> None:
        margin = " " * (INDENT + 2)
        print(textwrap.fill(title, WIDTH, initial_indent=f"  {label:{INDENT}}", subsequent_indent=margin))
        for line in lines:
            print(textwrap.fill(line, WIDTH, initial_indent=margin, subsequent_indent=margin))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
        widths = fit(
            [max(len(row[i]) for row in lines) for i in range(len(head))], [longest_word(lines, i) for i in range(len(head))]
        )
        for number, row in enumerate(lines):
            cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths)]
            for line in range(max(map(len, cells))):
                parts = (cell[line] if line < len(cell) else "" for cell in cells)
                print("  " + "  ".join(f"{part:{width}}" for part, width in zip(parts, widths)).rstrip())
            if not number:
                print("  " + "  ".join("-" * width for width in widths))


class ColorPrinter:
    """For a terminal, through rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False)
        self.console.width = min(self.console.width, WIDTH)

    def heading(self, text: str) -> None:
        from rich.text import Text

        self.console.print()
        self.console.rule(Text(text, "bold"), align="left", style="dim")

    def text(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(text))

    def quote(self, text: str) -> None:
        from rich.padding import Padding
        from rich.text import Text

        self.console.print(Padding(Text(text, "red"), (0, 0, 0, 4)))

    def item(self, label: str, title: str, *lines: str) -> None:
        from rich.padding import Padding
        from rich.text import Text

        margin = (0, 0, 0, INDENT + 2)
        self.console.print(Text(f"  {label:{INDENT}}", COLORS.get(label, "")) + Text(title, "bold"))
        for line in lines:
            self.console.print(Padding(Text(line), margin))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
        for cell in head:
            table.add_column(cell)
        for row in rows:
            table.add_row(*(Text(str(cell), COLORS.get(str(cell).split(" ")[0].strip(",:"), "")) for cell in row))
        self.console.print(table)


def longest_word(table: Sequence[Sequence[str]], column: int) -> int:
    return max(len(word) for row in table for word in [*row[column].split(), ""])


def fit(wanted: list[int], least: list[int]) -> list[int]:
    """Column widths that fit into a line. The widest columns are cut first, none below its longest word."""
    widths = list(wanted)
    available = WIDTH - 2 * len(widths)
    while sum(widths) > available:
        spare = [width - low for width, low in zip(widths, least)]
        if max(spare) <= 0:
            break
        widest = max((i for i, more in enumerate(spare) if more > 0), key=lambda i: widths[i])
        widths[widest] -= 1
    return widths
