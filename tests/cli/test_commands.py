"""What all commands have in common: help, JSON, interrupts, terminals, completion and the examples."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import quire
from quire.cli import COMMANDS, commands, main
from quire.cli.command import Command, wrapped_help

PYTHON = (sys.executable, "-m", "quire")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", name]) == 0
    text = capsys.readouterr().out
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out == text
    assert text.startswith(f"usage: quire {name}") and "exit status: " in text
    assert f"quire {name}" in text.split("usage:")[1].split("\n", 1)[1], "an example"


def test_help_lists_every_command_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert all(f"\n  {status:<4} " in text for status in (0, 1, 2, 3, 130, 141))
    with pytest.raises(SystemExit):
        main(["help", "nothing"])
    assert "COMMAND: given 'nothing'; allowed: doctor" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("help", "completion")])
def test_json_means_the_same_everywhere(name: str) -> None:
    command: Command = import_module(f"quire.cli.{name}").COMMAND
    options = {option.name: option for option in command.params}
    assert options["json"].is_flag and options["output"].metavar == "FILE"  # type: ignore[attr-defined]


LINES = (["explain"], ["example"], ["demo", "--requests", "1"], ["tune", "--list", "--only", "decode.*128"])


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_json_and_output_are_one_object(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if line[0] == "tune":
        pytest.importorskip("triton")
    file = tmp_path / "out.json"
    assert main([*line, "--json", "--output", str(file)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["schema"], found["command"], found["interrupted"]) == (1, line[0], False) and captured.err == ""
    assert json.loads(file.read_text()) == found
    with pytest.raises(SystemExit):
        main([*line, "--output", "/no/such/folder/out.json"])
    assert "--output: given /no/such/folder/out.json; allowed: a file in a folder that exists" in capsys.readouterr().err


# --- interrupts -------------------------------------------------------------------------------------------------------------


def test_an_interrupt_has_a_status_and_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("quire.cli.explain").COMMAND, "run", interrupt)
    assert main(["explain"]) == 130
    assert capsys.readouterr().err == "\nquire explain: interrupted\n"


def test_an_interrupted_doctor_shows_the_kernels_it_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.cli import doctor

    def rows(device: str) -> Any:
        yield {
            "operation": "attend",
            "kernel": "torch",
            "device": "cpu",
            "summary": "",
            "refusals": [],
            "checks": [],
            "fault": None,
        }
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_kernels", rows)
    assert main(["doctor"]) == 130
    text = capsys.readouterr().out
    assert "torch (attend, cpu)" in text and text.endswith("verdict    interrupted\n")
    assert main(["doctor", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["interrupted"], found["healthy"], len(found["kernels"])) == (True, False, 1)


def test_an_interrupted_demo_proves_what_it_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.demo.engine import DemoEngine

    whole = DemoEngine.run

    def few(self: DemoEngine) -> Any:
        for number, step in enumerate(whole(self)):
            yield step
            if number == 6:
                raise KeyboardInterrupt

    monkeypatch.setattr(DemoEngine, "run", few)
    assert main(["demo", "--requests", "2", "--quiet"]) == 130
    text = capsys.readouterr().out
    assert text.startswith("interrupted in step 7: ") and "ok     outputs" in text and "WRONG" not in text
    assert main(["demo", "--requests", "2", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["interrupted"], found["proofs"]["outputs"]["holds"]) == ("interrupted", True, True)


def test_an_interrupted_power_run_reports_its_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli import conform_power

    whole = conform_power.measure

    def first(cases: Any, **how: Any) -> Any:
        whole(cases[:1], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(conform_power, "measure", first)
    assert main(["conform", "--power", "--only", "^(mixed|edges)$", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"] and len(found["matrix"]) == 1


@pytest.mark.parametrize("line", [["demo", "--requests", "40"], ["conform", "cpu", "--level", "full"]], ids=" ".join)
def test_ctrl_c_in_a_terminal(line: list[str]) -> None:
    """A real process in a terminal of its own, once it has begun to print."""
    text, code = in_terminal(line, interrupt=True)
    assert code == 130, text
    assert "Traceback" not in text


# --- terminals --------------------------------------------------------------------------------------------------------------


def in_terminal(line: list[str], interrupt: bool = False, **environment: str) -> tuple[str, int]:
    """What a command prints in a terminal of 100 columns, and its exit status; with Ctrl-C after its first output."""
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update({"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **environment})
        os.execv(sys.executable, [*PYTHON, *line])
    text, sent = b"", False
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            break
        if not part:
            break
        text += part
        if interrupt and not sent and text.count(b"\n") > 3:
            time.sleep(0.2)
            os.write(terminal, b"\x03")
            sent = True
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return text.decode(), os.waitstatus_to_exitcode(status)


def test_explain_in_a_terminal_has_colors() -> None:
    text, code = in_terminal(["explain", "--arch", "h100"])
    assert code == 0 and "\x1b[1;32mchosen" in text
    plain, _ = in_terminal(["explain", "--arch", "h100"], NO_COLOR="1")
    assert "\x1b" not in plain and "chosen     triton-decode" in plain


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").splitlines()


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_narrow_terminal(name: str) -> None:
    root = commands()
    command = root if not name else import_module(f"quire.cli.{name}").COMMAND
    text = click.Context(command, info_name=f"quire {name}", terminal_width=58).get_help()
    assert max(map(len, text.splitlines())) <= 60
    assert "Options:" not in text and "Usage:" not in text


def test_long_commands_of_the_help_can_be_copied() -> None:
    line = "  quire explain --as vllm --arch gfx942 --q-heads 64 --kv-heads 64     which of them"
    text = wrapped_help(f"examples:\n{line}\n", 40)
    command, _, meaning = text.partition("\n      which")
    assert command.replace(" \\\n", "").split() == ["examples:", *line.split()[:-3]] and meaning == " of them\n"
    assert max(map(len, text.splitlines())) <= 40
    assert wrapped_help(f"examples:\n{line}\n", 90) == f"examples:\n{line}\n"


LONG = ("explain --all --arch h100", "explain --as vllm --arch gfx942", "example", "tune --list --only decode.*128")


@pytest.mark.parametrize("line", LONG)
def test_long_texts_fit_a_narrow_terminal(line: str) -> None:
    if line.startswith("tune"):
        pytest.importorskip("triton")
    text, code = in_terminal(line.split(), COLUMNS="60")
    assert code == 0 and "\x1b[" in text
    assert max(map(len, plain(text))) <= 60


def test_the_width_does_not_depend_on_colors() -> None:
    line = ["explain", "--arch", "h100"]
    colored, without = (in_terminal(line, COLUMNS="60", **more)[0] for more in ({}, {"NO_COLOR": "1"}))
    assert plain(colored) == plain(without) and max(map(len, plain(without))) <= 60


def test_a_table_fits_a_narrow_terminal(tmp_path: Path) -> None:
    rows = [{"name": "step, one token, 256 x 16384, a page for each sequence of it", "value": 1.0, "limit": 1.0, "note": "n"}]
    (tmp_path / "x.json").write_text(json.dumps({"kind": "figures", "title": "page pool", "rows": rows}))
    text, code = in_terminal(["bench", "--from", str(tmp_path / "x.json")], COLUMNS="60")
    assert code == 0 and max(map(len, plain(text))) <= 60
    assert "…" not in text


def test_json_in_a_terminal_is_json() -> None:
    text, code = in_terminal(["explain", "--json"])
    assert code == 0 and json.loads(text)["command"] == "explain"


def test_progress_without_a_terminal_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli.progress import progress

    with progress(2) as tell:
        tell("first")
        tell("second", "for standard output")
    captured = capsys.readouterr()
    assert captured.err.split()[1:] == ["s", "1/2", "first"] and captured.out == "for standard output\n"
    with progress(1, quiet=True) as tell:
        tell("first")
    with progress(2, begins=True) as tell:
        tell("first")
        tell("second")
    assert [line.split()[2:] for line in capsys.readouterr().err.splitlines()] == [
        ["0/2", "begins:", "first"],
        ["1/2", "begins:", "second"],
    ]
    with progress(None) as tell:
        tell("first")
    assert capsys.readouterr().err.split()[1:] == ["s", "1", "first"]
    with progress(1000) as tell:
        for _ in range(1000):
            tell("step")
    assert capsys.readouterr().err.count("\n") == 40


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """A file with one recorded call."""
    pool = quire.PagePool(pages=4, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
    q, k, v = torch.randn(3, 5, 1, 8)
    with quire.record(tmp_path / "call.safetensors"):
        quire.step(q, k, v, cache, pool.step({pool.sequence(): 5}))
    return str(tmp_path / "call.safetensors")


def test_a_recorded_decision_is_short_unless_all_is_asked_for(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", recording]) == 0
    text = capsys.readouterr().out
    there, here = text.split("and on cpu:")
    assert "chosen     native" in there or "chosen     torch" in there
    assert "refused" not in there and "refused" in here
    assert main(["explain", recording, "--all"]) == 0
    assert "refused: triton-decode" in capsys.readouterr().out.split("and on cpu:")[0]


def test_long_work_is_announced(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", recording]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "comparing what the call returned with the reference ...",
        "running the call again ...",
    ]
    assert main(["diagnose", recording, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_doctor_shows_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli import doctor

    monkeypatch.setattr(doctor, "run_check", lambda command: ({}, None))
    assert main(["doctor"]) == 0
    assert " attend torch\n" in capsys.readouterr().err
    assert main(["doctor", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_single_figures_show_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.bench import pool
    from quire.bench.figures import Figure

    monkeypatch.setattr(pool, "measure_pool", lambda: iter([Figure("first", 1e-6), Figure("second", 1e-6)]))
    assert main(["bench", "--pool"]) == 0
    assert [line.split()[2:] for line in capsys.readouterr().err.splitlines()] == [["1", "first"], ["2", "second"]]


# --- completion and examples ------------------------------------------------------------------------------------------------


def request(words: str) -> dict[str, str]:
    """The variables by which bash asks for completions."""
    return {"_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}


def answers(printed: str, kind: str = "plain") -> list[str]:
    found = [line.partition(",") for line in printed.splitlines() if line]
    assert all(one[0] == kind for one in found)
    return [one[2] for one in found]


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """`completed(words)` are the completions of what was typed."""

    def run(words: str, kind: str = "plain") -> list[str]:
        for name, value in request(words).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["quire"])
        with pytest.raises(SystemExit):
            main()
        return answers(capsys.readouterr().out, kind)

    return run


def test_a_process_that_completes() -> None:
    done = subprocess.run(PYTHON, env={**os.environ, **request("quire co")}, capture_output=True, text=True)
    assert answers(done.stdout) == ["conform", "completion"]


def test_completion_knows_commands_options_and_values(completed: Callable[..., list[str]]) -> None:
    assert completed("quire co") == ["conform", "completion"]
    assert completed("quire explain --kv-") == ["--kv-heads", "--kv-dtype"]
    assert completed("quire explain --layout vllm") == ["vllm_x", "vllm_joint"]


@pytest.mark.parametrize(
    "words, some",
    [
        ("quire help ex", ["example", "explain"]),
        ("quire example 01", ["01_first_batch"]),
        ("quire conform nat", ["native-shared", "native"]),
        ("quire explain --arch h10", ["h100"]),
        ("quire explain --kernel tor", ["torch"]),
        ("quire explain --kv-dtype e4", ["e4m3fn", "e4m3fnuz"]),
    ],
)
def test_completion_of_names(words: str, some: list[str], completed: Callable[..., list[str]]) -> None:
    assert completed(words) == some


@pytest.mark.parametrize("line", ["check x", "explain x", "conform x", "bench --output x", "bench --from x", "conform --known x"])
def test_completion_of_files(line: str, completed: Callable[..., list[str]]) -> None:
    assert completed(f"quire {line}", kind="file") == ["x"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_QUIRE_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_examples_are_listed_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example"]) == 0
    assert "01_first_batch  " in capsys.readouterr().out
    for name in ("01_first_batch", "first_batch", "01"):
        assert main(["example", name]) == 0
        assert capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["example", "nothing"])
    assert "NAME: given 'nothing'; allowed: 01_first_batch" in capsys.readouterr().err


STORY = '''"""A story."""
import sys, part
print(part.WORD, sys.argv[1:])
sys.exit(5)
'''


def test_an_example_gets_its_arguments_and_gives_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.cli import example

    (tmp_path / "story").mkdir()
    (tmp_path / "story" / "part.py").write_text("WORD = 'imported'\n")
    (tmp_path / "story" / "__main__.py").write_text(
        '"""A story."""\nimport sys, part\nprint(part.WORD, sys.argv[1:])\nsys.exit(5)\n'
    )
    monkeypatch.setattr(example, "FOLDERS", (tmp_path,))
    before = sys.argv, list(sys.path)
    assert main(["example", "story", "--json", "x"]) == 5
    assert capsys.readouterr().out == "imported ['--json', 'x']\n"
    assert (sys.argv, sys.path) == before
    assert main(["example", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == {"story": "A story."}
