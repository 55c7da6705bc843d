"""Labelled lines and text: at most 100 columns wide; on a terminal not wider than it is, and in color unless NO_COLOR is set."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.dispatch.summary import Line

WIDTH = 100
"""The most columns that a line takes."""


def width() -> int:
    """The columns of a line: of the terminal, if there is one."""
    return min(shutil.get_terminal_size().columns, WIDTH) if sys.stdout.isatty() else WIDTH


def show(lines: Iterable[Line], colors: Mapping[str, str]) -> None:
    """Prints lines, their labels in the colors given (styles of rich); those without a label are bold."""
    columns = width()
    for line in lines:
        style = colors.get(line.label, "bold" if not line.label else "dim")
        for number, part in enumerate(line.wrapped(columns)):
            _print(part, style, len(line.label) if line.label and not number else 0 if line.label else len(part))


def write(text: str, colors: Mapping[str, str] | None = None) -> None:
    """Prints text line by line. On a terminal a long line is wrapped below its own indentation, and a first word that is among
    `colors` has that color; elsewhere lines stay as they are, for programs that search them."""
    columns = width() if sys.stdout.isatty() else 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        first = next((word for word in colors or () if line.startswith(word, indent)), "")
        parts = [line]
        if columns and len(line) > columns:
            more = min(indent + 4, columns // 2)
            parts = textwrap.wrap(line.strip(), columns, initial_indent=" " * indent, subsequent_indent=" " * more)
        for number, part in enumerate(parts):
            _print(part, (colors or {}).get(first, ""), indent + len(first) if first and not number else 0)


def _print(text: str, style: str, styled: int) -> None:
    """Prints one line, so many of its first characters in a style."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    console, shown = Console(highlight=False), Text(text)
    if not console.no_color:  # rich knows NO_COLOR, but would still print bold text
        shown.stylize(style, 0, styled)
    console.print(shown, soft_wrap=True)
