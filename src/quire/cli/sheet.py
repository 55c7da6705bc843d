"""Labelled lines: in color and as wide as the terminal where there is one, plain and 100 columns wide elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from quire.dispatch.summary import Line

WIDTH = 100
"""The most columns that a line takes."""


def _console() -> Any:
    """A terminal that shows colors, if there is one: rich knows NO_COLOR."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        return None
    from rich.console import Console

    console = Console(highlight=False)
    return None if console.no_color else console


def show(lines: Iterable[Line], colors: Mapping[str, str]) -> None:
    """Prints lines, their labels in the colors given (styles of rich); those without a label are bold."""
    console = _console()
    if console is None:
        for line in lines:
            print("\n".join(line.wrapped(WIDTH)))
        return
    from rich.text import Text

    for line in lines:
        color = colors.get(line.label, "bold" if not line.label else "dim")
        for number, part in enumerate(line.wrapped(min(console.width, WIDTH))):
            text = Text(part)
            if not line.label:
                text.stylize(color)
            elif not number:
                text.stylize(color, 0, len(line.label))
            console.print(text, soft_wrap=True)
