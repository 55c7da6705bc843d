"""A plan as an HTML file: the time of every split by resource, and the time over the length of the context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.bench.charts import LogAxis
from quire.html import render
from quire.plan.report import HEAD, lines, milliseconds, table, title
from quire.plan.splits import COMMUNICATION
from quire.plan.step_time import CONVERSION, FLOPS, HBM, LATENCY

WIDTH, HEIGHT = 1000, 420
MOST_BARS = 16
COLORS = {
    HBM: "var(--c1)",
    FLOPS: "var(--c0)",
    CONVERSION: "var(--c4)",
    LATENCY: "var(--c6)",
    COMMUNICATION: "var(--c3)",
}
CURVE_COLORS = ("var(--c1)", "var(--c0)", "var(--c2)", "var(--c3)")


def html_report(found: dict[str, Any]) -> str:
    """The report; it needs no other file and no network."""
    splits = found["splits"][:MOST_BARS]
    used = {name for split in splits for name, value in split["parts_milliseconds"].items() if value}
    return render(
        "plan",
        title="quire plan",
        subject=title(found),
        lines=lines(found),
        colors={name: color for name, color in COLORS.items() if name in used},
        bars=_bars(splits),
        hidden=len(found["splits"]) - len(splits),
        curve=_curve(found),
        table={"head": HEAD[:-1], "lines": [cells[:-1] for cells in table(found)]},
        assumptions=found["assumptions"],
    )


def _bars(splits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stacked bar for each split; widths are percent of the longest."""
    longest = max(split["milliseconds"] for split in splits)
    return [
        {
            "label": f"tp {split['tp']} x cp {split['cp']} x dp {split['dp']}",
            "fits": split["fits"],
            "value": milliseconds(split["milliseconds"]),
            "parts": [
                {"width": round(100 * value / longest, 3), "color": COLORS[name], "text": f"{name}: {milliseconds(value)}"}
                for name, value in sorted(split["parts_milliseconds"].items(), key=lambda part: list(COLORS).index(part[0]))
                if value
            ],
        }
        for split in splits
    ]


def _curve(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Time over context, both logarithmic. None if no length has a time."""
    points = [point for line in found["curve"] for point in line["points"]]
    if not points:
        return None
    x = LogAxis([point["context"] for point in points], 64, WIDTH - 24)
    y = LogAxis([point["milliseconds"] for point in points], HEIGHT - 48, 16)
    drawn = []
    for line, color in zip(found["curve"], CURVE_COLORS):
        name = f"tp {line['tp']} x cp {line['cp']} x dp {line['dp']}"
        dots = [
            {
                "x": x(point["context"]),
                "y": y(point["milliseconds"]),
                "fits": point["fits"],
                "text": f"{name}, {point['context']} tokens: {milliseconds(point['milliseconds'])}"
                + ("" if point["fits"] else ", does not fit"),
            }
            for point in line["points"]
        ]
        drawn.append({"name": name, "color": color, "dots": dots, "path": " ".join(f"{dot['x']},{dot['y']}" for dot in dots)})
    return {"x": x, "y": y, "lines": drawn, "width": WIDTH, "height": HEIGHT}
