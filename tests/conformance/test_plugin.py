"""The pytest plugin, in an empty folder: every case a test, failures named, known ones expected."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import quire
from quire.conformance.cases.case import Case
from quire.conformance.plugin import format_failure
from quire.conformance.reporting.report import Finding, Picture, Result, Where
from quire.conformance.runner.known_failures import read
from quire.errors import ArgumentError

KERNEL = """
from quire.conformance.faults.injected import injected
from quire.conformance.cases.call import KernelCall

def attention(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, causal=True, window=(None, None), lse=None):
    call = KernelCall(q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window=window, causal=causal, lse=lse)
    call.format = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[str(q.dtype).removeprefix("torch.")]
    injected("FAULT").run(call)

def dies(*, q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, window):
    if window[0] is not None:
        __import__("os").abort()
    rest = {"page_table": page_table, "kv_lens": kv_lens, "q_starts": q_starts}
    attention(q=q, k_pages=k_pages, v_pages=v_pages, out=out, scale=scale, **rest)

SUPPORTS = {"format": ("fp16",), "q_dtype": ("fp16",), "max_kv_len": range(0, 200)}
REFUSES = False
"""

# Not `-m pytest`, which would put the folder on the path by itself.
SESSIONS = """
import contextlib, io, json, sys, pytest
sys.path.remove("")
sessions = []
for args in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(["-p", "quire.conformance.plugin", "-p", "no:cacheprovider", *args])
    sessions.append((int(code), said.getvalue()))
print(json.dumps(sessions))
"""


class Session(NamedTuple):
    """A session of pytest that ended."""

    code: int
    said: str


Run = Callable[..., list[Session]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Sessions of pytest, one after the other in one process, in a folder that holds a kernel and nothing else. Other packages'
    plugins, which a session has with `autoload`, take most of its time."""

    def run(*sessions: tuple[str, ...], fault: str = "window-left-off", autoload: bool = False) -> list[Session]:
        (tmp_path / "kernel.py").write_text(KERNEL.replace("FAULT", fault))
        paths = os.pathsep.join((str(Path(quire.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
        environment = {**os.environ, "PYTHONPATH": paths} | ({} if autoload else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
        command = [sys.executable, "-c", SESSIONS]
        done = subprocess.run(
            command, input=json.dumps(sessions), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        return [Session(*session) for session in json.loads(done.stdout)]

    return run


def counts(session: Session) -> dict[str, int]:
    """How many tests ended how."""
    found = re.findall(r"(\d+) (\w+)", session.said.strip().splitlines()[-1])
    return {word: int(count) for count, word in found if word in ("passed", "failed", "skipped", "xfailed", "error", "errors")}


TARGET = ("--quire-target", "kernel.py:attention")


def test_a_fault_is_named(run: Run) -> None:
    (done,) = run((*TARGET, "-rA", "-k", "window-needle or decode-needle or tree"), autoload=True)
    assert done.code == 1, done.said
    assert counts(done) == {"failed": 1, "passed": 1, "skipped": 1}
    assert "window-left-off: the window has one or two keys too many or too few on the left" in done.said
    assert "quire conform kernel.py:attention --case 'window-needle" in done.said
    assert "page_table[" in done.said and "^^^" in done.said  # the cell at fault is drawn
    assert "no argument for alibi, mask, positions" in done.said
    assert re.search(r"collected \d+ items / \d+ deselected / 3 selected", done.said)


def test_a_known_failure_is_expected_and_one_that_passes_fails(run: Run, tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("# target case why\n* window-needle it is narrow\nother decode-needle not ours\n")
    (tmp_path / "wrong.txt").write_text("kernel.py:attention decode-needle it was short\n* misspelt why\n")
    done, wrong = run(
        (*TARGET, "--quire-known", "known.txt", "-k", "window-needle or decode-needle", "-rA"),
        (*TARGET, "--quire-known", "wrong.txt", "-k", "decode-needle"),
    )
    assert done.code == 0 and counts(done) == {"passed": 1, "xfailed": 1}, done.said
    assert "it is narrow (window-left-off" in done.said
    assert wrong.code == 1
    assert "known to fail (it was short), but correct: remove it from wrong.txt" in wrong.said
    assert "--quire-known: no case is named misspelt" in wrong.said and "no case is named decode" not in wrong.said


def test_a_wrong_argument_is_a_usage_error(run: Run) -> None:
    wrong = {
        ("--quire-target", "nothing"): "target: given nothing; allowed: cpu",
        ("--quire-target", "kernel.py:missing"): "a function that kernel.py has: attention",
        ("--quire-target", "cpu", "--quire-level", "hard"): "smoke",
    }
    for done, says in zip(run(*wrong), wrong.values()):
        assert done.code == 4
        assert says in done.said


def test_without_a_target_nothing_is_added(run: Run) -> None:
    (done,) = run(())
    assert done.code == 5 and "no tests ran" in done.said


def test_a_crash_in_a_subprocess_is_a_failed_test(run: Run) -> None:
    """A window crashes the subprocess; the session continues."""
    (done,) = run(("--quire-target", "kernel.py:dies", "--quire-subprocess", "-k", "mixed or window-needle or edges"))
    assert counts(done) == {"passed": 2, "failed": 1}, done.said
    assert "crashes: its process died with SIGABRT (at kernel.py:" in done.said


def test_other_tests_of_the_session_also_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    (done,) = run(("--quire-target", "kernel:attention", "-k", "own or decode-needle"))
    assert done.code == 0 and counts(done) == {"passed": 2}, done.said


def test_known_files_are_compared_by_resolved_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "known").write_text(f"{tmp_path}/sub/../kernel.py:f  mixed  why\nkernel.py:g  edges  another function\n")
    monkeypatch.chdir(tmp_path)
    assert read("known", "kernel.py:f") == {"mixed": "why"} == read("known", f"{tmp_path}/kernel.py:f")


def test_known_failures_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("# a comment\n\nmine  far   wraps at 2^31\n*     tree  not promised\nother far another target\n")
    assert read(file, "mine") == {"far": "wraps at 2^31", "tree": "not promised"}
    file.write_text("mine far\n")
    with pytest.raises(ArgumentError, match=r"known.txt:1: mine far; allowed: a target or \*, a case, and why"):
        read(file, "mine")


def test_failure_text_has_all_parts() -> None:
    finding = Finding(
        "stale-page", ("stale-page", "neighbour-page"), {"page": 3}, 0.4, 90.0, Where(1, 2, 30, 0, 5, 17, 9, 1), "old tokens",
        "mixed q_lens=1", ("wrong too with decoys",), (("stale-page", 0.4), ("row-zero", 90.0)),
    )  # fmt: skip
    picture = Picture([[2.0]], [0, 1], [20], [[4, 9]], 16, (0, 1))
    text = format_failure(Result(Case("mixed"), "wrong", error=7.0, wrong=3, findings=(finding,), picture=picture), "my.py:kernel")
    for words in (
        "stale-page: old tokens", "sequence 1, row 2", "page=3",
        "or         indistinguishable in this case: neighbour-page", "wrong too with decoys", "[9]",
        "row-zero (90)", "quire conform my.py:kernel --case 'mixed q_lens=1'", "3 elements are wrong, the worst by 7 error budgets",
    ):  # fmt: skip
        assert words in text, words
