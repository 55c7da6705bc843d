"""The story of the seeds: the batch, the failures, what each explanation can and cannot do, and the faults that look the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from quire.cli import main
from quire.conformance import story as told
from quire.conformance.paper import Plain
from quire.conformance.seeds import DECODE, Call, rocm_decode
from quire.conformance.story import REPORTED, Story
from quire.conformance.telling import tell
from support.once import once


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Once for all workers: many seconds, and some gigabytes."""
    raw = once(tmp_path_factory, "story", lambda: told.seeds().to_dict())
    return Story(
        batch=raw["batch"],
        failures=[told.Failure(**failure) for failure in raw["failures"]],
        hypotheses=[told.Hypothesis(**hypothesis) for hypothesis in raw["hypotheses"]],
        read_as=raw["read_as"],
        poisons=raw["poisons"],
        configs=[told.Config(**config) for config in raw["configs"]],
        fixes=[told.Fix(**{name: value for name, value in fix.items() if name != "cures"}) for fix in raw["fixes"]],
        after=raw["after"],
        kit=[told.Named(**{**one, "evidence": tuple(one["evidence"])}) for one in raw["kit"]],
        lookalikes=[told.Lookalike(**{**like, "at": tuple(like["at"])}) for like in raw["lookalikes"]],
    )


def test_the_batch_is_theirs(story: Story) -> None:
    assert story.batch["q_lens"] == [880, 410, 792, 927, 446, 57, 281, 1004, 539, 1]
    assert story.batch["contexts"] == [430, 956, 818, 865, 326, 1007, 504, 382, 613, 929]
    assert (story.batch["tokens"], story.batch["elements"], story.batch["decode_row"]) == (5337, 43_720_704, 5336)


def test_the_three_failures_come_in_order(story: Story) -> None:
    first, second, third = (failure.message for failure in story.failures)
    assert first == "RuntimeError: expected scalar type Int but found Long"
    assert second == "RuntimeError: Unsupported KV cache dtype: fp8_e5m2"
    assert "Mismatched elements: 8192 / 43720704 (0.0%)" in third
    assert "Greatest absolute difference: 1.685546875 at index (5336, 0, 0)" in third


def test_one_explanation_is_left(story: Story) -> None:
    assert [(h.name, h.explains) for h in story.hypotheses] == [
        ("missing cache token", False),
        ("accuracy", False),
        ("boundary", False),
        ("index type", True),
    ]
    assert story.cause == "index type"


def test_the_others_are_too_small_by_orders(story: Story) -> None:
    missing, accuracy, boundary, _ = (h.predicts for h in story.hypotheses)
    assert 1e-7 < missing < 2e-6  # one key of 930, each within 1e-3
    assert 0 < accuracy < 1e-5
    assert missing < boundary < 1e-4
    assert [h.mismatched for h in story.hypotheses] == [0, 0, 0, 8192]


def test_the_bytes_are_read_as_they_lie(story: Story) -> None:
    assert story.read_as["dtype_after_cumsum"] == "int64"
    assert story.read_as["lengths"] == [0, 880, -880, 1290, -1290, 2082, -2082, 3009, -3009, 3455]


def test_two_poisons_confirm_it(story: Story) -> None:
    assert len({poison["poison"] for poison in story.poisons}) == 2
    assert all(poison["row_holds_it"] and poison["rest_unchanged"] for poison in story.poisons)


def test_only_their_configuration_gets_the_kernel(story: Story) -> None:
    assert [c.result for c in story.configs] == ["FAIL", "PASS", "PASS", "PASS"]


@pytest.mark.parametrize(
    "document, cures, left",
    [
        ("001", False, 8192),
        ("002 option 1", False, 8192),
        ("002 option 2", False, 8192),
        ("002 option 3", False, None),
        ("003", False, 8192),
        ("004 option 1", False, 8192),
        ("004 option 2", True, 0),
        ("004 option 3", True, 0),
        ("upstream (#28905)", True, 0),
    ],
)
def test_what_a_fix_would_have_done(story: Story, document: str, cures: bool, left: int | None) -> None:
    (fix,) = (fix for fix in story.fixes if fix.document == document)
    assert (fix.cures, fix.mismatched) == (cures, left)
    assert fix.would and fix.would_not


def test_the_contract_is_right_all_the_same(story: Story) -> None:
    after = story.after
    assert after["test_data_without_token"] < after["tolerance"] < 1 < after["ordinary_data_without_token"]
    assert after["prefill_same_bits_with_new_tokens_in_cache"]


def test_three_faults_of_one_count_are_told_apart(story: Story) -> None:
    assert [like.mismatched for like in story.lookalikes] == [REPORTED["mismatched"]] * 3
    assert [like.at[0] for like in story.lookalikes] == [REPORTED["at"][0]] * 3
    assert [like.named for like in story.lookalikes] == [like.fault for like in story.lookalikes]
    assert len({like.named for like in story.lookalikes}) == 3


def test_the_kit_tells_them_apart_by_itself(story: Story) -> None:
    assert [one.named for one in story.kit] == ["q-starts-int64-as-int32", "row-unwritten", "nothing"]
    assert any("indices in int32: not q-starts-int64-as-int32" in line for line in story.kit[1].evidence)


def test_it_holds_and_says_when_it_does_not(story: Story) -> None:
    assert story.holds
    assert not replace(story, lookalikes=[replace(story.lookalikes[0], named="unknown")]).holds
    assert not replace(story, hypotheses=[replace(h, explains=True) for h in story.hypotheses]).holds
    assert not replace(story, kit=[replace(story.kit[0], named="row-unwritten")]).holds
    assert not replace(story, poisons=[{**story.poisons[0], "row_holds_it": False}]).holds


def test_a_person_reads_it(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    tell(story, Plain())
    text = capsys.readouterr().out
    for line in (
        *(f.message.splitlines()[0] for f in story.failures),
        "cause: index type",
        "3455",
        "times too small",
        "004 option 2",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 112


def test_a_program_reads_it(story: Story, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(told, "seeds", lambda progress: story)
    assert main(["diagnose", "--story", "seeds", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["story"], answer["cause"], answer["holds"]) == ("seeds", "index type", True)
    monkeypatch.setattr(told, "seeds", lambda progress: replace(story, hypotheses=[]))
    assert main(["diagnose", "--story", "seeds", "--json"]) == 1


# Of int64 only the second row looks like one of a single token, from 0 to 1.
@pytest.mark.parametrize("starts, written", [(torch.int32, list(range(10))), (torch.int64, [0])], ids=["int32", "int64"])
def test_the_stand_in_reads_int32(starts: torch.dtype, written: list[int]) -> None:
    q = torch.ones(DECODE + 1, 64, 128, dtype=torch.float16)
    pages = torch.ones(4, 32, 64, 128, dtype=torch.float16)
    out = torch.full_like(q, 7.0)
    table, lens = torch.zeros(10, 1, dtype=torch.int32), torch.full((10,), 5, dtype=torch.int32)
    rocm_decode(out, q, pages, pages, table, lens, torch.arange(11, dtype=starts), Call())
    assert [row for row in range(10) if bool((out[row] != 7).any())] == written
