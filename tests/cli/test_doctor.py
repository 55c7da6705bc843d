"""`quire doctor`: it distinguishes correct from wrong kernels, and survives one that crashes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import launch
from quire.cli import doctor, main, self_check
from quire.contract.call import Call
from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.choose import kernel_for
from quire.dispatch.kernel import Kernel
from quire.kernels.native import library
from quire.kernels.torch import attend
from quire.platform import Platform
from quire.problem import Problem
from support.kernels import levels

ATTEND, WRITE = (next(k for k in CATALOGUE if (k.name, k.operation) == ("torch", operation)) for operation in ("attend", "write"))


def test_this_machine_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    """The one test that lets the doctor start its children."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"schema", "command", "versions", "machine", "notes", "kernels", "engines", "interrupted", "healthy"}
    assert set(report["versions"]) == {"python", "quire", "torch", "triton", "numpy"}
    assert report["machine"]["cpu"]["vendor"] == "cpu"
    rows = {(row["operation"], row["kernel"], row["device"]): row for row in report["kernels"]}
    assert rows.keys() >= {(kernel.operation, kernel.name, "cpu") for kernel in CATALOGUE}
    for operation in ("attend", "write"):
        row = rows[operation, "torch", "cpu"]
        assert (row["refusals"], row["fault"]) == ([], None)
        assert [(check["type"], check["ok"]) for check in row["checks"]] == [("fp32", True), ("bf16", True), ("fp8", True)]


@pytest.fixture
def without_children(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lets the doctor check kernels in this process; returns the commands it would have run."""
    commands: list[Any] = []

    def run_check(command: Any) -> tuple[Any, None]:
        commands.append(command)
        return json.loads(json.dumps(doctor.self_check(*command[-2:]))), None

    monkeypatch.setattr(doctor, "run_check", run_check)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return commands


def test_one_child_a_kernel(without_children: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--all"]) == 0
    text = capsys.readouterr().out
    assert "attend torch on cpu: correct in fp32" in text and "verdict: every kernel that can run here is correct" in text
    names = [command[-2] for command in without_children]
    assert (
        len(set(names)) == len(names) and (sys.executable, "-m", "quire", "doctor", "--check", "torch", "cpu") in without_children
    )


def spoil(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, fault: Callable[..., None]) -> None:
    """Lets a fault follow each launch of a kernel."""
    honest = kernel._factory

    def factory(problem: Problem, platform: Platform) -> Callable[[Call], None]:
        launcher = honest(problem, platform)

        def faulty(call: Call) -> None:
            launcher(call)
            fault(call)

        return faulty

    monkeypatch.setitem(kernel.__dict__, "_factory", factory)
    monkeypatch.setattr(launch, "_known", {})


def a_row_is_not_written(call: Call) -> None:
    call.out[int(call.batch.q_starts[1])] = torch.nan


def the_last_key_is_missed(call: Call) -> None:
    batch = call.batch
    shorter = type(batch)(batch.page_table, batch.kv_lens - (batch.kv_lens == batch.kv_lens[1]).long(), batch.q_starts)
    attend.launch(call.q, call.cache, shorter, call.options, call.new, call.out, call.lse)


def two_heads_are_swapped(call: Call) -> None:
    call.out.copy_(call.out.flip(1))


@pytest.mark.parametrize("fault", [a_row_is_not_written, the_last_key_is_missed, two_heads_are_swapped])
def test_a_wrong_attend_is_seen(
    monkeypatch: pytest.MonkeyPatch, without_children: list[Any], capsys: pytest.CaptureFixture[str], fault: Callable[..., None]
) -> None:
    spoil(monkeypatch, ATTEND, fault)
    checks = doctor.self_check("torch", "cpu")
    assert [check["ok"] for check in checks["attend"]] == [False] * 3
    assert [check["ok"] for check in checks["write"]] == [True] * 3
    assert main(["doctor"]) == 1
    short = capsys.readouterr().out
    assert (
        "WRONG      torch (attend, cpu): WRONG in fp32" in short and "verdict    at least one kernel gives wrong results" in short
    )
    assert main(["doctor", "--all"]) == 1
    text = capsys.readouterr().out
    assert "attend torch on cpu: WRONG in fp32" in text and "verdict: at least one kernel gives wrong results" in text


@pytest.mark.skipif(not levels(), reason="the native library is not built")
def test_a_kernel_for_shared_prefixes_reads_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch shares pages, and a fault of it is seen."""
    assert [check["ok"] for check in doctor.self_check("native-shared", "cpu")["attend"]] == [True] * 3
    spoil(monkeypatch, next(k for k in CATALOGUE if k.name == "native-shared"), the_last_key_is_missed)
    assert [check["ok"] for check in doctor.self_check("native-shared", "cpu")["attend"]] == [False] * 3


def a_slot_is_lost(call: Call) -> None:
    written = call.batch.slots_of_tokens(call.k.shape[0], call.cache.page_size, call.slots)
    call.cache.k_bytes.view(-1, *call.k.shape[1:])[written[-1]] = 0


def another_slot_is_touched(call: Call) -> None:
    cache = call.cache
    written = call.batch.slots_of_tokens(call.k.shape[0], cache.page_size, call.slots).tolist()
    free = next(slot for slot in range(cache.pages * cache.page_size) if slot not in written)
    cache.v_bytes.view(-1, *call.v.shape[1:])[free] = 0


@pytest.mark.parametrize("fault", [a_slot_is_lost, another_slot_is_touched])
def test_a_wrong_write_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]) -> None:
    spoil(monkeypatch, WRITE, fault)
    checks = doctor.self_check("torch", "cpu")
    assert [check["ok"] for check in checks["write"]] == [False] * 3
    assert [check["ok"] for check in checks["attend"]] == [True] * 3


def test_a_kernel_that_cannot_run_here_is_not_ill(
    monkeypatch: pytest.MonkeyPatch, without_children: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Kernel("gpu", "attend", "for GPUs", "nowhere:launch", vendors=("nvidia",))
    plain = Kernel("plain", "attend", "without fp8", ATTEND.launcher, formats=("fp32", "bf16"))
    catalogue = (gpu, plain, *CATALOGUE)
    monkeypatch.setattr(doctor, "CATALOGUE", catalogue)
    monkeypatch.setattr(launch, "kernel_for", partial(kernel_for, catalogue=catalogue))
    monkeypatch.setattr(self_check, "CATALOGUE", catalogue)
    assert main(["doctor", "--all"]) == 0
    text = capsys.readouterr().out
    assert "attend gpu on cpu: cannot run here (vendor: given cpu, allowed nvidia)" in text
    assert "attend plain on cpu: correct in fp32" in text and "no fp8" in text
    assert "gpu" not in [command[-2] for command in without_children]


@pytest.mark.parametrize(
    "code, fault",
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "died with SIGILL"),
        ("raise RuntimeError('no such device')", "RuntimeError: no such device"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("import time; time.sleep(60)", "gave no result in 0.3 s"),
        ("print('{}')", None),
    ],
    ids=["dies", "raises", "ends", "hangs", "answers"],
)
def test_a_child_may_fail_in_any_way(code: str, fault: str | None) -> None:
    assert doctor.run_check((sys.executable, "-S", "-c", code), timeout=0.3 if "sleep" in code else 60) == ({}, fault)


def test_a_dead_child_is_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "run_check", lambda command: ({}, "died with SIGILL"))
    assert main(["doctor"]) == 1
    assert "WRONG      torch (attend, cpu): died with SIGILL" in capsys.readouterr().out


def test_one_screen(without_children: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert lines[-1] == "verdict    every kernel that can run here is correct"
    assert any(line.startswith("correct    ") for line in lines) and any(line.startswith("cannot run ") for line in lines)


@pytest.mark.parametrize(
    "flags, noted",
    [({"amx_bf16", "hypervisor"}, True), ({"amx_bf16"}, False), ({"hypervisor"}, False)],
    ids=["both", "amx", "hypervisor"],
)
def test_amx_under_a_hypervisor(
    monkeypatch: pytest.MonkeyPatch, without_children: list[Any], capsys: pytest.CaptureFixture[str], flags: set[str], noted: bool
) -> None:
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset(flags))
    main(["doctor"])
    assert ("advertises AMX under a hypervisor" in capsys.readouterr().out) == noted


def test_the_native_kernels_say_what_they_use_or_what_they_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if levels():
        assert doctor._native().startswith(f"the native CPU kernels use {levels()[-1]}")
    monkeypatch.setattr(library, "FILE", tmp_path / "libquire.so")
    assert "are not built, so torch's operators run on this CPU; to get them: install a C++17 compiler" in doctor._native()
