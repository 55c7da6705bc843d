"""The figures of a run as one HTML page that needs nothing else: a roofline, bars of ratios, and the table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from quire.bench.report import PRECISION, UNITS, device_of, notes, table, title, who

Row = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2330; --soft: #667085; --line: #e3e7ee; --roof: #98a2b3;
  --good: #12805c; --poor: #b54708; --bad: #c01048; --c0: #d6336c; --c1: #2f6fdb; --c2: #0c8599; --c3: #e67700; --c4: #6741d9;
  --c5: #5c940d; --c6: #495057; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12151c; --ink: #e8ebf2; --soft: #98a2b3; --line: #2a303c; --roof: #667085; --good: #3ccb94; --poor: #f7a14d;
    --bad: #ff6b8b; --c0: #ff6b9d; --c1: #74a7ff; --c2: #3bc9db; --c3: #ffa94d; --c4: #b197fc; --c5: #a9e34b; --c6: #adb5bd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.05rem; margin: 2.5rem 0 .25rem; }
p { margin: 0 0 1rem; color: var(--soft); max-width: 60rem; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg text { fill: var(--soft); } svg text.ink { fill: var(--ink); } svg text.strong { font-weight: 650; }
.grid { stroke: var(--line); } .roof { stroke: var(--roof); stroke-width: 2; fill: none; } .one { stroke: var(--roof); }
.own { stroke: var(--paper); stroke-width: 1.5; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 60%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--line); padding: .35rem .5rem; white-space: nowrap; }
td { text-align: right; padding: .2rem .5rem; white-space: nowrap; }
th.left, td.left { text-align: left; }
td.who { padding-left: 1.5rem; } tr.first td { border-top: 1px solid var(--line); padding-top: .5rem; } tr.mine td { font-weight: 650; } tr.wrong td { color: var(--bad); }
.item { white-space: nowrap; margin-right: 1rem; } .dot { display: inline-block; width: .6rem; height: .6rem; border-radius: 50%; margin-right: .4rem; }
"""  # noqa: E501


def page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    rows: list[Row] = list(report["rows"])
    colours = colours_of(row["contestant"] for row in rows)
    software = ", ".join(f"{name} {version}" for name, version in report.get("software", {}).items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>quire bench, {escape(report['platform']['name'])}</title><style>{STYLE}</style></head><body>",
        f"<h1>quire bench</h1><p>{escape(title(report))}. {escape(software)}.</p>",
        _roofline(report, rows, colours),
        _ratios(rows, colours),
        "<h2>Every figure</h2><p>Each result was compared with float64 before it was timed; a wrong one has no speed. "
        "The ratio compares with the best peer whose queries have the same precision.</p>",
        html_table(*table(report), rows, colours),
    ]
    if notes(report):
        parts.append(f"<h2>What is missing, and why</h2><p>{'<br>'.join(map(escape, notes(report)))}</p>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each contestant, Quire's first."""
    ordered = sorted(dict.fromkeys(names), key=lambda name: (not name.startswith("quire"), name))
    return {name: f"var(--c{min(i, 6)})" for i, name in enumerate(ordered)}


class Log:
    """A logarithmic axis: numbers from low to high, pixels from start to end."""

    def __init__(self, values: Iterable[float], start: float, end: float):
        known = list(values)
        # A hair outside of a decade does not open another one.
        self.low, self.high = math.floor(math.log10(min(known) * 1.01)), math.ceil(math.log10(max(known) / 1.01))
        self.high = max(self.high, self.low + 1)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def _roofline(report: Mapping[str, Any], rows: Sequence[Row], colours: Mapping[str, str]) -> str:
    """Work against intensity, both logarithmic, under what the machine can do."""
    device = device_of(report)
    _, rate, work = UNITS[device]
    bytes_per_second = report["limits"]["read_gigabytes_per_second"] * 1e9
    flops_per_second = report["limits"][f"{PRECISION[device]}_gigaflops"] * 1e9
    shown = [row for row in rows if row["gigaflops"] and row.get("bytes")]
    if not shown:
        return ""
    knee = flops_per_second / bytes_per_second
    wide, high = 1000, 470
    x = Log([knee, *(row["flops"] / row["bytes"] for row in shown)], 64, wide - 24)
    y = Log([flops_per_second / 1e9, *(row["gigaflops"] for row in shown)], high - 48, 16)
    least, most = 10.0**x.low, 10.0**x.high
    out = [f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="Roofline">']
    for tick in x.ticks():
        out.append(f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{y.end}" y2="{y.start}"/>')
        out.append(f'<text x="{x(tick)}" y="{y.start + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks():
        out.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}"/>')
        out.append(f'<text x="{x.start - 8}" y="{y(tick) + 4}" text-anchor="end">{tick * work.factor:g}</text>')
    # The slanted roof starts where it enters the picture, from the left or from below.
    enters = max(least, 10.0**y.low * 1e9 / bytes_per_second)
    roof = [(enters, enters * bytes_per_second), (knee, flops_per_second), (most, flops_per_second)]
    points = " ".join(f"{x(at)},{y(flops / 1e9)}" for at, flops in roof)
    out.append(f'<polyline class="roof" points="{points}"/>')
    limits = report["limits"]
    middle = math.sqrt(enters * knee)
    out.append(
        f'<text x="{x(middle) - 10}" y="{y(middle * bytes_per_second / 1e9) - 8}" text-anchor="end">reads '
        f"{rate(limits['read_gigabytes_per_second'])} {rate.name}</text>"
    )
    out.append(
        f'<text x="{x.end - 4}" y="{y(flops_per_second / 1e9) - 8}" text-anchor="end">{PRECISION[device]} product '
        f"{work(flops_per_second / 1e9)} {work.name}</text>"
    )
    # Quire's points last, on top of the others.
    for row in sorted(shown, key=lambda row: bool(row.get("own"))):
        mine = bool(row.get("own"))
        out.append(
            f'<circle cx="{x(row["flops"] / row["bytes"])}" cy="{y(row["gigaflops"])}" r="{6 if mine else 4}" '
            f'fill="{colours[row["contestant"]]}" {"class=own" if mine else "opacity=.75"}>{_hover(row, device)}</circle>'
        )
    out.append(f'<text x="{(x.start + x.end) / 2}" y="{high - 8}" text-anchor="middle">FLOP per byte that must move</text>')
    out.append(f'<text transform="translate(14 {high / 2}) rotate(-90)" text-anchor="middle">{work.name}</text></svg>')
    head = (
        "<h2>Under the roof</h2><p>What each contestant reached on each workload, and what the machine allows. "
        "Point at a dot to read it.</p>"
    )
    return head + legend(colours) + "\n".join(out)


def _ratios(rows: Sequence[Row], colours: Mapping[str, str]) -> str:
    """A bar for each of Quire's rows that has a peer: its speed over the best peer's. The peers are dots, the best of them at 1."""
    bars = [row for row in rows if row.get("own") and row.get("ratio")]
    if not bars:
        return ""
    line, left, right = 24, 410, 930
    most = min(3.0, max(1.25, *(row["ratio"] * 1.04 for row in bars)))
    high = line * len(bars) + 44

    def x(ratio: float) -> float:
        return round(left + min(ratio, most) / most * (right - left), 1)

    out = [f'<svg viewBox="0 0 1000 {high}" role="img" aria-label="Speed over the best peer">']
    for quarter in range(int(most * 4) + 1):
        at = quarter / 4
        kind = "one" if at == 1 else "grid"
        out.append(f'<line class="{kind}" x1="{x(at)}" x2="{x(at)}" y1="8" y2="{high - 28}"/>')
        if quarter % 2 == 0:
            out.append(f'<text x="{x(at)}" y="{high - 10}" text-anchor="middle">{at:g}</text>')
    for i, row in enumerate(bars):
        y = 10 + i * line
        peers = [r for r in rows if not r.get("own") and r["workload"] == row["workload"] and r["q_format"] == row["q_format"]]
        best = min(r["milliseconds"] for r in peers if r["milliseconds"])
        tone = "--good" if row["ratio"] >= 1 else "--poor"
        precision = " (fp8 q)" if row["q_format"].startswith("e") else ""
        hover = f"<title>{escape(row['workload'])}: {row['ratio']:.2f} times as fast as {escape(str(row['best_peer']))}</title>"
        out.append(f'<text class="ink" x="{left - 10}" y="{y + 13}" text-anchor="end">{escape(row["workload"] + precision)}</text>')
        size = f'width="{round(x(row["ratio"]) - left, 1)}" height="{line - 9}"'
        out.append(f'<rect x="{left}" y="{y + 2}" {size} rx="3" fill="var({tone})" opacity=".8">{hover}</rect>')
        for peer in sorted((r for r in peers if r["milliseconds"]), key=lambda r: -r["milliseconds"]):
            relative = best / peer["milliseconds"]
            out.append(
                f'<circle class="own" cx="{x(relative)}" cy="{y + 9.5}" r="4.5" fill="{colours[peer["contestant"]]}">'
                f"<title>{escape(peer['contestant'])}: {relative:.2f}</title></circle>"
            )
        out.append(f'<text class="ink strong" x="{right + 12}" y="{y + 13}">{row["ratio"]:.2f}</text>')
    out.append("</svg>")
    head = (
        "<h2>Beside the peers</h2><p>Bars: Quire's speed over that of the best peer with the same query precision. "
        "Dots: the peers, the best of them at 1.</p>"
    )
    return head + "\n".join(out)


def legend(colours: Mapping[str, str]) -> str:
    dot = '<span class="item"><span class="dot" style="background:{}"></span>{}</span>'
    return f"<p>{' '.join(dot.format(colour, escape(name)) for name, colour in colours.items())}</p>"


def _hover(row: Row, device: str) -> str:
    time, rate, work = UNITS[device]
    figures = f"{time(row['milliseconds'])} {time.name}, {rate(row['gigabytes_per_second'])} {rate.name}, "
    return f"<title>{escape(row['workload'])}\n{escape(who(row))}: {figures}{work(row['gigaflops'])} {work.name}</title>"


def html_table(head: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[Row], colours: Mapping[str, str]) -> str:
    """The first cell of a line is a line of its own, once for all that share it."""
    out = ['<div class="scroll"><table><thead><tr>', f'<th class="left">{escape(head[0])}</th>']
    out += [f"<th>{escape(cell)}</th>" for cell in head[2:]]
    out.append("</tr></thead><tbody>")
    before = None
    for line, row in zip(lines, rows):
        if line[0] != before:
            out.append(f'<tr class="first"><td class="left" colspan="{len(head) - 1}">{escape(line[0])}</td></tr>')
        marks = {"mine": row["contestant"].startswith("quire"), "wrong": not row.get("right", True)}
        dot = f'<span class="dot" style="background:{colours.get(row["contestant"], "var(--c6)")}"></span>'
        cells = [f'<td class="left who">{dot}{escape(line[1])}</td>', *(f"<td>{escape(cell)}</td>" for cell in line[2:])]
        out.append(f'<tr class="{" ".join(name for name, on in marks.items() if on)}">{"".join(cells)}</tr>')
        before = line[0]
    return "".join(out) + "</tbody></table></div>"
