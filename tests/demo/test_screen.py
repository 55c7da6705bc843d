"""The demo's screen: lines that print every event once, and the live table."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import quire
from quire.demo import requests
from quire.demo.engine import DemoEngine
from quire.demo.model import DemoModel
from quire.demo.screen import Lines, _picture, screen

FASTEST = "native" if (Path(quire.__file__).parent / "kernels/native/libquire.so").exists() else "torch"
"""The kernel that CPUs get: the native one where there was a compiler."""


@pytest.fixture
def started() -> DemoEngine:
    """An engine after twelve steps: the prefix held, two requests decoding."""
    engine = DemoEngine(DemoModel.make(0), *requests.make(4, 0), 40)
    steps = engine.run()
    for _ in range(12):
        next(steps)
    return engine


def test_lines_print_every_event_once(started: DemoEngine, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(every=12)
    lines.show(started)
    lines.show(started)
    out = capsys.readouterr().out
    for event in started.events:
        assert out.count(f"step {event.step:3}  {event.text}\n") == 1
    assert "step  12  0 waiting, 0 prefill, 2 decode, 0 done; 12 of 40 pages held" in out


@pytest.mark.parametrize("quiet, shown", [(True, False), (False, True)])
def test_quiet_prints_nothing(quiet: bool, shown: bool, started: DemoEngine, capsys: pytest.CaptureFixture[str]) -> None:
    with screen(quiet) as show:
        show(started)
    assert bool(capsys.readouterr().out) == shown


def test_a_terminal_gets_the_table(
    started: DemoEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with screen(quiet=False) as show:
        show(started)
    out = capsys.readouterr().out
    assert "request" in out and "held" in out and "█" in out


def test_lines_without_rich(started: DemoEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("quire.demo.screen.find_spec", lambda name: None)
    with screen(quiet=False) as show:
        show(started)
    assert capsys.readouterr().out.startswith("step   1  the prefix is computed")


def test_contents_of_the_live_table(started: DemoEngine) -> None:
    from rich.console import Console

    console = Console(width=140, record=True, file=io.StringIO())
    console.print(_picture(started))
    text = console.export_text()
    for words in (
        "step 12",
        "prefix",
        "held",
        "decode",
        "to come",
        "12 of 40 pages held",
        "tokens/s",
        f"kernel of all layers: {FASTEST}",
    ):
        assert words in text
    assert started.requests[0].text[-20:] in text
    assert started.events[-1].text in text
