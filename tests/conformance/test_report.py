"""The report of a run: statuses, known failures, JSON, JUnit, exit codes; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.cli import main
from quire.cli.conform import _summary
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.faults import CATALOGUE
from quire.conformance.faults.injected import injected
from quire.conformance.reporting import fault_document as document
from quire.conformance.reporting import findings
from quire.conformance.reporting.html_report import html_report
from quire.conformance.reporting.report import Finding, Result, brief
from quire.conformance.runner.run import conform, consistent
from quire.conformance.runner.target import Target

CASES = [Case("a"), Case("b", window=(3, 0)), Case("c", seed=5)]


def test_a_run_names_one_fault_in_all_cases_that_show_it() -> None:
    report = conform(injected("window-ignored"), CASES)
    assert [result.status for result in report.results] == ["correct", "wrong", "correct"]
    (finding, cases), *rest = report.findings
    assert finding.fault == "window-ignored" and cases == ["b"] and not rest
    assert report.exit_code == 1
    said = json.loads(report.to_json())
    assert said["findings"][0]["fault"] == "window-ignored" and said["counts"]["wrong"] == 1


def test_a_known_failure_is_expected_and_must_fail() -> None:
    known = {"b": "upstream knows"}
    assert conform(injected("window-ignored"), CASES, known=known).exit_code == 0
    passing = conform(injected("causal-top-left"), [Case("b", q_lens=(5,), kv_lens=(5,))], known=known)
    assert [result.status for result in passing.results] == ["correct"] and passing.exit_code == 1


def test_json_has_numbers_only() -> None:
    report = conform(injected("row-unwritten"), CASES[:1])
    assert report.results[0].error == float("inf")
    said = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert said["results"][0]["error"] is None and "keep the previous content of the memory" in said["findings"][0]["symptom"]


def test_junit() -> None:
    root = ElementTree.fromstring(conform(injected("window-ignored"), CASES).to_junit())
    assert root.attrib["tests"] == "3" and root.attrib["failures"] == "1"
    (failure,) = root.iter("failure")
    assert failure.attrib["message"].startswith("window-ignored")
    known = ElementTree.fromstring(conform(injected("window-ignored"), CASES, known={"b": "upstream knows"}).to_junit())
    assert known.attrib["failures"] == "0" and known.attrib["skipped"] == "1"
    (skipped,) = known.iter("skipped")
    assert skipped.attrib["message"].startswith("known (upstream knows): window-ignored")
    statuses = [one.attrib["value"] for one in root.iter("property") if one.attrib["name"] == "status"]
    assert statuses == ["correct", "wrong", "correct"]


def test_the_document_of_faults_is_what_the_catalogue_prints() -> None:
    printed = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    assert printed == document.render()
    assert all(f"### {fault.name}\n" in printed for fault in CATALOGUE)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["conform", "cpu", "--json", "--only", "^(mixed|edges)$", "--junit", str(tmp_path / "j.xml")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["counts"]["correct"] == 2 and (tmp_path / "j.xml").exists()
    file = tmp_path / "mine.py"
    file.write_text("def f(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale):\n    out[:] = 0\n")
    assert main(["conform", f"{file}:f", "--case", "mixed kv_lens=5,6 q_lens=1,2"]) == 1
    said = capsys.readouterr().out
    assert "symptom: every element of the output is zero" in said and "verdict: WRONG" in said


def test_the_table_skips_files_without_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = conform(injected("window-ignored"), CASES).to_json()
    for name, text in {"whole": whole, "empty": "", "cut": whole[: len(whole) // 2], "other": '{"a": 1}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    paths = [str(tmp_path / f"{name}.json") for name in ("empty", "whole", "cut", "missing", "other")]
    assert findings.main(paths) == 1
    said = capsys.readouterr()
    assert "window-ignored" in said.out and "2 / 1 / 0 / 0" in said.out
    assert [line.split(":")[0] for line in said.err.split()[::1] if line.endswith(".json:")] == [paths[n] for n in (0, 2, 3, 4)]
    assert findings.main(paths[1:2]) == 0 and not capsys.readouterr().err


def test_the_table_lists_unnamed_findings_case_by_case() -> None:
    finding = {"fault": "unknown", "summary": "s", "parameters": {}, "reproduce": "r"}
    results = [{"name": f"case {n}", "findings": [{**finding, "summary": f"summary {n}"}]} for n in range(3)]
    counts = {"correct": 0, "refused": 0, "wrong": 3, "raised": 0, "skipped": 0}
    report = {"target": "t", "device": "cpu", "versions": {}, "counts": counts, "results": results}
    said = findings.table([{**report, "findings": [{**finding, "cases": ["case 0", "case 1", "case 2"]}]}], "today")
    assert all(f"summary {n} | 1: case {n}" in said for n in range(3))


def test_errors_with_other_messages_are_other_findings() -> None:
    def run(call: KernelCall) -> None:
        raise RuntimeError(f"no {'window' if call.window[0] else 'plain call'}")

    found = [(finding.summary.split(" (at")[0], cases) for finding, cases in conform(Target("refuses", run), CASES).findings]
    assert found == [("RuntimeError: no plain call", ["a", "c"]), ("RuntimeError: no window", ["b"])]


def test_power_of_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--power", "--only", "^mixed$", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["errors"] == [] and "scale-doubled" in said["matrix"][0]["exposed"]


@pytest.mark.parametrize(
    "arguments", [[], ["cpu", "--only", "("], ["cpu", "--only", "nothing"], ["cpu", "--power"], ["no-such-target"]]
)
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["conform", *arguments])
    assert stop.value.code == 2


def test_a_summary_lists_the_parameters_of_a_fault() -> None:
    def run(call: KernelCall) -> None:
        injected("query-off-by-one", {"by": 1 if call.window[0] else -1}).run(call)

    report = conform(Target("shifts", run), CASES)
    ((finding, cases),) = report.findings
    assert finding.fault == "query-off-by-one" and cases == ["a", "b", "c"]
    assert report.ways(finding) == [("by=-1", ["a", "c"]), ("by=1", ["b"])]
    said = _summary(report)
    assert "query-off-by-one, in all 3 cases that were run\n" in said and "by=-1: a, c" in said and "by=1: b" in said
    table = findings.table([json.loads(report.to_json())], "today")
    assert "by=-1 in 2; by=1 in 1" in table
    assert "; other cases show it with other parameters" in html_report(report)


def test_a_known_failure_without_a_case_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("cpu misspelt why\ncpu window-needle not run today\nother gone why\n")
    asked = ["conform", "cpu", "--only", "^mixed$", "--known", str(known)]
    assert main(asked) == 0
    assert "known failures that no case is named after: misspelt\n" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["known_without_case"] == ["misspelt"]


def test_an_equivalent_fault_that_other_cases_report_becomes_the_name() -> None:
    def result(name: str, fault: str, *equivalent: str) -> Result:
        return Result(Case(name), "wrong", findings=(Finding(fault, equivalent, {"by": 1, "only": "rows"}, summary="first"),))

    both = ("window-ignored", "causal-ignored")
    kept = consistent([result("a", *both[:1], *both), result("b", *both[1:], *both[1:]), result("c", *both[1:], *both[1:])])
    renamed = kept[0].findings[0]
    assert (renamed.fault, renamed.parameters) == ("causal-ignored", {"only": "rows"}) and "see later keys" in renamed.summary


def test_numbers_in_a_line_are_brief() -> None:
    assert brief({"factors": [0.999997, 2.000022], "factor": 1.4999998}) == "factors=[1, 2], factor=1.5"
