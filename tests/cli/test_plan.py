"""`quire plan`: text, JSON, the HTML report, exit status, and what it says about wrong arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.cli.plan import EXAMPLES
from support.parsed_html import ParsedHtml
from support.plan_rows import FIT_KEYS, all_rows

PLAN = ["plan", "--model", "llama-3-8b", "--gpus", "4xH200"]


def planned(capsys: pytest.CaptureFixture[str], *more: str, status: int = 0) -> dict[str, Any]:
    assert main([*PLAN, *more, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--context", "8192", "--batch", "64")
    assert found["schema"] == 1 and found["command"] == "plan" and found["fits"] and found["interrupted"] is False
    assert found["step"]["sequences"] == 64 and found["step"]["longest"] == 8192
    best = found["best"]
    assert best == found["splits"][0]
    assert best["milliseconds"] == min(split["milliseconds"] for split in found["splits"] if split["fits"])
    assert best["milliseconds"] == pytest.approx(sum(best["parts_milliseconds"].values()))
    assert best["limit"] == found["limit"] == "HBM bytes"
    assert all(split["tp"] * split["cp"] * split["dp"] == 4 for split in found["splits"])
    assert [line["points"][0]["context"] for line in found["curve"]] == [1024] * 4


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--gpus", "8xH100", "--context", "32768"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-3-8b on 8 x H100: decode, 16 sequences")
    for words in ("best ", "limit ", "memory ", "work ", "tp 1 x cp 1 x dp 8", "####", "H100 was not measured", "--all"):
        assert words in text
    assert main([*PLAN, "--gpus", "8xH100", "--context", "32768", "--all"]) == 0
    assert capsys.readouterr().out.count("tp ") > text.count("tp ")


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--context", "1000000", "--batch", "64", status=1)
    assert found["best"] is None and found["limit"] == "capacity" and found["least_gpus"] == 72
    assert main([*PLAN, "--context", "1000000", "--batch", "64"]) == 1
    assert "72 of these GPUs would hold them" in " ".join(capsys.readouterr().out.split())


def test_steps(capsys: pytest.CaptureFixture[str]) -> None:
    prefill = planned(capsys, "--step", "prefill", "--context", "4096", "--chunk", "1024")
    assert prefill["step"]["new_tokens"] == 1024 and prefill["limit"] == "tensor-core FLOPs"
    mixed = planned(capsys, "--step", "mixed", "--context", "4096", "--chunk", "1024", "--batch", "9")
    assert mixed["step"]["new_tokens"] == 1024 + 8 and mixed["step"]["sequences"] == 9
    drafts = planned(capsys, "--new-tokens", "4", "--batch", "9")
    assert drafts["step"]["new_tokens"] == 36
    own = planned(capsys, "--sequences", "q2k_3q1s8k")
    assert own["step"]["new_tokens"] == 2048 + 3 and own["step"]["longest"] == 8192


def test_formats_change_bytes_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plain, fp8 = planned(capsys), planned(capsys, "--kv-dtype", "fp8")
    assert fp8["step"]["kv_format"] == "e4m3fn" and 2 * fp8["best"]["cache_bytes"] == plain["best"]["cache_bytes"]
    assert planned(capsys, "--gpus", "4xMI300X", "--kv-dtype", "fp8")["step"]["kv_format"] == "e4m3fnuz"
    light = planned(capsys, "--weight-bits", "4")
    assert 4 * light["best"]["weight_bytes"] == plain["best"]["weight_bytes"]
    half = planned(capsys, "--memory-part", "0.45")
    assert 2 * half["best"]["usable_bytes"] == plain["best"]["usable_bytes"]
    assert planned(capsys, "--gpus", "16xH200", "--network", "800")["machine"]["network"] == 100e9


def test_html_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    assert (
        main([*PLAN, "--model", "gpt-oss-20b", "--step", "mixed", "--html", str(file), "--output", str(tmp_path / "p.json")]) == 0
    )
    capsys.readouterr()
    text = file.read_text(encoding="utf-8")
    page = ParsedHtml(text)
    assert page.open == [] and page.count("svg") == 1 and page.count("polyline") == 4 and page.count("circle") > 20
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    found = json.loads((tmp_path / "p.json").read_text())
    assert page.count("div", "split") == len(found["splits"])
    assert "decode with sinks was not measured" in text


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "text"])
def test_files_are_written_before_standard_output(form: list[str], tmp_path: Path) -> None:
    """The reader of standard output has ended before the command writes to it."""
    html, output = tmp_path / "plan.html", tmp_path / "plan.json"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "quire", *PLAN, *form, "--html", str(html), "--output", str(output)]
    try:
        subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert html.read_text(encoding="utf-8").rstrip().endswith("</html>") and json.loads(output.read_text())["fits"]


def test_html_escapes_the_name_of_a_model(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    (tmp_path / "<b>x.json").write_text(json.dumps(config))
    file = tmp_path / "plan.html"
    assert main(["plan", "--model", str(tmp_path / "<b>x.json"), "--gpus", "H200", "--html", str(file)]) == 0
    assert "&lt;b&gt;x on" in file.read_text() and "<b>x" not in file.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "lama-3-8b"], "did you mean llama-3-8b?"),
        (["--gpus", "8xH20"], "did you mean h200?"),
        (["--gpus", "12xH200"], "whole nodes"),
        (["--context", "0"], "--context: given 0; allowed: a whole number of 1 or more"),
        (["--chunk", "64"], "--chunk: given 64 with --step decode; allowed: only with --step prefill or mixed"),
        (["--step", "prefill", "--new-tokens", "2"], "allowed: only with --step decode or mixed"),
        (["--step", "prefill", "--chunk", "9000"], "--chunk: given 9000; allowed: at most --context 8192"),
        (["--sequences", "nonsense"], "--sequences: given 'nonsense'"),
        (["--sequences", "q1s1k", "--batch", "2"], "--batch: given 2 with --sequences"),
        (["--kv-dtype", "fp7"], "--kv-dtype: given 'fp7'"),
        (["--memory-part", "2"], "--memory-part: given 2"),
        (["--network", "0"], "--network: given 0"),
        (["--step", "train"], "--step: given 'train'; allowed: decode, prefill, mixed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*PLAN, *arguments])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and "quire help plan" in said


def test_unknown_quantisation_needs_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "quantization_config": {"quant_method": "other"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path), "--gpus", "H200"])
    assert "--weight-bits: given nothing" in capsys.readouterr().err
    assert main(["plan", "--model", str(tmp_path), "--gpus", "H200", "--weight-bits", "4.5"]) == 0


@pytest.mark.parametrize("missing", ["--model", "--gpus"])
def test_needed_options(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--model": "llama-3-8b", "--gpus": "H200"}
    given.pop(missing)
    with pytest.raises(SystemExit) as ended:
        main(["plan", *(word for pair in given.items() for word in pair)])
    assert ended.value.code == 2 and f"{missing}: given nothing; allowed: " in capsys.readouterr().err


def examples() -> list[str]:
    lines = [line for line in EXAMPLES.splitlines() if line.startswith("  quire plan ")]
    return [re.split(r" {2,}", line.strip())[0] for line in lines]


@pytest.mark.parametrize("command", examples())
def test_examples_of_the_help(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out


PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command, listing = re.findall(r"^```\w+\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[:2]
    assert main(command.split()[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == listing.splitlines()


def test_the_page_shows_the_errors_of_the_model() -> None:
    rows = {row.key: row for row in all_rows()}
    shown = re.findall(
        r"^\| (.+?) \| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([+-]?\d+) % \| (yes|) ?\|$", PAGE.read_text(encoding="utf-8"), re.M
    )
    assert len(shown) == 57
    for table, name, measured, predicted, error, fit in shown:
        row = rows[table, name]
        assert float(measured) == row.microseconds and float(predicted) == pytest.approx(row.predicted(), rel=1e-3)
        assert int(error) == round(100 * row.error) and bool(fit) == (row.key in FIT_KEYS)
    unseen = [row for row in rows.values() if row.key not in FIT_KEYS]
    within = sorted(abs(row.error) for row in unseen if abs(row.error) <= 0.15)
    assert (len(rows), len(FIT_KEYS), len(unseen), len(within)) == (76, 23, 53, 49)
    assert within[len(within) // 2] < 0.0215 and 0.125 < within[-1] < 0.135
