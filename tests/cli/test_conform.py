"""Wrong arguments are refused before a case runs; the verdict agrees with the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.cli import main
from quire.conformance.cases.suite import cases_of


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["cpu", "--html", "/no/such/folder/page.html"], "--html: given /no/such/folder/page.html; allowed: a file in a folder"),
        (["cpu", "--junit", "/no/such/folder/x.xml"], "--junit: given /no/such/folder/x.xml"),
        (["cpu", "--case", "mixed q_lens=5 kv_lens=3"], "--case: given q_len 5 over kv_len 3"),
        (["cpu", "--case", "mixed", "--only", "window"], "--only: given window; allowed: none with --case"),
        (["cpu", "--case", "nonsense"], "--case: given 'nonsense'; allowed: NAME FIELD=VALUE"),
        (["cpu", "--names", "3"], "--names: given 3; allowed: only with --power"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["conform", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["conform", "cpu", "--device", "cuda"])
    assert stop.value.code == 2
    assert "--device: given cuda; allowed: a device that torch sees" in capsys.readouterr().err


def test_a_kernel_of_a_gpu_needs_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["conform", "triton-mixed"])
    assert stop.value.code == 2
    assert "TARGET: given triton-mixed; allowed: cpu, torch or native" in capsys.readouterr().err


def test_a_run_without_a_result_is_not_a_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zeros.py").write_text(WRONG)
    asked = [f"{tmp_path}/zeros.py:attention", "--in-process", "--case", "capped softcap=5.0"]
    assert main(["conform", *asked]) == 3
    assert "verdict: NOTHING WAS COMPUTED" in capsys.readouterr().out


def test_an_unknown_kernel_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", "call.safetensors", "--kernel", "nosuch"])
    assert stop.value.code == 2
    assert "--kernel: given nosuch; allowed: triton-shared, triton-decode" in capsys.readouterr().err


WRONG = """
def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale):
    out.zero_()
"""


def test_the_verdict_accounts_for_known_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zeros.py").write_text(WRONG)
    target, known = f"{tmp_path}/zeros.py:attention", tmp_path / "known.txt"
    asked = ["conform", target, "--in-process", "--case", "mixed"]
    assert main(asked) == 1
    said = capsys.readouterr().out
    assert said.endswith("verdict: WRONG\n")
    known.write_text(f"{target} mixed it writes zeros\ncpu mixed it was wrong once\n")
    assert main([*asked, "--known", str(known)]) == 0
    assert capsys.readouterr().out.endswith("verdict: wrong only in known failures\n")
    assert main(["conform", "cpu", "--case", "mixed", "--known", str(known)]) == 1
    assert "verdict: known failures that now pass: mixed" in capsys.readouterr().out


STALE_LSE = """
import quire.reference

def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, lse):
    starts, size = q_starts.tolist(), k_pages.shape[1]
    for seq, length in enumerate(kv_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        pages = page_table[seq, : -(-length // size)].long()
        k, v = (x[pages].flatten(0, 1)[:length] for x in (k_pages, v_pages))
        if rows.stop > rows.start:
            found, sums = quire.reference.attention(q[rows], k, v, scale=scale)
            out[rows], lse[rows] = found.to(out.dtype), sums.to(lse.dtype) + (0.25 if seq == 1 else 0.0)
"""


def test_a_wrong_lse_with_a_correct_output_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stale.py").write_text(STALE_LSE)
    assert main(["conform", f"{tmp_path}/stale.py:attention", "--in-process", "--case", "mixed lse=yes"]) == 1
    said = capsys.readouterr().out
    assert "LSEs, while the output is correct, sequences 1," in said and "each by +0.25" in said
    assert " dim " not in said and "sequence 1" in said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--power", "--html", "x.html"], "--html: given x.html; allowed: none with --power"),
        (["--compare", "--only", "mixed"], "--only: given mixed; allowed: none with --compare"),
        (["cpu", "--case", "="], "--case: given '='; allowed: NAME FIELD=VALUE"),
    ],
)
def test_options_that_are_not_used_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["conform", *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_run_that_is_cut_short_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    main(["conform", "cpu", "--within", "0.0001"])
    cases = len(cases_of("smoke"))
    said = f"verdict: incomplete: the time limit was reached; {cases - 1} of {cases} cases were not run"
    assert said in capsys.readouterr().out


def test_a_target_that_cannot_be_imported_is_an_argument_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 1\n")
    (tmp_path / "good.py").write_text(f"from neighbour import VALUE\n{STALE_LSE}")
    main(["conform", f"{tmp_path}/good.py:attention", "--in-process", "--case", "mixed lse=yes"])
    (tmp_path / "bad.py").write_text("import no_such_module\n")
    with pytest.raises(SystemExit) as stop:
        main(["conform", f"{tmp_path}/bad.py:attention", "--in-process"])
    assert stop.value.code == 2 and "which raises ModuleNotFoundError" in capsys.readouterr().err


def test_a_target_that_always_crashes_is_not_run_through_all_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale"
    (tmp_path / "dies.py").write_text(f"import os\n\ndef attention(*, {arguments}):\n    os.abort()\n")
    assert main(["conform", f"{tmp_path}/dies.py:attention", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["raised"] == 5
    assert any("crashed in each of the first 5 calls" in result["reason"] for result in found["results"])
