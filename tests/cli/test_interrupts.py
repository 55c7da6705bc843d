"""Ctrl-C at every moment of a command: no traceback, status 130, and an object with --json; workers do not get it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import interrupts
from quire.cli import main

SWALLOWED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass
except KeyboardInterrupt:
    pass
"""
"""What numpy does: an interrupt of its import disappears, and the package is broken."""
RAISED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(1000): pass\n"


def run(line: list[str], *folders: Path) -> subprocess.CompletedProcess[str]:
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run([sys.executable, "-m", "quire", *line], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize("source", [SWALLOWED, RAISED], ids=["swallowed", "raised"])
@pytest.mark.parametrize("package", ["click", "torch"])
def test_an_interrupted_import_ends_the_process(package: str, source: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(source)
    done = run(["conform", "cpu", "--json"], tmp_path)
    assert (done.returncode, done.stderr) == (130, "\nquire conform: interrupted\n")
    assert json.loads(done.stdout) == {"schema": 1, "command": "conform", "interrupted": True}


def test_an_example_that_imports_torch_is_interrupted_at_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SWALLOWED)
    done = run(["example", "rocm_story", "--json"], tmp_path)
    assert (done.returncode, done.stderr) == (130, "\nquire example: interrupted\n")
    assert json.loads(done.stdout)["interrupted"] is True


@pytest.mark.parametrize("line", [["--version"], ["example", "--json"]], ids=" ".join)
def test_an_interrupt_after_the_answer_is_ignored(line: list[str]) -> None:
    code = f"""
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["quire", *{line!r}]
from quire.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_a_process_that_ignores_interrupts_continues_to() -> None:
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from quire import interrupts
for change in (interrupts.begin, interrupts.allow, interrupts.ignore):
    change()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_caller_of_main_keeps_its_own_handler(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["example"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("name", ["explain", "bench", "example"])
def test_a_run_without_a_result_is_an_object(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(f"quire.cli.{name}").COMMAND, "run", interrupt)
    assert main([name, "--json"]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"schema": 1, "command": name, "interrupted": True}
    assert captured.err == f"\nquire {name}: interrupted\n"


# --- workers ----------------------------------------------------------------------------------------------------------------


def test_held_interrupts_reach_this_process_and_no_child() -> None:
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    with pytest.raises(KeyboardInterrupt):
        with interrupts.held():
            child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            os.kill(os.getpid(), signal.SIGINT)
    assert child.stdout == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_workers_of_the_suite_are_started_without_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    from quire.conformance.runner import worker

    masks: list[Any] = []
    process = SimpleNamespace(start=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **how: process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    worker.SubprocessWorker(print, (), daemon=True).start()
    assert signal.SIGINT in masks[0]


def test_a_worker_whose_parent_is_gone_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    from quire.conformance.runner import jobs

    monkeypatch.setattr(jobs, "begin_child", lambda: None)
    mine, theirs = multiprocessing.Pipe()
    mine.close()
    jobs._serve(theirs, "torch", None, 1.0, True, torch.get_num_threads())


def test_workers_that_compile_are_started_without_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from concurrent.futures import Future, ThreadPoolExecutor

    import quire
    from quire.prepare import prepare

    masks: list[Any] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *what: Any) -> Any:  # type: ignore[override]
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            done: Future[None] = Future()
            done.set_result(None)
            return done

    monkeypatch.setattr(sys.modules["quire.prepare"], "ProcessPoolExecutor", lambda workers, mp_context: Pool(workers))
    problem, counts = quire.Problem(q_heads=1, kv_heads=1, head_dim=16, page_size=16), list[tuple[int, int]]()
    done = prepare(problem, platform=quire.Platform.named("sm80"), progress=lambda *count: counts.append(count))
    total = len(done.kernels)
    assert len(masks) == total > 0 and all(signal.SIGINT in mask for mask in masks)
    assert counts == [(number, total) for number in range(total + 1)]


def test_an_interrupted_prepare_ends_its_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from multiprocessing import active_children

    import quire
    from quire.prepare import prepare

    def interrupt(futures: Any) -> Any:
        raise KeyboardInterrupt

    before = set(active_children())
    monkeypatch.setattr(sys.modules["quire.prepare"], "as_completed", interrupt)
    small = quire.Problem(q_heads=1, kv_heads=1, head_dim=16, page_size=16, batch_invariant=True, q_dtype="fp16", format="fp16")
    with pytest.raises(KeyboardInterrupt):
        prepare(small, platform=quire.Platform.named("sm80"), directory=tmp_path, progress=False)
    assert not [child for child in set(active_children()) - before if is_running(child.pid)]
    assert not list(tmp_path.rglob("*.cubin")), "a kernel was compiled that nobody waits for"


def is_running(pid: int | None) -> bool:
    """Whether a process exists. Its object may not know that another thread has waited for it."""
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True


def test_warm_counts_what_it_compiled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from quire.cli import warm

    def prepare(problem: Any, *, progress: Callable[[int, int], None], **how: Any) -> Any:
        progress(0, 12)
        progress(1, 12)
        raise KeyboardInterrupt

    monkeypatch.setattr(warm, "prepare", prepare)
    assert main(["warm", "--arch", "h100"]) == 130
    captured = capsys.readouterr()
    assert "interrupted: 1 of 12 kernels are compiled, and kept in the compile cache" in captured.out
    assert captured.err.split()[1:] == ["s", "1/12", "kernels", "compiled"]
    assert main(["warm", "--arch", "h100", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["interrupted"], found["compiled"], found["total"]) == (True, 1, 12)


def test_ctrl_c_while_workers_compile(tmp_path: Path) -> None:
    """Every process of the group gets the signal, as from a terminal."""
    pytest.importorskip("triton")
    line = [sys.executable, "-m", "quire", "warm", "--arch", "h100", "--json", "--directory", str(tmp_path)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not workers.exists():
        process.kill()
        pytest.skip("no list of children on this system")
    while process.poll() is None and len(workers.read_text().split()) < 2:  # the resource tracker, and a worker that begins
        pass
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "")
    assert json.loads(out)["interrupted"] is True
