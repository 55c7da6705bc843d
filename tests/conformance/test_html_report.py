"""The HTML report of a run: everything is in it, nothing is fetched, and a browser runs it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from quire.conformance.cases.case import Case
from quire.conformance.reporting.error_map import color, png
from quire.conformance.reporting.html_report import html_report
from quire.conformance.reporting.report import Finding, Picture, Report, Result, Where
from support.parsed_html import ParsedHtml

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def report() -> Report:
    """A window off by one in a mixed batch, an unknown fault, a correct case and a skipped one."""
    case = Case("window <edge>", q_lens=(1, 5), kv_lens=(37, 40), window=(7, 0))
    ratio = [[0.4, 0.2]] + [[0.5, 3e4]] * 3 + [[-1.0, -1.0], [0.1, 1e9]]
    picture = Picture(ratio, [0, 1, 6], [37, 40], [[4, 9, 2, 7], [1, 0, 3, 7]], 16, bad_cell=(1, 2))
    finding = Finding(
        "window-left-off",
        ("window-left-off", "token-missing-at-distance"),
        {"by": -1},
        0.4,
        889.0,
        Where(1, 3, 37, 1, 39, 32, 3, 0),
        "one key too few at the left edge",
        str(case),
        ("wrong too with <decoys>",),
        (("window-left-off", 0.4), ("not-normalised", 889.0), ("never", float("inf"))),
        contrast="only with a window <of> 8 keys",
        expected=0.25,
        actual=-1.5,
        picture="query 36  ....####\nquery 37  .....###",
    )
    unknown = Finding("unknown", ("unknown",), summary="unexplained", where=Where(0, 0), symptom="rows of the output are zero")
    return Report(
        "kernel.py:attention",
        "standard",
        "cpu",
        [
            Result(Case("plain"), "correct", error=0.4),
            Result(case, "wrong", error=3e4, wrong=5, findings=(finding,), picture=picture),
            Result(Case("softcap", softcap=5.0), "wrong", error=9.0, wrong=1, findings=(unknown,), known="it is being mended"),
            Result(Case("sinks", sinks=True), "skipped", "no argument for sinks"),
        ],
        1.5,
        {"quire": "0.1.0"},
        contrast="every failing case has a window",
    )


@pytest.fixture
def html() -> str:
    return html_report(report())


def test_report_has_findings_places_and_reasons(html: str) -> None:
    for words in (
        "Wrong in 2 of 3 cases, 1 of them known. Found: window-left-off, symptom: rows of the output are zero.",
        "one key too few at the left edge",
        "sequence 1, row 3, position 37, head 1, dim 39, key 32, page 3, offset 0",
        "Indistinguishable in this case: token-missing-at-distance.",
        "largest error that rounding explains",
        "quire conform kernel.py:attention --case &#39;window &lt;edge&gt; q_lens=1,5 kv_lens=37,40 window=7,0&#39;",
        "wrong too with &lt;decoys&gt;",
        "it is being mended",
        "no argument for sinks",
        "<h3>symptom: rows of the output are zero</h3>",
        '<p class="contrast">only with a window &lt;of&gt; 8 keys</p>',
        "<b>0.25</b>",
        "<b>-1.5</b>",
        "query 36  ....####\nquery 37  .....###",
        "every failing case has a window",
    ):
        assert words in html, words


def test_only_the_faulty_cell_is_marked(html: str) -> None:
    assert re.findall(r'<td class="bad">(-?\d+)</td>', html) == ["3"]
    # 37 and 40 tokens in pages of 16 need three cells each.
    assert re.findall(r'<td class="free">(-?\d+)</td>', html) == ["7", "7"]


def test_the_best_prediction_comes_first_and_is_marked(html: str) -> None:
    assert re.findall(r'<div class="bar (\w*)"><span title="([\w-]+)">', html) == [
        ("match", "window-left-off"),
        ("", "not-normalised"),
        ("", "never"),
    ]


def test_the_map_is_of_a_case_with_correct_and_wrong_elements_and_about_32_tokens() -> None:
    whole = report()
    (case,) = (result for result in whole.results if result.picture)
    one = replace(case, case=case.case.replace(name="one"), picture=replace(case.picture, ratio=[[9.0, 9.0]], q_starts=[0, 1, 1]))
    many = replace(case, case=case.case.replace(name="many"), picture=replace(case.picture, ratio=case.picture.ratio * 5))
    drawn = html_report(replace(whole, results=[one, case, many]))
    assert re.findall(r"Error map of (\S+)", drawn) == ["many:"]


def test_a_map_is_shown_only_with_the_finding_that_its_run_produced() -> None:
    """The second finding of a case comes from another run than its map: it gets no map, rather than that of the first."""
    whole = report()
    (case,) = (result for result in whole.results if result.picture)
    second = Finding("changes-inputs", ("changes-inputs",), summary="inputs have changed")
    html = html_report(replace(whole, results=[replace(case, findings=(*case.findings, second))]))
    first_card, second_card = re.findall(r'<section class="card.*?</section>', html, re.DOTALL)
    assert "window-left-off" in first_card and "Error map" in first_card
    assert "changes-inputs" in second_card and "Error map" not in second_card


def test_a_correct_output_has_no_error_map() -> None:
    """Where the LSE alone is wrong."""
    whole = report()
    (case,) = (result for result in whole.results if result.picture)
    right = replace(case, picture=replace(case.picture, ratio=[[0.5, 0.1]] * 6))
    assert "Error map" not in html_report(replace(whole, results=[right]))


def test_the_html_is_well_formed(html: str) -> None:
    assert ParsedHtml(html).open == []


def test_nothing_is_fetched(html: str) -> None:
    assert [link[:22] for link in re.findall(r'(?:src|href)="([^"]*)"', html)] == ["data:image/png;base64,"]
    assert "http" not in html and "url(" not in html and "@import" not in html


def test_a_correct_run_has_no_findings() -> None:
    correct = Report("cpu", "smoke", "cpu", [Result(Case("plain"), "correct", error=0.4)])
    assert "Correct in all 1 cases that were run." in html_report(correct) and "What is wrong" not in html_report(correct)


def test_pixels_are_where_they_belong() -> None:
    data = png([[(1, 2, 3, 4), (5, 6, 7, 8)], [(9, 9, 9, 9), (0, 0, 0, 0)]])
    assert struct.unpack(">II", data[16:24]) == (2, 2)
    start = data.index(b"IDAT") + 4
    size = struct.unpack(">I", data[start - 8 : start - 4])[0]
    assert zlib.decompress(data[start : start + size]) == b"\0\1\2\3\4\5\6\7\x08" + b"\0\x09\x09\x09\x09\0\0\0\0"


def test_colors_grow_with_the_error() -> None:
    assert len({color(off) for off in (-1.0, 0.5, 2.0, 1e3, 1e9)}) == 5
    assert color(0.0) == color(1.0) and color(1e12) == color(float("inf"))
    assert [color(off)[1] for off in (1.1, 1e2, 1e4, 1e8)] == sorted((color(off)[1] for off in (1.1, 1e2, 1e4, 1e8)), reverse=True)


POINT = """
<script>
  const box = document.querySelector('.frame').getBoundingClientRect();
  const at = {clientX: box.left + box.width * 3.5 / 6, clientY: box.top + box.height * 1.5 / 2, bubbles: true};
  document.querySelector('.frame').dispatchEvent(new MouseEvent('mousemove', at));
  const image = document.querySelector('.frame img');
  image.decode().then(() => { document.title = [image.naturalWidth, image.naturalHeight].join(' x '); });
</script>
"""


def test_a_browser_runs_it(html: str, tmp_path: Path) -> None:
    if BROWSER is None:
        pytest.skip("no Chromium here")
    file = tmp_path / "report.html"
    file.write_text(html.replace("</body>", POINT + "</body>"))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        "--enable-logging=stderr",
        "--v=0",
    ]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"CONSOLE.*(?:Error|Uncaught)", done.stderr), done.stderr
    assert 'data-ready="6"' in done.stdout  # the map's script has run over all its tokens
    assert "row 3, sequence 1, position 37, head 1: 3.00e+4 error budgets" in done.stdout
    assert "<title>6 x 2</title>" in done.stdout
