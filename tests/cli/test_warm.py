"""`quire warm` as people and programs call it. What it would compile is noted, not compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from quire.cli import main, warm
from quire.prepare import Prepared
from quire.problem import Problem


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `quire warm`: what is given to `prepare`, layer by layer, and the answer for programs."""
    given: list[tuple[Problem, dict[str, Any]]] = []

    def prepare(problem: Problem, **how: Any) -> Prepared:
        given.append((problem, how))
        return Prepared(("a", "b"), 1.0, 0)

    monkeypatch.setattr(warm, "prepare", prepare)

    def run(flags: str, code: int = 0) -> tuple[list[tuple[Problem, dict[str, Any]]], Any]:
        given.clear()
        assert main(["warm", *flags.split(), "--json"]) == code
        return list(given), json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    "flags, fields",
    [
        ("", {"prefixes": False, "select": "none", "spans": "none"}),
        ("--prefixes", {"prefixes": True}),
        ("--select positions", {"select": "positions"}),
        ("--spans", {"spans": "int32"}),
    ],
)
def test_what_batches_have(asked, flags: str, fields: dict[str, Any]) -> None:
    [(problem, how)], found = asked(f"--arch h100 {flags}")
    assert {name: getattr(problem, name) for name in fields} == fields and how["rope"] is None
    assert found["problem"] == json.loads(problem.to_json()) and (found["rope"], found["compiled"]) == (None, 2)


def test_writes_that_rotate(asked) -> None:
    [(_, how)], found = asked("--arch h100 --rope 64 --qk-norm bf16")
    traits = how["rope"].traits(True)
    assert (traits.rotary_dim, traits.interleaved, traits.q_norm, traits.k_norm) == (64, False, "bf16", "bf16")
    assert found["rope"]["rotary_dim"] == 64


def test_the_layers_of_a_model(asked, capsys: pytest.CaptureFixture[str]) -> None:
    given, found = asked("--arch h100 --like gemma-4 --kv-dtype fp8 --prefixes")
    assert [(one.head_dim, one.window[0], one.prefixes) for one, _ in given] == [
        (256, 1023, True),
        (512, None, True),
    ]
    assert found["like"] == "gemma-4-31b" and [kind["layers"] for kind in found["kinds"]] == [50, 10]
    with pytest.raises(SystemExit):
        asked("--arch h100 --like gemma-4 --head-dim 64")
    assert "--head-dim: given 64 with --like gemma-4; allowed: nothing" in capsys.readouterr().err


def test_help_shows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--prefixes", "--select", "--spans", "--rope", "--qk-norm", "--like"))


def test_an_interrupt_ends_after_the_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(problem: Problem, *, progress: Any, **how: Any) -> Prepared:
        progress(0, 9)
        raise KeyboardInterrupt

    monkeypatch.setattr(warm, "prepare", prepare)
    assert main(["warm", "--arch", "h100", "--like", "gemma-4", "--json"]) == 130
    (kind,) = json.loads(capsys.readouterr().out)["kinds"]
    assert (kind["interrupted"], kind["compiled"], kind["total"]) == (True, 0, 9)
