"""What is made of the figures: ratios, a verdict, cells, and a page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from quire.bench.limits import Limits
from quire.bench.measured import Measured, compared
from quire.bench.page import page
from quire.bench.report import notes, report, table, title, verdict
from quire.bench.workloads import CUDA_WORKLOADS, Workload
from quire.platform import Platform

LIMITS = Limits(4.5e12, 780e12, 4.0e12)
DECODE, QUANTISED, PREFILL = (
    next(w for w in CUDA_WORKLOADS if w.label == label)
    for label in ("decode 64 x 4096, bf16", "decode 64 x 4096, bf16, e4m3fn cache", "prefill 1 x 8192, bf16")
)
WRITE = next(w for w in CUDA_WORKLOADS if w.operation == "write")


def row(workload: Workload, who: str, microseconds: float | None, q_format: str = "", graph: float | None = None) -> Measured:
    turns = [] if microseconds is None else [[microseconds * 1e-6] * 3]
    graphs = [] if graph is None else [[graph * 1e-6] * 3]
    note = "" if microseconds else "wrong result: no speed"
    error = 1e-3 if microseconds else math.nan
    return Measured.of(workload, who, LIMITS, turns, error, 2e-3, note=note, q_format=q_format, graph_turns=graphs)


ROWS = [
    row(DECODE, "quire", 250, graph=240),
    row(DECODE, "fa3", 260, graph=252),
    row(DECODE, "vllm_unified", 289, graph=264),
    row(QUANTISED, "quire", 180),
    row(QUANTISED, "quire fp8 q", 160, "e4m3fn"),
    row(QUANTISED, "fa3", 200, "e4m3fn"),
    row(QUANTISED, "vllm_unified", 360),
    row(PREFILL, "quire", 1300),
    row(PREFILL, "fa3", 910),
    row(PREFILL, "vllm_unified", None),
    row(WRITE, "quire", 20),
    row(WRITE, "copy", 18),
]


def made(rows: list[Measured] = ROWS, **more: Any) -> dict[str, Any]:
    platform = replace(Platform.named("sm90"), name="A <card> & co")
    settings: dict[str, Any] = {"software": {"torch": "2.11"}, "missing": {"flashinfer": "ImportError: no"}} | more
    return report("cuda", platform, LIMITS, rows, **settings)


def test_ratios_compare_with_the_best_peer_of_the_same_precision() -> None:
    by_name = {(r["workload"], r["contestant"]): r for r in compared(ROWS)}
    assert by_name[DECODE.label, "quire"]["ratio"] == pytest.approx(260 / 250)
    assert by_name[DECODE.label, "quire"]["best_peer"] == "fa3"
    assert by_name[DECODE.label, "quire"]["graph_ratio"] == pytest.approx(252 / 240)
    assert by_name[DECODE.label, "fa3"]["ratio"] is None
    # Not with FlashAttention-3, whose queries have 8 bits.
    assert by_name[QUANTISED.label, "quire"]["ratio"] == pytest.approx(360 / 180)
    assert by_name[QUANTISED.label, "quire fp8 q"]["ratio"] == pytest.approx(200 / 160)
    assert by_name[PREFILL.label, "quire"]["ratio"] == pytest.approx(0.7)
    assert by_name[WRITE.label, "quire"]["ratio"] == pytest.approx(0.9)


def test_without_a_peer_there_is_no_ratio() -> None:
    (alone,) = compared(ROWS[:1])
    assert (alone["ratio"], alone["best_peer"]) == (None, None)
    wrong = compared([row(DECODE, "quire", None), ROWS[1]])[0]
    assert (wrong["ratio"], wrong["right"]) == (None, False)


def test_reports_are_json_without_nan() -> None:
    text = json.dumps(made(), allow_nan=False)
    assert json.loads(text) == made()


@pytest.mark.parametrize(
    "rows, status",
    [
        (ROWS, 0),
        ([row(DECODE, "quire", 250), row(DECODE, "fa3", None)], 0),
        ([row(DECODE, "quire", None), row(DECODE, "fa3", 260)], 1),
        ([row(QUANTISED, "quire", 250), row(QUANTISED, "quire fp8 q", None)], 1),
        ([replace(row(DECODE, "quire", None), error=0.0)], 1),
    ],
    ids=["all have speeds or are peers", "a peer is wrong", "quire is wrong", "one of quire's is wrong", "right but never timed"],
)
def test_the_verdict_is_about_quire(rows: list[Measured], status: int) -> None:
    assert verdict(made(rows)) == status


def test_cells() -> None:
    head, lines = table(made())
    assert head == (
        "workload", "who", "us", "+-", "TB/s", "TFLOP/s", "of limit", "error / allowed", "x peer", "graph us", "graph x peer"
    )  # fmt: skip
    assert lines[0] == (DECODE.label, "quire", "250.0", "0%", "4.30", "17", "96%", "1.0e-03 / 2.0e-03", "1.04", "240.0", "1.05")
    assert lines[5][1] == "fa3 (fp8 q)"
    assert lines[9][2] == "wrong" and lines[9][7] == "- / 2.0e-03"
    assert table(made([replace(ROWS[9], note="RuntimeError: no memory")]))[1][0][2] == "failed"
    assert notes(made()) == [f"{PREFILL.label}, vllm_unified: wrong result: no speed", "not measured: flashinfer (ImportError: no)"]
    assert lines[10][5] == "", "a write computes nothing"
    assert len(table(made(ROWS[3:]))[0]) == 9, "no columns for graphs that nobody asked for"
    assert title(made()) == (
        "A <card> & co: reads 4.50 TB/s, copies 4.00 TB/s, multiplies 780 TFLOP/s in bf16 (measured in this run)"
    )


class Page(HTMLParser):
    """Counts tags, and sees one that is never closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.seen)


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(made())
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.count("svg") == 2 and parsed.count("script") == 0
    assert not re.search(r"https?:|url\(|@import|<link|src=", text)
    assert "A &lt;card&gt; &amp; co" in text and "<card>" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.isascii() or 'charset="utf-8"' in text


def test_the_page_shows_every_figure() -> None:
    parsed, text = Page(page(made())), page(made())
    timed = [r for r in ROWS if r.milliseconds]
    on_roofline = [r for r in timed if r.flops]
    dots_of_peers = [r for r in timed if not r.own]
    assert parsed.count("circle") == len(on_roofline) + len(dots_of_peers)
    assert parsed.count("rect") == len([r for r in ROWS if r.own])
    for cell in ("250.0", "1.04", "wrong result: no speed", "fa3 (fp8 q)", "not measured: flashinfer"):
        assert cell in text


def test_points_lie_inside_and_under_the_roof() -> None:
    parsed = Page(page(made()))
    roof = next(attrs["points"] for tag, attrs in parsed.seen if tag == "polyline")
    corners = [tuple(map(float, point.split(","))) for point in str(roof).split()]
    circles = [attrs for tag, attrs in parsed.seen if tag == "circle"][: len([r for r in ROWS if r.milliseconds and r.flops])]
    for circle in circles:
        x, y = float(str(circle["cx"])), float(str(circle["cy"]))
        assert 64 <= x <= 976 and 16 <= y <= 422
        (x0, y0), (x1, y1) = next(pair for pair in pairwise(corners) if pair[0][0] <= x <= pair[1][0])
        assert y >= y0 + (y1 - y0) * (x - x0) / (x1 - x0) - 0.5, "y grows downwards"


@pytest.mark.parametrize(
    "rows, pictures",
    [([], 0), (ROWS[:1], 1), (ROWS[9:10], 0), (ROWS[10:], 1)],
    ids=["nothing", "no peer", "wrong", "only writes"],
)
def test_a_page_of_little(rows: list[Measured], pictures: int) -> None:
    parsed = Page(page(made(rows)))
    assert parsed.open == [] and parsed.count("svg") == pictures
