"""A griffe extension: examples in docstrings (`>>>`) become fenced code, which Markdown would otherwise take for quotations."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestFences(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each run of lines from a `>>>` to the next empty line."""
    lines: list[str] = []
    margin: str | None = None
    for line in text.splitlines():
        if margin is None and line.lstrip().startswith(">>>"):
            margin = line[: len(line) - len(line.lstrip())]
            lines.append(f"{margin}```pycon")
        elif margin is not None and not line.strip():
            lines.append(f"{margin}```")
            margin = None
        lines.append(line)
    return "\n".join(lines if margin is None else [*lines, f"{margin}```"])
