"""What the command line refuses: one line, exit status 2, the argument, what was given and what is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main

QUIRE = f"'{sys.executable}' -m quire"


def error_of(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(line)
    assert stop.value.code == 2
    first, *more = capsys.readouterr().err.splitlines()
    assert more == [f"usage: see `quire help{' ' + line[0] if first.startswith(f'quire {line[0]}:') else ''}`"]
    return first


@pytest.mark.parametrize(
    "line, words",
    [
        (
            "explain --head-dim 100000000000000000000000000",
            "--head-dim: given 100000000000000000000000000; allowed: a whole number",
        ),
        ("explain --page-size 999999999999999999999", "of 1 or more, at most 2147483647"),
        ("demo --requests 65", "--requests: given 65; allowed: a whole number, 1 to 64"),
        ("bench --vllm /nope --only decode.*fp32", "--vllm: given '/nope'; allowed: a Python interpreter that can be executed"),
        ("check .", "FILE: given ., which is a folder; allowed: a file"),
        ("check", "FILE: given nothing; allowed: calls that quire.record saved"),
        ("completion", "SHELL: given nothing; allowed: bash, zsh, fish"),
        ("completion tcsh", "SHELL: given 'tcsh'; allowed: bash, zsh, fish"),
        ("explain --q-heads", "quire explain: error: --q-heads: given nothing; allowed: a whole number of 1 or more"),
        ("explain --layout", "--layout: given nothing; allowed: nhd, hnd"),
        ("explian", "did you mean explain?"),
        ("help exlain", "did you mean explain?"),
        ("explain --arch mi300xx", "did you mean mi300x?"),
        ("example 01_first_batsh", "did you mean 01_first_batch?"),
        ("example 01 --json", "given '--json'; allowed: none: 01_first_batch takes no arguments"),
        ("example 01 --bogus", "given '--bogus'; allowed: none: 01_first_batch takes no arguments"),
        ("bench --host --pool", "--pool: given with --host; allowed: one of --stream, --host, --pool"),
    ],
)
def test_one_line_and_status_2(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error_of(line.split(), capsys)


def test_arguments_of_functions_have_the_names_of_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "quire bench: error: --device: given 'cuda'; allowed: cpu" in error_of(["bench", "--device", "cuda"], capsys)


def test_warm_without_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli import warm

    monkeypatch.setattr(warm, "find_spec", lambda name: None)
    assert "Triton is not installed" in error_of(["warm", "--arch", "h100"], capsys)
    assert main(["warm", "--arch", "cpu"]) == 1


def test_warm_into_a_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    (tmp_path / "file").write_text("")
    line = ["warm", "--arch", "h100", "--directory", str(tmp_path / "file" / "x")]
    assert "--directory: given" in error_of(line, capsys)


def test_every_error_of_quire_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import quire
    from quire.cli import example

    def fail(args: Any) -> int:
        raise quire.KernelError("there is no such kernel")

    monkeypatch.setattr(example.COMMAND, "run", fail)
    assert error_of(["example"], capsys) == "quire example: error: there is no such kernel"


@pytest.mark.parametrize("option", ["--html", "--junit", "--output"])
def test_files_are_probed_before_the_run(option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli import conform

    monkeypatch.setattr(conform.COMMAND, "run", lambda args: pytest.fail("the suite ran"))
    error = error_of(["conform", "cpu", option, "/proc/x"], capsys)
    assert f"{option}: given /proc/x; allowed: a file that can be written" in error


def test_a_probe_of_a_file_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("old")
    for file in (new, old):
        with pytest.raises(SystemExit):
            main(["explain", "--output", str(file), "--arch", "nothing"])
    assert not new.exists() and old.read_text() == "old"


FIGURES = {"schema": 1, "kind": "figures", "title": "t", "rows": [{"name": "a", "value": 1.0, "limit": None, "note": ""}]}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"schema": 99}, "its schema is 99, this version of Quire reads 1"),
        ({"rows": [{"name": "a"}]}, "its results are incomplete: KeyError 'value'"),
        ({"rows": 3}, "its results are incomplete: TypeError"),
        ({"kind": "", "platform": {}, "limits": {}, "rows": [{}]}, "its results are incomplete: KeyError"),
        ({"kind": "stream", "trace": {}, "model": {}}, "its results are incomplete"),
    ],
)
def test_from_refuses_what_it_cannot_show(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(FIGURES))
    assert main(["bench", "--from", str(file)]) == 0
    capsys.readouterr()
    file.write_text(json.dumps(FIGURES | change))
    assert words in error_of(["bench", "--from", str(file)], capsys)


def test_an_error_about_html_is_not_one_about_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(FIGURES))
    error = error_of(["bench", "--from", str(file), "--html", str(tmp_path / "x.html")], capsys)
    assert error.startswith("quire bench: error: --html: given") and "--from" not in error


@pytest.mark.parametrize("stream, code", [(">&-", 0), (">/dev/full", 2)], ids=["closed", "full"])
def test_standard_output_that_cannot_be_written(stream: str, code: int) -> None:
    if "full" in stream and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    done = subprocess.run(f"{QUIRE} explain {stream}", shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert done.stderr.splitlines()[:1] == ([] if not code else ["quire explain: error: No space left on device"])
    assert "Traceback" not in done.stderr
