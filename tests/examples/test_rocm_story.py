"""examples/rocm_story: the batch, the failures, what each explanation can cause, and the faults with the same symptom."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.conformance.reporting.terminal import PlainPrinter
from support.once import once

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from rocm_story import __main__ as command
from rocm_story import results
from rocm_story.investigation import investigate
from rocm_story.mixed_operator import CallArguments, rocm_decode
from rocm_story.printing import print_investigation
from rocm_story.results import REPORTED, Investigation


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Investigation:
    """Once for all workers: many seconds, and some gigabytes."""
    raw = once(tmp_path_factory, "rocm_story", lambda: investigate().to_dict())
    return Investigation(
        batch=raw["batch"],
        failures=[results.Failure(**failure) for failure in raw["failures"]],
        hypotheses=[results.Hypothesis(**hypothesis) for hypothesis in raw["hypotheses"]],
        q_starts=raw["q_starts"],
        fill_tests=raw["fill_tests"],
        configurations=[results.Configuration(**configuration) for configuration in raw["configurations"]],
        fixes=[results.Fix(**{name: value for name, value in fix.items() if name != "cures"}) for fix in raw["fixes"]],
        missing_token=raw["missing_token"],
        kit=[results.KitResult(**{**one, "evidence": tuple(one["evidence"])}) for one in raw["kit"]],
        similar_faults=[results.SimilarFault(**{**one, "at": tuple(one["at"])}) for one in raw["similar_faults"]],
    )


def test_the_batch_is_the_tests(found: Investigation) -> None:
    assert found.batch["q_lens"] == [880, 410, 792, 927, 446, 57, 281, 1004, 539, 1]
    assert found.batch["contexts"] == [430, 956, 818, 865, 326, 1007, 504, 382, 613, 929]
    assert (found.batch["tokens"], found.batch["elements"], found.batch["decode_row"]) == (5337, 43_720_704, 5336)


def test_the_three_failures_come_in_order(found: Investigation) -> None:
    first, second, third = (failure.message for failure in found.failures)
    assert first == "RuntimeError: expected scalar type Int but found Long"
    assert second == "RuntimeError: Unsupported KV cache dtype: fp8_e5m2"
    assert "Mismatched elements: 8192 / 43720704 (0.0%)" in third
    assert "Greatest absolute difference: 1.685546875 at index (5336, 0, 0)" in third


def test_one_explanation_remains(found: Investigation) -> None:
    assert [(h.name, h.explains) for h in found.hypotheses] == [
        ("missing cache token", False),
        ("accuracy", False),
        ("boundary", False),
        ("index type", True),
    ]
    assert found.cause == "index type"


def test_the_others_are_too_small_by_orders_of_magnitude(found: Investigation) -> None:
    missing, accuracy, boundary, _ = (h.max_error for h in found.hypotheses)
    assert 1e-7 < missing < 2e-6  # one key of 930, each within 1e-3
    assert 0 < accuracy < 1e-5
    assert missing < boundary < 1e-4
    assert [h.mismatched for h in found.hypotheses] == [0, 0, 0, 8192]


def test_the_bytes_are_read_as_int32(found: Investigation) -> None:
    assert found.q_starts["dtype_after_cumsum"] == "int64"
    assert found.q_starts["lengths"] == [0, 880, -880, 1290, -1290, 2082, -2082, 3009, -3009, 3455]


def test_two_fill_values_confirm_it(found: Investigation) -> None:
    assert len({test["value"] for test in found.fill_tests}) == 2
    assert all(test["row_keeps_it"] and test["rest_unchanged"] for test in found.fill_tests)


def test_only_the_failing_configuration_gets_the_kernel(found: Investigation) -> None:
    assert [c.result for c in found.configurations] == ["FAIL", "PASS", "PASS", "PASS"]


@pytest.mark.parametrize(
    "source, cures, remaining",
    [
        ("001", False, 8192),
        ("002 option 1", False, 8192),
        ("002 option 2", False, 8192),
        ("002 option 3", False, None),
        ("003", False, 8192),
        ("004 option 1", False, 8192),
        ("004 option 2", True, 0),
        ("004 option 3", True, 0),
        ("vLLM pull request 28905", True, 0),
    ],
)
def test_what_a_fix_does(found: Investigation, source: str, cures: bool, remaining: int | None) -> None:
    (fix,) = (fix for fix in found.fixes if fix.source == source)
    assert (fix.cures, fix.mismatched) == (cures, remaining)
    assert fix.effect and fix.limitation


def test_the_token_belongs_in_the_cache(found: Investigation) -> None:
    token = found.missing_token
    assert token["test_values_without_token"] < token["tolerance"] < 1 < token["ordinary_values_without_token"]
    assert token["prefill_same_bits_with_new_tokens_in_cache"]


def test_three_faults_with_one_symptom_are_distinguished(found: Investigation) -> None:
    assert [one.mismatched for one in found.similar_faults] == [REPORTED["mismatched"]] * 3
    assert [one.at[0] for one in found.similar_faults] == [REPORTED["at"][0]] * 3
    assert [one.identified for one in found.similar_faults] == [one.fault for one in found.similar_faults]
    assert len({one.identified for one in found.similar_faults}) == 3


def test_the_kit_distinguishes_them(found: Investigation) -> None:
    assert [one.identified for one in found.kit] == [one.expected for one in found.kit]
    assert len({one.identified for one in found.kit}) == 3


def test_a_wrong_result_is_not_reproduced(found: Investigation) -> None:
    assert found.reproduced
    assert not replace(found, similar_faults=[replace(found.similar_faults[0], identified="unknown")]).reproduced
    assert not replace(found, hypotheses=[replace(h, explains=True) for h in found.hypotheses]).reproduced
    assert not replace(found, kit=[replace(found.kit[0], identified="another")]).reproduced
    assert not replace(found, fill_tests=[{**found.fill_tests[0], "row_keeps_it": False}]).reproduced


def test_the_data_of_the_documentation_is_current(found: Investigation) -> None:
    """tools/figures draws from this file, which `python examples/rocm_story --json` wrote."""
    drawn = json.loads((Path(__file__).parents[2] / "docs" / "data" / "rocm_story.json").read_text())
    assert {**drawn["reported"], "at": tuple(drawn["reported"]["at"])} == REPORTED
    assert (drawn["batch"], drawn["q_starts"], drawn["cause"]) == (found.batch, found.q_starts, found.cause)
    for was, now in zip(drawn["hypotheses"], found.hypotheses, strict=True):
        assert was["name"] == now.name
        assert was["max_error"] == (now.max_error and pytest.approx(now.max_error, rel=0.05))


def test_text(found: Investigation, capsys: pytest.CaptureFixture[str]) -> None:
    print_investigation(found, PlainPrinter())
    text = capsys.readouterr().out
    messages = (failure.message.splitlines()[0] for failure in found.failures)
    for line in (*messages, "cause: index type", "3455", "times too small", "004 option 2"):
        assert line in text
    assert max(map(len, text.splitlines())) <= 112


def test_json(found: Investigation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "investigate", lambda progress: found)
    assert command.main(["--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["example"], answer["cause"], answer["reproduced"]) == ("rocm_story", "index type", True)
    assert (answer["schema"], answer["command"], answer["interrupted"]) == (1, "example", False)
    monkeypatch.setattr(command, "investigate", lambda progress: replace(found, hypotheses=[]))
    assert command.main(["--json"]) == 1


# As int64, only the second sequence seems to have a single new token, from 0 to 1.
@pytest.mark.parametrize("starts, written", [(torch.int32, list(range(10))), (torch.int64, [0])], ids=["int32", "int64"])
def test_the_stand_in_reads_int32(starts: torch.dtype, written: list[int]) -> None:
    q = torch.ones(10, 64, 128, dtype=torch.float16)
    pages = torch.ones(4, 32, 64, 128, dtype=torch.float16)
    out = torch.full_like(q, 7.0)
    table, lens = torch.zeros(10, 1, dtype=torch.int32), torch.full((10,), 5, dtype=torch.int32)
    rocm_decode(out, q, pages, pages, table, lens, torch.arange(11, dtype=starts), CallArguments())
    assert [row for row in range(10) if bool((out[row] != 7).any())] == written
