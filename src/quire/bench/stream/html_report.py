"""The measurements of a stream as one HTML file: a timeline of the steps, a table, and the goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.charts import LogAxis, colors_of, grouped_table, software_of
from quire.bench.stream.report import notes, table, title
from quire.html import render

WIDTH, LEFT, RIGHT = 1000, 64, 990
TIME_HEIGHT, LOAD_HEIGHT = 320, 110
"""Pixels of the times, and of the numbers of tokens below them."""


def html_report(report: Mapping[str, Any]) -> str:
    """The whole file."""
    rows = report["rows"]
    colors = colors_of(row["implementation"] for row in rows)
    return render(
        "stream",
        title=f"quire bench --stream {report['trace']['stream']}",
        summary=title(report),
        software=software_of(report),
        colors=colors,
        timeline=_timeline(report, colors),
        table=grouped_table(*table(report), rows, colors),
        notes=notes(report),
    )


def _timeline(report: Mapping[str, Any], colors: Mapping[str, str]) -> dict[str, Any] | None:
    """The time of each step, a line for each implementation, on a logarithmic axis; below it, the new tokens of each step."""
    shown = [row for row in report["rows"] if row["steps"]]
    load = report["trace_steps"]
    if not shown:
        return None
    y = LogAxis((step[0] * 1e3 for row in shown for step in row["steps"]), TIME_HEIGHT - 8, 12)
    return {
        "width": WIDTH,
        "height": TIME_HEIGHT + LOAD_HEIGHT + 60,
        "left": LEFT,
        "right": RIGHT,
        "load_top": TIME_HEIGHT,
        "load_bottom": TIME_HEIGHT + LOAD_HEIGHT,
        "y": y,
        # Quire's lines last, above the others.
        "lines": [
            {
                "name": row["implementation"],
                "own": row["own"],
                "color": colors[row["implementation"]],
                "points": " ".join(f"{_x(i, len(load))},{y(step[0] * 1e3)}" for i, step in enumerate(row["steps"])),
            }
            for row in sorted(shown, key=lambda row: bool(row["own"]))
        ],
        "most_tokens": max(tokens for _, tokens, _ in load),
        "bars": _load(load),
        "step_ticks": [(step, _x(step, len(load))) for step in range(0, len(load), max(1, len(load) // 8))],
    }


def _x(step: int, steps: int) -> float:
    return round(LEFT + (step + 0.5) / steps * (RIGHT - LEFT), 1)


def _load(load: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """A bar of new tokens for each step."""
    most = max(tokens for _, tokens, _ in load)
    width = round(max(0.6, (RIGHT - LEFT) / len(load) - 0.4), 1)
    bars = []
    for i, (sequences, tokens, decode_only) in enumerate(load):
        height = round(max(1.0, tokens / most * (LOAD_HEIGHT - 4)), 1)
        bars.append(
            {
                "x": round(_x(i, len(load)) - width / 2, 1),
                "y": round(TIME_HEIGHT + LOAD_HEIGHT - height, 1),
                "width": width,
                "height": height,
                "decode_only": decode_only,
                "text": f"step {i}: {tokens} tokens of {sequences} sequences",
            }
        )
    return bars
