"""The measurements of a run as one HTML file: a roofline, speed relative to the best peer, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.charts import LogAxis, ResultRow, colors_of, grouped_table, software_of
from quire.bench.report import PRECISION, UNITS, device_of, is_own, name_of, notes, table, title
from quire.html import render

WIDTH, HEIGHT = 1000, 470
"""Of the roofline, in pixels."""
READS_WIDTH = 120
"""Room for the label of the read bandwidth."""
LARGEST_RATIO = 3.0
"""Bars of ratios end here. A longer one is cut off, and has a pointed end."""
ABOVE = "The matrix product was measured in {}. Workloads in other types can exceed it where the machine has instructions for them."
"""The note of a roofline with points above the roof."""


def html_report(report: Mapping[str, Any]) -> str:
    """The whole file."""
    rows: list[ResultRow] = list(report["rows"])
    colors = colors_of(row["implementation"] for row in rows)
    return render(
        "bench",
        title=f"quire bench, {report['platform']['name']}",
        summary=title(report),
        software=software_of(report),
        colors=colors,
        roofline=_roofline(report, rows, colors),
        ratios=_ratios(rows, colors),
        table=grouped_table(*table(report), rows, colors),
        notes=notes(report),
    )


def _roofline(report: Mapping[str, Any], rows: Sequence[ResultRow], colors: Mapping[str, str]) -> dict[str, Any] | None:
    """Work per second against FLOP per byte, both logarithmic, below what the machine can do. None if nothing can be drawn."""
    device, limits = device_of(report), report["limits"]
    _, rate, work = UNITS[device]
    bytes_per_second, flops_per_second = limits["read_gigabytes_per_second"] * 1e9, limits[f"{PRECISION[device]}_gigaflops"] * 1e9
    shown = [row for row in rows if row["gigaflops"] and row.get("bytes")]
    if not shown:
        return None
    knee = flops_per_second / bytes_per_second
    x = LogAxis([knee, *(row["flops"] / row["bytes"] for row in shown)], 64, WIDTH - 24)
    y = LogAxis([flops_per_second / 1e9, *(row["gigaflops"] for row in shown)], HEIGHT - 48, 16)
    # The sloped part begins where it enters the chart, from the left or from below.
    enters = max(10.0**x.low, 10.0**y.low * 1e9 / bytes_per_second)
    roof = [(enters, enters * bytes_per_second), (knee, flops_per_second), (10.0**x.high, flops_per_second)]
    reads = f"reads {rate(limits['read_gigabytes_per_second'])} {rate.name}"
    product = f"{PRECISION[device]} product {work(flops_per_second / 1e9)} {work.name}"
    exceeded = any(row["gigaflops"] * 1e9 > flops_per_second for row in shown)
    return {
        "note": ABOVE.format(PRECISION[device]) if exceeded else "",
        "x": x,
        "y": y,
        "width": WIDTH,
        "height": HEIGHT,
        "factor": work.factor,
        "unit": work.name,
        "roof": " ".join(f"{x(at)},{y(flops / 1e9)}" for at, flops in roof),
        "labels": [
            # Left of the knee, above the slope.
            {"x": max(x(knee) - 8, x.start + READS_WIDTH), "y": y(flops_per_second / 1e9) - 8, "text": reads},
            {"x": x.end - 4, "y": y(flops_per_second / 1e9) - 8, "text": product},
        ],
        # Quire's points last, above the others.
        "dots": [_dot(row, x, y, colors, device) for row in sorted(shown, key=is_own)],
    }


def _dot(row: ResultRow, x: LogAxis, y: LogAxis, colors: Mapping[str, str], device: str) -> dict[str, Any]:
    time, rate, work = UNITS[device]
    values = f"{time(row['milliseconds'])} {time.name}, {rate(row['gigabytes_per_second'])} {rate.name}"
    return {
        "x": x(row["flops"] / row["bytes"]),
        "y": y(row["gigaflops"]),
        "own": is_own(row),
        "color": colors[row["implementation"]],
        "text": f"{row['workload']}\n{name_of(row)}: {values}, {work(row['gigaflops'])} {work.name}",
    }


def _ratios(rows: Sequence[ResultRow], colors: Mapping[str, str]) -> dict[str, Any]:
    """A bar for each of Quire's measurements that has a peer. Positions are percent of the track."""
    bars = [row for row in rows if is_own(row) and row.get("ratio")]
    largest = min(LARGEST_RATIO, max([1.25, *(row["ratio"] * 1.04 for row in bars)]))

    def percent(ratio: float) -> float:
        return round(100 * min(ratio, largest) / largest, 2)

    return {
        "one": percent(1.0),
        "largest": f"{largest:g}",
        "clipped": any(row["ratio"] > largest for row in bars),
        "bars": [_bar(row, _peers(row, rows), colors, percent) | {"clipped": row["ratio"] > largest} for row in bars],
    }


def _peers(row: ResultRow, rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The timed peers of a measurement that have the same query precision, the slowest first."""
    key = (row["workload"], row["q_format"])
    found = [r for r in rows if not is_own(r) and (r["workload"], r["q_format"]) == key and r["milliseconds"]]
    return sorted(found, key=lambda r: -r["milliseconds"])


def _bar(row: ResultRow, peers: Sequence[ResultRow], colors: Mapping[str, str], percent: Any) -> dict[str, Any]:
    best = peers[-1]["milliseconds"]
    name = name_of(row)
    return {
        "ratio": row["ratio"],
        "label": row["workload"] if name == "quire" else f"{row['workload']}: {name}",
        "text": f"{row['workload']}: {row['ratio']:.2f} times as fast as {row['best_peer']}",
        "width": percent(row["ratio"]),
        "peers": [
            {
                "left": percent(best / peer["milliseconds"]),
                "color": colors[peer["implementation"]],
                "text": f"{peer['implementation']}: {best / peer['milliseconds']:.2f}",
            }
            for peer in peers
        ],
    }
