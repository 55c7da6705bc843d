"""A run of the suite as one HTML page that needs nothing else: what is wrong, where it sits, which faults explain it.

The error map is a picture with one pixel for each token and head: a page with a cell of its own for each of thousands of numbers
would be slow to open. What a pixel stands for is told when it is pointed at.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from quire.conformance.report import Finding, Picture, Report, Result, brief

MOST_PICTURES = 12
"""Faults that are drawn; the rest are told in words."""
TABLE_ROWS, TABLE_COLUMNS = 24, 32
"""The part of a page table that is drawn, around the bad cell."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f8f9fb; --ink: #1d2330; --soft: #667085; --line: #e3e7ee;
  --good: #12805c; --poor: #b54708; --bad: #c01048; --quiet: #98a2b3; --cell: #eef1f5; --seq: #2f6fdb; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12151c; --card: #191d26; --ink: #e8ebf2; --soft: #98a2b3; --line: #2a303c; --good: #3ccb94; --poor: #f7a14d;
    --bad: #ff6b8b; --quiet: #667085; --cell: #232936; --seq: #74a7ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.05rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 0; }
h4 { font-size: .8rem; margin: 1.25rem 0 .35rem; color: var(--soft); font-weight: 600; }
p { margin: 0 0 .75rem; color: var(--soft); max-width: 62rem; } p.ink { color: var(--ink); }
code { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.chips { display: flex; gap: .5rem; flex-wrap: wrap; margin: .75rem 0 0; }
.chip { border: 1px solid var(--line); border-radius: 1rem; padding: .1rem .7rem; font-size: 13px; color: var(--soft); }
.chip b { color: var(--ink); font-variant-numeric: tabular-nums; } .chip.bad b { color: var(--bad); } .chip.good b { color: var(--good); }
.card { border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 8px; background: var(--card);
  padding: 1.1rem 1.25rem 1.25rem; margin: 0 0 1.25rem; }
.card.unknown { border-left-color: var(--poor); }
.two { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 1.5rem; } @media (max-width: 60rem) { .two { display: block; } }
.map { position: relative; } .map img { display: block; width: 100%; height: 100%; image-rendering: pixelated; border-radius: 3px; }
.frame { position: relative; background: var(--cell); border-radius: 3px; }
.frame .seq { position: absolute; top: 0; bottom: 0; border-left: 1px solid var(--seq); pointer-events: none; }
.frame .worst { position: absolute; border: 2px solid var(--ink); border-radius: 50%; width: 14px; height: 14px; margin: -7px 0 0 -7px; pointer-events: none; }
.under { position: relative; height: 1.3rem; font-size: 11px; color: var(--seq); } .under span { position: absolute; white-space: nowrap; padding-left: 3px; }
.tip { min-height: 1.3rem; font-size: 13px; color: var(--soft); font-variant-numeric: tabular-nums; }
.legend { display: flex; gap: .9rem; font-size: 12px; color: var(--soft); flex-wrap: wrap; } .legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; vertical-align: -1px; margin-right: .3rem; }
.bar { display: grid; grid-template-columns: 14rem 1fr 4.5rem; gap: .6rem; align-items: center; font-size: 13px; margin: 2px 0; }
.bar span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; } .bar .track { height: 9px; background: var(--cell); border-radius: 5px; }
.bar .fill { height: 100%; border-radius: 5px; background: var(--quiet); } .bar.match .fill { background: var(--good); } .bar.match { font-weight: 650; }
.bar .number { text-align: right; color: var(--soft); font-variant-numeric: tabular-nums; }
.grid { border-collapse: separate; border-spacing: 2px; font: 11px ui-monospace, Menlo, Consolas, monospace; } .grid td, .grid th { padding: 1px 5px; text-align: right; border-radius: 3px; }
.grid th { color: var(--soft); font-weight: 500; white-space: nowrap; } .grid td { background: var(--cell); } .grid td.free { background: none; color: var(--quiet); opacity: .6; }
.grid td.bad { background: var(--bad); color: #fff; font-weight: 700; outline: 2px solid var(--bad); outline-offset: 1px; }
.scroll { overflow-x: auto; }
.again { display: flex; gap: .75rem; align-items: start; background: var(--cell); border-radius: 6px; padding: .5rem .75rem; } .again code { flex: 1; overflow-wrap: anywhere; }
button { font: 12px system-ui, sans-serif; border: 1px solid var(--line); border-radius: 5px; background: var(--paper); color: var(--ink); padding: .15rem .6rem; cursor: pointer; }
table.cases { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
.cases th { text-align: left; color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); padding: .35rem .5rem; white-space: nowrap; }
.cases td { padding: .2rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; } .cases td.number { text-align: right; } .cases td.number, .cases td.name { white-space: nowrap; }
.status { font-weight: 650; } .right .status, .refused .status { color: var(--good); } .wrong .status, .raised .status { color: var(--bad); } .unsupported .status { color: var(--quiet); }
ul { margin: .25rem 0 0; padding-left: 1.1rem; color: var(--soft); } li { margin: .1rem 0; }
"""  # noqa: E501

SCRIPT = """
for (const map of document.querySelectorAll('.map')) {
  const data = JSON.parse(map.querySelector('script').textContent);
  const frame = map.querySelector('.frame'), tip = map.querySelector('.tip');
  const say = tip.textContent;
  frame.addEventListener('mouseleave', () => { tip.textContent = say; });
  frame.addEventListener('mousemove', event => {
    const box = frame.getBoundingClientRect();
    const row = Math.min(data.tokens - 1, Math.floor((event.clientX - box.left) / box.width * data.tokens));
    const head = Math.min(data.heads - 1, Math.floor((event.clientY - box.top) / box.height * data.heads));
    if (row < 0 || head < 0) return;
    let seq = 0;
    while (seq + 2 < data.starts.length && data.starts[seq + 1] <= row) seq++;
    const at = data.lens[seq] - data.starts[seq + 1] + row, off = data.ratio[row][head];
    const how = off < 0 ? 'never written' : off > 1 ? off.toPrecision(3) + ' budgets off' : 'right';
    tip.textContent = `row ${row}, sequence ${seq}, position ${at}, head ${head}: ${how}`;
  });
  map.dataset.alive = data.tokens;
}
for (const button of document.querySelectorAll('.again button'))
  button.addEventListener('click', () => {
    const done = () => { button.textContent = 'copied'; };
    if (navigator.clipboard) navigator.clipboard.writeText(button.previousElementSibling.textContent).then(done, () => {}); });
"""


def page(report: Report) -> str:
    """The whole page."""
    counts, found = report.counts(), report.findings
    failed = [result for result in report.results if result.failed]
    title = f"quire conform {report.target}"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(report.target)}</h1>",
        f'<p class="ink">{escape(_verdict(report, failed))}</p>',
        f"<p>{escape(f'level {report.level}, ' if report.level else '')}on {escape(report.device)}, {report.seconds:.1f} s. "
        f"{escape(versions)}</p>",
        '<div class="chips">' + "".join(_chip(name, n) for name, n in counts.items()) + "</div>",
    ]
    if found:
        parts.append("<h2>What is wrong</h2>")
    by_name = {result.case.name: result for result in report.results}
    for number, (finding, cases) in enumerate(found):
        shown = _pictured([by_name[name] for name in cases if name in by_name], finding) if number < MOST_PICTURES else None
        parts.append(_card(report, finding, cases, shown))
    parts += ["<h2>Every case</h2>", _cases(report.results), f"<script>{SCRIPT}</script></body></html>\n"]
    return "\n".join(parts)


def _verdict(report: Report, failed: Sequence[Result]) -> str:
    asked = [result for result in report.results if result.status != "unsupported"]
    known = sum(bool(result.known) for result in failed)
    if not failed:
        return f"Right in all {len(asked)} cases that it was asked." if asked else "It was asked nothing."
    names = [finding.fault for finding, _ in report.findings]
    expected = f", {known} of them known" if known else ""
    return f"Wrong in {len(failed)} of {len(asked)} cases{expected}. Found: {', '.join(names)}."


def _chip(name: str, count: int) -> str:
    tone = "bad" if name in ("wrong", "raised") and count else "good" if name == "right" else ""
    return f'<span class="chip {tone}"><b>{count}</b> {escape(name)}</span>'


def _pictured(results: Sequence[Result], finding: Finding) -> Result | None:
    """The case to draw: one whose first finding this is, with right and wrong side by side, of a size that the eye takes in."""
    with_picture = [result for result in results if result.picture is not None and result.picture.ratio]
    mine = [result for result in with_picture if result.findings and result.findings[0].fault == finding.fault]
    return min(mine or with_picture, key=_plainness, default=None)


def _plainness(result: Result) -> tuple[bool, float]:
    """How little a picture shows: less is better."""
    assert result.picture is not None
    right = {0 <= off <= 1 for row in result.picture.ratio for off in row}
    return len(right) < 2, abs(math.log(len(result.picture.ratio) / 32))


def _card(report: Report, finding: Finding, cases: Sequence[str], shown: Result | None) -> str:
    if shown is not None:
        finding = next((one for one in shown.findings if one.fault == finding.fault), finding)
    given, place = brief(finding.parameters), str(finding.where)
    others = ", and otherwise in other cases" if len(report.ways(finding)) > 1 else ""
    alike = [name for name in finding.alike if name != finding.fault]
    some = ", ".join(cases[:12]) + (f" and {len(cases) - 12} more" if len(cases) > 12 else "")
    out = [
        f'<section class="card {"unknown" if finding.fault == "unknown" else ""}">',
        f"<h3>{escape(finding.fault)}</h3>",
        f'<p class="ink">{escape(finding.summary)}</p>',
        f"<p>{escape(f'With {given}{others}. ' if given else '')}{escape(f'Worst at {place}. ' if place else '')}"
        f"{escape(f'On this case the same as {chr(44).join(alike)}. ' if alike else '')}"
        f"Shown by {len(cases)} case{'s' if len(cases) != 1 else ''}: {escape(some)}.</p>",
    ]
    if finding.evidence:
        out.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in finding.evidence) + "</ul>")
    if shown is not None and shown.picture is not None:
        out += [
            '<div class="two"><div>',
            _error_map(shown, shown.picture, finding),
            "</div><div>",
            _ranking(finding),
            "</div></div>",
            _table_map(shown.picture, finding),
        ]
    else:
        out.append(_ranking(finding))
    line = finding.reproduce or (str(shown.case) if shown else "")
    if line:
        command = f"quire conform {report.target} --case '{line}'"
        out.append(f'<h4>To see it again</h4><div class="again"><code>{escape(command)}</code><button>copy</button></div>')
    out.append("</section>")
    return "\n".join(out)


def _error_map(result: Result, picture: Picture, finding: Finding) -> str:
    """Tokens from left to right, heads from top to bottom, sequences between blue lines."""
    tokens, heads = len(picture.ratio), len(picture.ratio[0])
    image = base64.b64encode(png([[colour(picture.ratio[t][h]) for t in range(tokens)] for h in range(heads)])).decode()
    high = max(64, min(240, heads * 14))
    lines, names = [], []
    starts = [start for start in picture.q_starts if start <= tokens]
    rows = [(seq, start) for seq, start in enumerate(starts[:-1]) if picture.q_starts[seq + 1] > start]
    last = -9.0
    for seq, start in rows:
        left = 100 * start / tokens
        lines.append(f'<span class="seq" style="left:{left:.3f}%"></span>')
        if left - last > 4:
            names.append(f'<span style="left:{left:.3f}%">{seq}</span>')
            last = left
    place, worst = finding.where, ""
    if place.row is not None and place.head is not None and place.row < tokens:
        x, y = 100 * (place.row + 0.5) / tokens, 100 * (place.head + 0.5) / heads
        worst = f'<span class="worst" style="left:{x:.3f}%;top:{y:.3f}%"></span>'
    data = {"tokens": tokens, "heads": heads, "starts": picture.q_starts, "lens": picture.kv_lens, "ratio": picture.ratio}
    legend = "".join(
        f'<span><i style="background:rgba({r},{g},{b},{a / 255:.2f})"></i>{text}</span>'
        for (r, g, b, a), text in (
            (colour(0.5), "right"),
            (colour(3.0), "a few budgets"),
            (colour(1e3), "a thousand"),
            (colour(1e9), "a billion, or no number"),
            (colour(-1.0), "never written"),
        )
    )
    return (
        f"<h4>Error map of {escape(result.case.name)}: {tokens} tokens by {heads} heads, {result.wrong} elements wrong</h4>"
        f'<div class="map"><div class="frame" style="height:{high}px">'
        f'<img alt="error of each token and head" src="data:image/png;base64,{image}">{"".join(lines)}{worst}</div>'
        f'<div class="under">{"".join(names)}</div><div class="tip">Point at it to read it. Blue: where a sequence begins.</div>'
        f'<script type="application/json">{json.dumps(data).replace("</", "<" + chr(92) + "/")}</script></div>'
        f'<div class="legend">{legend}</div>'
    )


def _ranking(finding: Finding) -> str:
    """How far each prediction is from what the kernel gave, on a logarithmic scale of budgets."""
    if not finding.ranking:
        return ""
    rows = []
    for name, off in finding.ranking:
        share = 1.0 if not math.isfinite(off) else min(1.0, math.log10(1 + off) / 9)
        text = "never" if not math.isfinite(off) else f"{off:.3g}"
        kind = "match" if off <= 1 else ""
        rows.append(
            f'<div class="bar {kind}"><span title="{escape(name)}">{escape(name)}</span>'
            f'<div class="track"><div class="fill" style="width:{max(share * 100, 1):.1f}%"></div></div>'
            f'<span class="number">{text}</span></div>'
        )
    return "<h4>How far each fault's prediction is from the answer, in budgets (1 or less explains it)</h4>" + "".join(rows)


def _table_map(picture: Picture, finding: Finding) -> str:
    """The page table: pages that are needed, cells that are nobody's business, and the cell at fault."""
    seqs, width = len(picture.page_table), max(map(len, picture.page_table), default=0)
    if not seqs or not width:
        return ""
    bad = picture.bad_cell
    top = 0 if bad is None else max(0, min(bad[0] - TABLE_ROWS // 2, seqs - TABLE_ROWS))
    left = 0 if bad is None else max(0, min(bad[1] - TABLE_COLUMNS // 2, width - TABLE_COLUMNS))
    columns = range(left, min(width, left + TABLE_COLUMNS))
    head = "".join(f"<th>{column * picture.page_size}</th>" for column in columns)
    rows = [f"<tr><th>sequence</th>{head}</tr>"]
    for seq in range(top, min(seqs, top + TABLE_ROWS)):
        used = -(-picture.kv_lens[seq] // picture.page_size)
        cells = []
        for column in columns:
            page = picture.page_table[seq][column]
            kind = "bad" if (seq, column) == bad else "free" if column >= used else ""
            cells.append(f'<td class="{kind}">{page}</td>')
        rows.append(f"<tr><th>{seq} ({picture.kv_lens[seq]})</th>{''.join(cells)}</tr>")
    place = finding.where
    note = ""
    if bad is not None and place.key is not None:
        slot = "" if place.slot is None else f", slot {place.slot}"
        note = f" The key at fault is at position {place.key} of sequence {bad[0]}: page {place.page}{slot}."
    cut = "" if seqs <= TABLE_ROWS and width <= TABLE_COLUMNS else f" A part of {seqs} rows and {width} columns or more."
    words = f"A sequence's pages, under the position they begin at; grey cells are beyond its end.{note}{cut}"
    return f'<h4>Page table</h4><p>{escape(words)}</p><div class="scroll"><table class="grid">{"".join(rows)}</table></div>'


def _cases(results: Sequence[Result]) -> str:
    order = {"wrong": 0, "raised": 1, "refused": 3, "unsupported": 4}
    rows = []
    for result in sorted(results, key=lambda result: order.get(result.status, 2)):
        said = ", ".join(finding.fault for finding in result.findings) or result.reason
        if result.known:
            said += f" (known: {result.known})"
        off = f"{result.error:.3g}" if result.status in ("right", "wrong") else ""
        rows.append(
            f'<tr class="{result.status}"><td class="status">{escape(result.status)}</td>'
            f'<td class="name">{escape(result.case.name)}</td>'
            f'<td>{escape(said)}</td><td class="number">{off}</td><td class="number">{result.wrong or ""}</td>'
            f"<td><code>{escape(str(result.case))}</code></td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("", "case", "what", "error in budgets", "elements", "line"))
    return f'<div class="scroll"><table class="cases"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


# Pictures.

_STEPS = ((0.0, (250, 204, 21)), (3.0, (234, 88, 12)), (9.0, (159, 18, 57)))
"""Yellow at one budget, orange at a thousand, dark red at a billion."""


def colour(off: float) -> tuple[int, int, int, int]:
    """The colour of an error in budgets: -1 is an element that was never written, up to 1 is right."""
    if off < 0:
        return 126, 58, 242, 255
    if off <= 1:
        return 18, 128, 92, 60
    power = 9.0 if not math.isfinite(off) else min(math.log10(off), 9.0)
    (low, a), (high, b) = next(pair for pair in pairwise(_STEPS) if power <= pair[1][0])
    share = (power - low) / (high - low)
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b))
    return red, green, blue, 255


def png(rows: Sequence[Sequence[tuple[int, int, int, int]]]) -> bytes:
    """A picture of these pixels, red, green, blue and opacity each."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header: Any = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    pixels = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels, 9)) + chunk(b"IEND", b"")
