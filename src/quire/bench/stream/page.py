"""The figures of a stream as one HTML page that needs nothing else: the goals, a timeline of the steps, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quire.bench.page import STYLE, colours_of, html_table, legend
from quire.bench.stream.report import notes, table, title

WIDE, LEFT, RIGHT = 1000, 64, 990
TIME_HIGH, LOAD_HIGH = 320, 110


def page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = report["rows"]
    colours = colours_of(row["contestant"] for row in rows)
    software = ", ".join(f"{name} {version}" for name, version in report["software"].items())
    name = escape(f"quire bench --stream {report['trace']['stream']}")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name}</title><style>{STYLE}</style></head><body>",
        f"<h1>{name}</h1><p>{escape(title(report))}. {escape(software)}.</p>",
        _timeline(report, colours),
        "<h2>Every figure</h2><p>All contestants replayed the same steps. At some steps their outputs were compared with "
        "float64; a wrong contestant has no times. Excess is the most by which a step exceeded its attention time.</p>",
        html_table(*table(report), rows, colours),
        f"<h2>Goals and notes</h2><p>{'<br>'.join(map(escape, notes(report)))}</p>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _timeline(report: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """The time of each step, a line for each contestant, on a logarithmic axis; below it, what the trace holds."""
    from quire.bench.page import Log

    shown = [row for row in report["rows"] if row["steps"]]
    load = report["trace_steps"]
    if not shown:
        return ""
    high = TIME_HIGH + LOAD_HIGH + 60
    y = Log((step[0] * 1e3 for row in shown for step in row["steps"]), TIME_HIGH - 8, 12)
    out = [f'<svg viewBox="0 0 {WIDE} {high}" role="img" aria-label="Timeline">']
    for tick in y.ticks():
        out.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    # Quire's lines last, on top of the others.
    for row in sorted(shown, key=lambda row: bool(row["own"])):
        colour, width = colours[row["contestant"]], 2 if row["own"] else 1.2
        points = " ".join(f"{_x(i, len(load))},{y(step[0] * 1e3)}" for i, step in enumerate(row["steps"]))
        hover = f"<title>{escape(row['contestant'])}</title>"
        out.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" opacity=".85" points="{points}">{hover}</polyline>'
        )
    out += _load(load)
    out.append(f'<text transform="translate(14 {TIME_HIGH / 2}) rotate(-90)" text-anchor="middle">ms of a step</text>')
    out.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{high - 6}" text-anchor="middle">step</text></svg>')
    head = (
        "<h2>Timeline</h2><p>The time of each step, and below it the new tokens of the step: dark where it only decodes, light "
        "where it holds prompts. Point at a bar to read it.</p>"
    )
    return head + legend(colours) + "\n".join(out)


def _x(step: int, steps: int) -> float:
    return round(LEFT + (step + 0.5) / steps * (RIGHT - LEFT), 1)


def _load(load: Sequence[Sequence[int]]) -> list[str]:
    """A bar of new tokens for each step."""
    most = max(tokens for _, tokens, _ in load)
    bottom, width = TIME_HIGH + LOAD_HIGH, max(0.6, (RIGHT - LEFT) / len(load) - 0.4)
    out = [f'<text x="{LEFT - 8}" y="{TIME_HIGH + 14}" text-anchor="end">{most}</text>']
    out.append(f'<text x="{LEFT - 8}" y="{bottom}" text-anchor="end">0</text>')
    for i, (sequences, tokens, decode_only) in enumerate(load):
        tall = round(max(1.0, tokens / most * (LOAD_HIGH - 4)), 1)
        hover = f"<title>step {i}: {tokens} tokens of {sequences} sequences</title>"
        size = f'x="{_x(i, len(load)) - round(width / 2, 1):.1f}" y="{bottom - tall:.1f}" width="{width:.1f}" height="{tall}"'
        out.append(f'<rect {size} fill="var({"--soft" if decode_only else "--roof"})">{hover}</rect>')
    for step in range(0, len(load), max(1, len(load) // 8)):
        out.append(f'<text x="{_x(step, len(load))}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    return out
