"""What is made of the figures: ratios, a verdict, cells, and an HTML report."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from quire.bench.html_report import html_report
from quire.bench.limits import Limits
from quire.bench.measurement import Measurement, compared
from quire.bench.report import notes, report, table, title, verdict
from quire.bench.workloads import CUDA_WORKLOADS, Workload
from quire.platform import Platform
from support.parsed_html import ParsedHtml

LIMITS = Limits(4.5e12, 780e12, 4.0e12)
DECODE, QUANTISED, PREFILL = (
    next(w for w in CUDA_WORKLOADS if w.label == label)
    for label in ("decode 64 x 4096, bf16", "decode 64 x 4096, bf16, e4m3fn cache", "prefill 1 x 8192, bf16")
)
WRITE = next(w for w in CUDA_WORKLOADS if w.operation == "write")


def row(workload: Workload, who: str, microseconds: float | None, q_format: str = "", graph: float | None = None) -> Measurement:
    seconds = [] if microseconds is None else [[microseconds * 1e-6] * 3]
    graphs = [] if graph is None else [[graph * 1e-6] * 3]
    note = "" if microseconds else "wrong result: no speed"
    error = 1e-3 if microseconds else math.nan
    return Measurement.of(workload, who, LIMITS, seconds, error, 2e-3, note=note, q_format=q_format, graph_seconds=graphs)


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


def made(rows: list[Measurement] = ROWS, **more: Any) -> dict[str, Any]:
    platform = replace(Platform.named("sm90"), name="A <card> & co")
    settings: dict[str, Any] = {"software": {"torch": "2.11"}, "missing": {"flashinfer": "ImportError: no"}} | more
    return report("cuda", platform, LIMITS, rows, **settings)


def test_ratios_compare_with_the_best_peer_of_the_same_precision() -> None:
    by_name = {(r["workload"], r["implementation"]): r for r in compared(ROWS)}
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
def test_the_verdict_is_about_quire(rows: list[Measurement], status: int) -> None:
    assert verdict(made(rows)) == status


def test_cells() -> None:
    head, lines = table(made())
    assert head == (
        "workload", "implementation", "us", "+-", "TB/s", "TFLOP/s", "of limit", "error / allowed", "x peer",
        "graph us", "graph x peer",
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


def test_the_html_report_is_self_contained() -> None:
    text = html_report(made())
    parsed = ParsedHtml(text)
    assert parsed.open == []
    assert parsed.count("svg") == 1 and parsed.count("script") == 0
    assert not re.search(r"https?:|url\(|@import|<link|src=", text)
    assert "A &lt;card&gt; &amp; co" in text and "<card>" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.isascii() or 'charset="utf-8"' in text


def test_the_html_report_shows_every_measurement() -> None:
    parsed, text = ParsedHtml(html_report(made())), html_report(made())
    timed = [r for r in ROWS if r.milliseconds]
    on_roofline = [r for r in timed if r.flops]
    dots_of_peers = [r for r in timed if not r.own]
    assert parsed.count("circle") == len(on_roofline) and parsed.count("div", "peer") == len(dots_of_peers)
    assert parsed.count("div", "fill") == len([r for r in ROWS if r.own])
    for cell in ("250.0", "1.04", "wrong result: no speed", "fa3 (fp8 q)", "not measured: flashinfer"):
        assert cell in text


def test_bars_and_dots_are_in_proportion() -> None:
    parsed = ParsedHtml(html_report(made()))
    fills, ones, peers = (
        [float(str(attrs["style"]).split(":")[1].split("%")[0]) for _, attrs in parsed.seen if attrs.get("class") == kind]
        for kind in ("fill", "one", "peer")
    )
    # Quire is 260 / 250 times as fast as FlashAttention-3, which is at 1; vLLM's kernel takes 289 us.
    assert fills[0] / ones[0] == pytest.approx(260 / 250, rel=1e-3)
    assert peers[:2] == [pytest.approx(ones[0] * 260 / 289, rel=1e-3), ones[0]]


def test_points_lie_inside_and_under_the_roof() -> None:
    parsed = ParsedHtml(html_report(made()))
    roof = next(attrs["points"] for tag, attrs in parsed.seen if tag == "polyline")
    corners = [tuple(map(float, point.split(","))) for point in str(roof).split()]
    circles = [attrs for tag, attrs in parsed.seen if tag == "circle"]
    assert circles
    for circle in circles:
        x, y = float(str(circle["cx"])), float(str(circle["cy"]))
        assert 64 <= x <= 976 and 16 <= y <= 422
        (x0, y0), (x1, y1) = next(pair for pair in pairwise(corners) if pair[0][0] <= x <= pair[1][0])
        assert y >= y0 + (y1 - y0) * (x - x0) / (x1 - x0) - 0.5, "y grows downwards"


@pytest.mark.parametrize(
    "rows, rooflines, bars",
    [([], 0, 0), (ROWS[:1], 1, 0), (ROWS[9:10], 0, 0), (ROWS[10:], 0, 1)],
    ids=["nothing", "no peer", "wrong", "only writes"],
)
def test_an_html_report_of_little(rows: list[Measurement], rooflines: int, bars: int) -> None:
    parsed = ParsedHtml(html_report(made(rows)))
    assert parsed.open == [] and (parsed.count("svg"), parsed.count("div", "fill")) == (rooflines, bars)


def test_bars_that_are_cut_off_are_marked() -> None:
    rows = [row(DECODE, "quire", 100), row(DECODE, "fa3", 500), row(PREFILL, "quire", 900), row(PREFILL, "fa3", 910)]
    parsed, text = ParsedHtml(html_report(made(rows))), html_report(made(rows))
    assert (parsed.count("div", "clipped"), parsed.count("div", "fill")) == (1, 2)
    assert "cut off at 3" in text and "5.00" in text
    assert "cut off" not in html_report(made())


def test_points_above_the_product_are_explained() -> None:
    rows = [row(PREFILL, "quire", 500)]
    assert "was measured in bf16" in html_report(made(rows)) and "was measured in bf16" not in html_report(made())
