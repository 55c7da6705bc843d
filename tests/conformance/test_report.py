"""What a run says: statuses, known failures, JSON, JUnit, exit codes; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.cli import main
from quire.conformance import document
from quire.conformance.case import Case
from quire.conformance.faults import CATALOGUE
from quire.conformance.plant import planted
from quire.conformance.run import conform

CASES = [Case("a"), Case("b", window=(3, 0)), Case("c", seed=5)]


def test_a_run_names_one_fault_in_all_cases_that_show_it() -> None:
    report = conform(planted("window-ignored"), CASES)
    assert [result.status for result in report.results] == ["right", "wrong", "right"]
    (finding, cases), *rest = report.findings
    assert finding.fault == "window-ignored" and cases == ["b"] and not rest
    assert report.exit_code == 1
    said = json.loads(report.to_json())
    assert said["findings"][0]["fault"] == "window-ignored" and said["counts"]["wrong"] == 1


def test_a_known_failure_is_expected_and_must_fail() -> None:
    known = {"b": "upstream knows"}
    assert conform(planted("window-ignored"), CASES, known=known).exit_code == 0
    mended = conform(planted("causal-top-left"), [Case("b", q_lens=(5,), kv_lens=(5,))], known=known)
    assert [result.status for result in mended.results] == ["right"] and mended.exit_code == 1


def test_json_has_numbers_only() -> None:
    report = conform(planted("row-unwritten"), CASES[:1])
    assert report.results[0].error == float("inf")
    said = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert said["results"][0]["error"] is None and said["findings"][0]["fault"] == "row-unwritten"


def test_junit() -> None:
    root = ElementTree.fromstring(conform(planted("window-ignored"), CASES).to_junit())
    assert root.attrib["tests"] == "3" and root.attrib["failures"] == "1"
    (failure,) = root.iter("failure")
    assert failure.attrib["message"].startswith("window-ignored")


def test_the_page_of_faults_is_what_the_catalogue_prints() -> None:
    page = Path(__file__).parents[2] / "docs" / "faults.md"
    assert page.read_text() == document.render()
    assert all(f"### {fault.name}\n" in page.read_text() for fault in CATALOGUE)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["conform", "cpu", "--json", "--only", "^(mixed|edges)$", "--junit", str(tmp_path / "j.xml")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["counts"]["right"] == 2 and (tmp_path / "j.xml").exists()
    file = tmp_path / "mine.py"
    file.write_text("def f(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale):\n    out[:] = 0\n")
    assert main(["conform", f"{file}:f", "--case", "mixed kv_lens=5,6 q_lens=1,2"]) == 1
    said = capsys.readouterr().out
    assert "row-zero" in said and "verdict: WRONG" in said


def test_power_of_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--power", "--only", "^mixed$", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["errors"] == [] and "scale-doubled" in said["matrix"][0]["exposed"]


@pytest.mark.parametrize(
    "arguments", [[], ["cpu", "--only", "("], ["cpu", "--only", "nothing"], ["cpu", "--power"], ["no-such-target"]]
)
def test_bad_questions(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["conform", *arguments])
    assert stop.value.code == 2
