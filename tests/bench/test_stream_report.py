"""The report of a stream: every figure, the goals as pass or FAIL, and a page with a timeline."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from quire.bench.reference_check import SampleError
from quire.bench.stream.html_report import html_report
from quire.bench.stream.replay import Replay, Timed
from quire.bench.stream.report import acceptance, notes, report, table, title, verdict
from quire.bench.stream.result import StreamResult
from quire.bench.stream.setup import Spec, StreamModel
from quire.bench.stream.trace import EngineLimits
from quire.platform import Platform
from support.parsed_html import ParsedHtml

SPEC = Spec("chat", 3, StreamModel(2, 4, 2, 16, 16), EngineLimits(steps=100, budget=64, sequences=8, capacity=4096, scale=1 / 32))
RIGHT, WRONG = SampleError(1e-3, 2e-3), SampleError(5.0, 2e-3)


def result(name: str, milliseconds: float, *, stall: float = 0.0, error: SampleError = RIGHT) -> StreamResult:
    """An implementation whose steps take 1, 2, 3, ... times as long, one of them with a stall on the host."""
    steps = [Timed(i * milliseconds / 1e3, (i - 0.5) * milliseconds / 1e3, 1e-4 * milliseconds) for i in range(1, 101)]
    steps[10] = steps[10]._replace(total=steps[10].total + stall)
    return StreamResult.of(name, Replay(steps, error), compilations=3)


RESULTS = [
    result("quire", 1.0, stall=4.0),
    result("quire + graphs", 0.9),
    result("fa3", 0.8),
    result("peer", 0.1, error=WRONG),
    StreamResult("flashinfer", note="RuntimeError: broken"),
]


def made(results: list[StreamResult] | None = None, **more: Any) -> dict[str, Any]:
    platform = replace(Platform.named("sm90"), name="A <card> & co")
    settings: dict[str, Any] = {"software": {"torch": "2.11"}, "missing": {"vllm_unified": "ImportError: no"}} | more
    return report("cuda", platform, SPEC, RESULTS if results is None else results, **settings)


def test_figures_of_a_contestant() -> None:
    found = result("peer", 1.0)
    assert found.total == pytest.approx(5.05) and found.attention == pytest.approx(5.0) and found.host == pytest.approx(0.01)
    assert (found.p50, found.p99, found.max) == pytest.approx((0.0505, 0.099, 0.1))
    assert found.excess == pytest.approx(0.5e-3) and found.compilations == 3
    assert result("peer", 1.0, stall=4.0).excess == pytest.approx(4.0005)
    assert StreamResult.of("peer", Replay([Timed(1.0, 1.0, 0.0)], SampleError(float("nan"), 1.0))).right is False


def test_the_report_has_every_field() -> None:
    found = made()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    fields = {"kind", "device", "platform", "threads", "software", "model", "trace", "trace_steps", "rows", "missing", "acceptance"}
    assert fields == found.keys()
    needed = {
        "total",
        "attention",
        "host",
        "p50",
        "p99",
        "max",
        "excess",
        "compilations",
        "error",
        "budget",
        "right",
        "note",
        "ratio",
    }
    assert all(needed | {"implementation", "own", "steps"} == row.keys() for row in found["rows"])
    assert len(found["trace_steps"]) == len(found["rows"][0]["steps"]) == found["trace"]["steps"] == 100
    assert found["rows"][0]["ratio"] == pytest.approx(4.04 / 9.05)
    assert found["rows"][2]["ratio"] is None


def test_goals_pass_and_fail() -> None:
    stall, graphs, ratio = made()["acceptance"]
    assert (stall["passed"], stall["given"]) == (False, "4000.50 ms")
    assert graphs["passed"] is True and "quire + graphs" in graphs["goal"]
    assert (ratio["passed"], ratio["given"]) == (False, "0.89 x fa3")
    assert made([RESULTS[1], result("fa3", 0.81)])["acceptance"][-1]["passed"] is True
    alone = acceptance([row for row in made()["rows"] if row["implementation"] == "quire"])
    assert (alone[-1]["passed"], alone[-1]["given"]) == (None, "no peer to compare with")
    # A wrong peer, however fast, sets no goal.
    assert made([RESULTS[1], RESULTS[3]])["acceptance"][-1]["passed"] is None


def test_text() -> None:
    head, lines = table(made())
    assert all(len(line) == len(head) for line in lines)
    assert lines[0][1:4] == ("quire", "9.050", "5.000")
    assert [line[2] for line in lines[3:]] == ["wrong", "failed"]
    assert title(made()).startswith("stream chat, seed 3: 100 steps") and "lengths x 0.03125" in title(made())
    text = "\n".join(notes(made()))
    for words in (
        "FAIL  quire: no step",
        "pass  quire + graphs",
        "peer: wrong result: no times",
        "flashinfer: RuntimeError: broken",
    ):
        assert words in text
    assert "not measured: vllm_unified (ImportError: no)" in text


def test_the_exit_status_is_that_of_the_results() -> None:
    assert verdict(made()) == 0, "neither goals nor peers change it"
    assert verdict(made([result("quire", 1.0, error=WRONG)])) == 1
    assert verdict(made([StreamResult("quire", note="RuntimeError: broken")])) == 1


def test_the_html_report_has_a_timeline() -> None:
    text = html_report(made())
    parsed = ParsedHtml(text)
    assert parsed.open == [] and not re.search(r"https?:|url\(|@import|<link|src=|<script", text)
    assert "A &lt;card&gt; &amp; co" in text and 'aria-label="Timeline"' in text
    lines = [str(attrs["points"]) for tag, attrs in parsed.seen if tag == "polyline"]
    assert len(lines) == 3, "the implementations that have times"
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        assert len(points) == 100 and all(64 <= x <= 990 and 0 <= y <= 330 for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    stalled = [float(point.split(",")[1]) for point in lines[-2].split()]
    assert stalled.index(min(stalled)) == 10, "the stall stands out"
    assert sum(tag == "rect" for tag, _ in parsed.seen) == 100, "a bar of tokens for each step"


def test_an_html_report_without_times() -> None:
    assert "<svg" not in html_report(made([StreamResult("quire", note="RuntimeError: broken")]))
