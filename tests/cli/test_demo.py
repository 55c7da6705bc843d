"""`quire demo`: the verdict of a correct run, and of a wrong one with the place and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quire.cli import demo, main
from quire.contract.rule import Violation
from quire.demo.injected_faults import INJECTED_FAULTS
from quire.demo.report import DemoReport
from quire.demo.verification import Comparison, Verification
from support.kernels import levels

FEW = ("--requests", "4")
BEST = "native" if levels() else "torch"


@pytest.fixture(scope="module")
def report() -> DemoReport:
    """The run that `quire demo` makes."""
    with demo.one_thread():
        return demo.demonstrate(10, 0)


def test_the_run_is_correct(report: DemoReport) -> None:
    assert report.correct
    assert str(report).splitlines()[-1] == "verdict: correct"
    assert "WRONG" not in str(report)


def test_the_run_has_forks_copies_and_waits(report: DemoReport) -> None:
    engine = report.engine
    assert engine.forks >= 10 and engine.copies >= 10 and engine.waits >= 1
    assert engine.high_water == engine.pool.pages
    events = " ".join(event.text for event in engine.events)
    for words in ("the prefix is computed", "forks the prefix", "is shared: copied to", "out of pages", "is done"):
        assert words in events


def test_every_output_and_token_is_compared(report: DemoReport) -> None:
    numbers = sum(record.out.numel() for record in report.engine.records)
    assert report.outputs.compared == numbers > 1_000_000
    assert report.tokens.compared == sum(request.wanted for request in report.engine.requests)


BAD = Verification(1, Comparison(1, 2.0, 1.0), "here")


@pytest.mark.parametrize(
    "changed",
    [{"outputs": BAD}, {"tokens": BAD}, {"violations": (Violation("table", "page_table[0, 0]", "9", "a page id in [0, 4)"),)}],
    ids=lambda changed: next(iter(changed)),
)
def test_each_check_can_fail(report: DemoReport, changed: dict[str, Any]) -> None:
    assert not replace(report, **changed).correct
    assert str(replace(report, **changed)).count("WRONG") == 2


@pytest.mark.parametrize("left", ["a page is held", "a request is not done"])
def test_a_held_page_or_unfinished_request_is_wrong(report: DemoReport, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if left == "a page is held":
        monkeypatch.setattr(report.engine.pool._free, "count", report.engine.pool._free.count - 1)
    else:
        monkeypatch.setattr(report.engine.requests[3], "state", "decode")
    assert not report.correct


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *FEW]) == 0
    out = capsys.readouterr().out
    assert "step   2  request 0 forks the prefix" in out
    assert "step  10  0 waiting, 0 prefill, 2 decode, 0 done;" in out
    assert f"kernel of all layers: {BEST}, because it is the first whose limits all hold" in out
    assert out.endswith("verdict: correct\n")


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *FEW, "--quiet", "--seed", "5"]) == 0
    assert capsys.readouterr().out == "verdict: correct\n"


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = main(["demo", "--json", *args])
    return code, json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, *FEW)
    assert (code, answer["verdict"], answer["violations"], answer["injected"]) == (0, "correct", [], None)
    assert answer["steps"] > 20 and answer["tokens"] > answer["tokens_made"] > 100 and answer["tokens_per_second"] > 0
    assert 0 < answer["max_error"] < answer["budget"] < 1e-3
    assert [proof["holds"] for proof in answer["proofs"].values()] == [True, True]
    assert [(kernel["layer"], kernel["kernel"], kernel["calls"]) for kernel in answer["kernels"]] == [
        (layer, BEST, answer["steps"]) for layer in range(4)
    ]
    assert answer["pages"]["held_at_end"] == 0 < answer["pages"]["high_water"] <= answer["pages"]["pool"]
    assert (answer["forks"], answer["copies"], answer["waits"]) == (4, 4, 0)


SEEN = {
    "drop-token": ("[residency] cache", "never written", "page_table[2]", "^^^^  position 107: offset 11"),
    "stale-page": (
        "[residency] cache",
        "stale: freed after it was written",
        "^^^  position 16: offset 0",
        "and 15 more violations of this call",
    ),
    "swap-heads": ("[output] step 12, layer 3", "largest error by head", "^^^^^^^^^  dim"),
}


@pytest.mark.parametrize("fault", INJECTED_FAULTS)
def test_an_injected_fault_is_detected(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *FEW, "--quiet", "--inject", fault]) == 1
    out = capsys.readouterr().out
    for words in SEEN[fault]:
        assert words in out
    assert out.endswith("verdict: WRONG\n")


def test_the_earlier_name_of_inject(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, *FEW, "--plant", "drop-token")[1]["injected"]
    assert main(["demo", "--help"]) == 0
    assert "--plant" not in capsys.readouterr().out


def test_a_violation_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, *FEW, "--inject", "drop-token")
    assert (code, answer["verdict"]) == (1, "wrong")
    assert answer["injected"] == "one token is never written, in step 12, layer 2"
    assert [(v["rule"], v["seq"], v["token"], v["page"], v["slot"]) for v in answer["violations"]] == [
        ("residency", 2, 107, 14, 235)
    ]
    assert [proof["holds"] for proof in answer["proofs"].values()] == [True, True]  # everything before it was correct


def test_a_wrong_number_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, *FEW, "--inject", "swap-heads")
    assert (code, answer["verdict"], answer["violations"]) == (1, "wrong", [])
    assert answer["max_error"] > 100 * answer["budget"]
    assert [proof["holds"] for proof in answer["proofs"].values()] == [False, False]


@pytest.mark.parametrize(
    "args, message",
    [
        (("--requests", "0"), "--requests: given 0; allowed: a whole number, 1 to 64"),
        (("--seed", "-1"), "--seed: given -1; allowed: a whole number, 0 to"),
        (("--inject", "nothing"), "--inject: given 'nothing'; allowed: drop-token"),
        (("--inject", "stale-page", "--requests", "1", "--quiet"), "--inject: given stale-page; allowed: with more --requests"),
    ],
)
def test_bad_arguments(args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *args])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_thread_count_is_restored() -> None:
    import torch

    before = torch.get_num_threads()
    with pytest.raises(KeyError), demo.one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
