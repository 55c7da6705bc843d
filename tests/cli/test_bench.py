"""`quire bench` on the command line: what it refuses, what it writes, and what it returns."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import quire
from quire.bench import case, cuda_workloads, gpu, implementations, limits, peers, run, timing, workloads
from quire.bench.workloads import Workload
from quire.cli import main
from quire.platform import Platform

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "fp32", q_heads=4, kv_heads=2, head_dim=16)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is measured at once."""
    monkeypatch.setattr(run, "SECONDS", 0.01)
    monkeypatch.setattr(limits, "cpu_limits", lambda: limits.Limits(1e10, 1e11))
    monkeypatch.setattr(workloads, "CPU_WORKLOADS", (SMALL,))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is really the CPU, with one peer."""
    pytest.importorskip("triton")
    rows = {"bf16": {}, "fp8": {"format": "e4m3fn"}, "write": {"operation": "write"}}
    small = tuple(Workload(name, SMALL.sequences, q_heads=4, kv_heads=2, head_dim=16, **more) for name, more in rows.items())
    monkeypatch.setattr(workloads, "CUDA_WORKLOADS", small)
    detect = Platform.detect
    monkeypatch.setattr(Platform, "detect", lambda device=None: Platform.named("sm90") if device == "cuda" else detect(device))
    monkeypatch.setattr(limits, "gpu_limits", lambda timer, reads, device: limits.Limits(4e12, 7e14, 4e12))
    monkeypatch.setattr(gpu, "build", lambda workload, device: case.build(workload))
    monkeypatch.setattr(timing, "by_events", lambda run, dirty=False: [1e-4])
    monkeypatch.setattr(timing, "capture", lambda run: run)

    def load(names: list[str] | None) -> Any:
        return dict.fromkeys(["peer"] if names is None else names, peer), {"fa3": "ImportError: not here"}

    monkeypatch.setattr(peers, "load", load)


def peer(given: case.BenchCase) -> Any:
    """Plays one, at Quire's own speed."""
    return implementations.own(given) if given.workload.operation == "attend" else None


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--only", "no such workload"], "decode 16 x 4096, fp32"),
        (["--only", "("], "a regular expression"),
        (["--batch", "2k"], "--batch: given '2k'"),
        (["--repetitions", "0"], "--repetitions: given 0; allowed: a whole number of 1 or more"),
        (["--peers", "fa3"], "--peers: given fa3; allowed: only with --device cuda"),
        (["--device", "cuda", "--flex"], "--flex: given with --device cuda; allowed: only with --device cpu"),
        (["--graph"], "--graph"),
        (["--set", "features"], "--set: given features; allowed: only with --device cuda"),
        (["--device", "cuda", "--set", "fast"], "allowed: known, prefill, decode, features, all"),
        (["--device", "cuda", "--set", "decode", "--batch", "q1s1k"], "--set: given 'decode'; allowed: none with --batch"),
        (["--host", "--graph"], "--graph: given with --host; allowed: none: it cannot be combined with --host"),
        (
            ["--host", "--stream", "chat"],
            "--host: given with --stream; allowed: one of --stream, --host, --pool; --stream is given too",
        ),
        (["--pool", "--html", "x.html"], "--html: given x.html; allowed: none: it cannot be combined with --pool"),
        (["--stream", "poems"], "documents"),
        (["--stream", "chat", "--only", "decode"], "--only: given decode; allowed: none: it cannot be combined with --stream"),
        (["--stream", "chat", "--steps", "0"], "--steps: given 0; allowed: a whole number of 1 or more"),
        (["--stream", "chat", "--peers", "fa3"], "--peers: given fa3; allowed: only with --device cuda"),
        (
            ["--stream", "chat", "--device", "cuda", "--repetitions", "2"],
            "--repetitions: given 2; allowed: only with --device cpu",
        ),
        (["--seed", "3"], "--seed: given 3; allowed: only with --stream"),
        (["--from", "x.json", "--pool"], "--pool: given with --from; allowed: none: --from measures nothing"),
        (["--device", "tpu"], "cpu"),
        (["--from", "/no/such/file"], "/no/such/file"),
        (["--from", "x.json", "--only", "decode"], "--only: given decode; allowed: none: --from measures nothing"),
    ],
    ids=" ".join,
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error_of(arguments, capsys)


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA or ROCm device here" in error_of(["--device", "cuda"], capsys)


def test_from_takes_only_what_output_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", "[]", '{"rows": []}'):
        (tmp_path / "x.json").write_text(text)
        assert "a file that `quire bench --output` wrote" in error_of(["--from", str(tmp_path / "x.json")], capsys)


@pytest.mark.usefixtures("quick")
def test_json_and_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--repetitions", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = [row["implementation"] for row in report["rows"] if row["implementation"] != "quire without AMX"]
    assert names == ["quire", "quire torch", "gather + SDPA"]
    assert report["rows"][0]["ratio"] > 0
    assert {"read_gigabytes_per_second", "fp32_gigaflops"} == report["limits"].keys()
    file = tmp_path / "bench.json"
    assert main(["bench", "--repetitions", "1", "--output", str(file), "--html", str(tmp_path / "out.html")]) == 0
    out = capsys.readouterr().out
    assert "small, fp32" in out and "GFLOP/s" in out
    assert "GFLOP/s" in (tmp_path / "out.html").read_text()
    assert json.loads(file.read_text()).keys() == report.keys()


@pytest.mark.usefixtures("quick")
def test_a_batch_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    monkeypatch.setattr(run, "measure", lambda chosen, *_, **__: seen.extend(w.label for w in chosen) or ())
    assert main(["bench", "--batch", "q4", "--batch", "2q1s8"]) == 0
    assert seen == ["q4, bf16", "2q1s8, bf16"]


@pytest.mark.usefixtures("card")
def test_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, html = tmp_path / "out.json", tmp_path / "out.html"
    assert main(["bench", "--device", "cuda", "--output", str(file), "--graph", "--only", "bf16|write", "--html", str(html)]) == 0
    captured = capsys.readouterr()
    report = json.loads(file.read_text())
    assert [(row["workload"].split(",")[0], row["implementation"]) for row in report["rows"]] == [
        ("bf16", "quire"), ("bf16", "peer"), ("fp8", "quire"), ("fp8", "quire fp8 q"), ("fp8", "peer"),
        ("write", "quire"), ("write", "copy"),
    ]  # fmt: skip
    assert report["device"] == "cuda" and report["missing"] == {"fa3": "ImportError: not here"}
    assert report["rows"][0]["ratio"] == report["rows"][0]["graph_ratio"] == 1.0
    for words in ("TFLOP/s", "not measured: fa3 (ImportError: not here)", "100.0"):
        assert words in captured.out
    assert "<svg" in html.read_text()


@pytest.mark.usefixtures("card")
def test_an_own_wrong_result_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = implementations.own
    monkeypatch.setitem(
        implementations.OWN_ON_CUDA, "quire", lambda given: right(given)._replace(run=lambda: right(given).run() + 1)
    )
    assert main(["bench", "--device", "cuda", "--only", "^bf16", "--peers", ""]) == 1
    assert "wrong result: no speed" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_an_interrupted_run_shows_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(workload: Workload, device: object) -> case.BenchCase:
        if workload.name == "fp8":
            raise KeyboardInterrupt
        return case.build(workload)

    monkeypatch.setattr(gpu, "build", cut)
    assert main(["bench", "--device", "cuda", "--output", str(tmp_path / "out.json")]) == 130
    assert "interrupted: the workloads that were not measured are missing" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    rows = written["rows"]
    assert (written["schema"], written["command"], written["interrupted"]) == (1, "bench", True)
    assert [row["implementation"] for row in rows] == ["quire", "peer"]


@pytest.mark.usefixtures("card")
def test_from_gives_the_same_table_and_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, html = str(tmp_path / "out.json"), tmp_path / "out.html"
    assert main(["bench", "--device", "cuda", "--output", file]) == 0
    measured = capsys.readouterr().out
    assert main(["bench", "--from", file, "--html", str(html)]) == 0
    assert capsys.readouterr().out == measured
    assert html.read_text().startswith("<!doctype html>")
    report = json.loads(Path(file).read_text())
    report["rows"][0]["right"] = False
    Path(file).write_text(json.dumps(report))
    assert main(["bench", "--from", file]) == 1


@pytest.mark.usefixtures("card")
def test_a_set_of_workloads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = tuple(Workload(name, SMALL.sequences, q_heads=4, kv_heads=2, head_dim=16) for name in ("chosen", "other"))
    monkeypatch.setitem(cuda_workloads.SETS, "decode", chosen)
    assert main(["bench", "--device", "cuda", "--set", "decode", "--only", "chosen", "--json"]) == 0
    assert {row["workload"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"chosen, bf16, 4/2 heads, head_dim 16"}
    assert main(["bench", "--device", "cuda", "--json"]) == 0
    assert len({row["workload"] for row in json.loads(capsys.readouterr().out)["rows"]}) == 3


def test_a_stream(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In real processes; then the same figures from the file."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file, html = str(tmp_path / "out.json"), tmp_path / "out.html"
    assert main(["bench", "--stream", "chat", "--steps", "4", "--layers", "1", "--seed", "5", "--output", file]) == 0
    measured = capsys.readouterr().out
    report = json.loads(Path(file).read_text())
    assert [row["implementation"] for row in report["rows"]] == ["quire", "quire torch", "gather + SDPA"]
    assert all(row["right"] and len(row["steps"]) == 4 for row in report["rows"])
    assert (report["trace"]["seed"], report["model"]["layers"]) == (5, 1)
    for words in ("stream chat, seed 5: 4 steps", "no step exceeds its attention time by more than 5 ms", "not measured: vLLM"):
        assert words in measured
    assert main(["bench", "--from", file, "--html", str(html)]) == 0
    assert capsys.readouterr().out == measured
    assert 'aria-label="Timeline"' in html.read_text()
    report["rows"][0]["right"] = False
    Path(file).write_text(json.dumps(report))
    assert main(["bench", "--from", file]) == 1


@pytest.mark.usefixtures("card")
def test_a_stream_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.bench.stream import run as stream
    from quire.bench.stream.result import StreamResult

    seen: dict[str, Any] = {}

    def measure(spec: Any, peers: Any, *, capture: Any, progress: Any) -> list[StreamResult]:
        seen.update(spec=spec, peers=peers, capture=capture)
        return [StreamResult("quire", total=1.0, attention=0.9, host=0.1, p50=1.0, p99=1.0, max=1.0, excess=1e-3, right=True)]

    monkeypatch.setattr(stream, "measure_gpu", measure)
    monkeypatch.setattr(peers, "load_streams", lambda names: ({"peer": peer}, {"fa3": "ImportError: not here"}))
    assert main(["bench", "--stream", "agents", "--device", "cuda", "--steps", "8"]) == 0
    out = capsys.readouterr().out
    assert seen["spec"].model.layers == 32 and seen["capture"] is timing.capture and set(seen["peers"]) == {"peer"}
    assert "not measured: fa3 (ImportError: not here)" in out and "open  total time at least 0.9 x the best peer" in out


def test_host_and_pool_are_tables_of_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Played: what is measured is tested elsewhere."""
    from quire.bench import host_gpu
    from quire.bench.figures import Figure

    row = SimpleNamespace(operation="attend", seqs=1, kv_len=16, total=40.0, kernel=9.0, operator=1.0)
    slow = SimpleNamespace(operation="step", seqs=256, kv_len=16, total=200.0, kernel=80.0, operator=1.0)
    measured: dict[str, Callable[[], list[Any]]] = {
        "host.measure_cpu_host": lambda: [row, slow],
        "pool.measure_pool": lambda: [
            Figure("step, one token", 40e-6, 60e-6),
            Figure("free", 120e-6, 60e-6),
            Figure("bytes per page", 65.0, 64),
        ],
    }
    for name, function in measured.items():
        module, member = name.split(".")
        monkeypatch.setitem(sys.modules, f"quire.bench.{module}", ModuleType(module))
        monkeypatch.setattr(sys.modules[f"quire.bench.{module}"], member, function, raising=False)
    monkeypatch.setattr(host_gpu, "measure_gpu_host", lambda: [Figure("attend on the card", 9e-6, 15e-6)])
    file = str(tmp_path / "out.json")
    for options in (["--pool"], ["--host", "--device", "cpu", "--output", file]):
        assert main(["bench", *options]) == 0
        out = capsys.readouterr().out
        assert re.search(r"40.0 +60.0 +pass", out) and re.search(r"120.0 +60.0 +FAIL", out)
    assert [row["passed"] for row in json.loads(Path(file).read_text())["rows"]] == [True, None, None, False]
    assert main(["bench", "--from", file]) == 0
    assert capsys.readouterr().out == out
    assert "--html: given x.html" in error_of(["--from", file, "--html", "x.html"], capsys)

    def unbuilt() -> list[Any]:
        raise quire.KernelError("the native kernels are not built here")

    monkeypatch.setattr(sys.modules["quire.bench.host"], "measure_cpu_host", unbuilt)
    assert main(["bench", "--host", "--device", "cpu"]) == 0
    assert "the native kernels are not built here" in capsys.readouterr().out
    detect = Platform.detect
    monkeypatch.setattr(Platform, "detect", lambda device=None: Platform.named("sm90") if device == "cuda" else detect(device))
    assert main(["bench", "--host", "--device", "cuda", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["attend on the card"]
