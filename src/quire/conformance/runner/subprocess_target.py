"""A target in a process of its own: one that crashes or hangs ends that process, not the run.

A case is one line, and the line is all that travels. The child builds the call, runs the target on it, and sends back what stands
in the outputs and their guards, and which seals are broken; the parent lays that into a call of its own and judges it there. So a
parent never touches the target's device either: an illegal access on a GPU ends with the child. After a death the next question
starts another one.
"""

from __future__ import annotations

import ctypes
import faulthandler
import re
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.conformance.cases.build import build
from quire.conformance.cases.call import KernelCall, whole_of
from quire.conformance.cases.case import Case
from quire.conformance.runner.target import Failure, Target, find, frame_at, is_lost
from quire.conformance.runner.threads import all_threads, one_thread
from quire.conformance.runner.worker import SubprocessWorker, begin_child
from quire.errors import ArgumentError

SECONDS = 120.0
"""How long a call may take; the first one may have to compile a kernel."""
GRACE = 60.0
"""A child that hangs ends itself; this long after it should have, it is killed. To import a target takes no longer either."""
PATIENCE = 3
"""After so many calls without an answer nothing more is asked."""


class Answer(NamedTuple):
    """What came of a call."""

    out: bytes = b""
    """With its guards; likewise the LSE."""
    lse: bytes | None = None
    broken: tuple[str, ...] = ()
    error: str = ""
    at: str = ""


@contextmanager
def apart(text: str, device: str | None = None, seconds: float = SECONDS) -> Iterator[Target]:
    """The target of this name, in a process of its own for as long as the context lasts. A call may take so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        worker = TargetWorker(text, device, seconds, Path(folder) / "trace")
        try:
            facts = worker.facts()
            yield Target(
                facts["name"],
                worker.run,
                limits=lambda call: worker.about(call)[1],
                missing=lambda call: worker.about(call)[0],
                refuses=facts["refuses"],
                version=facts["version"],
                runs_on=facts["device"],
            )
        finally:
            worker.stop()


class TargetWorker(SubprocessWorker):
    """The process of one target."""

    def __init__(self, text: str, device: str | None, seconds: float, trace: Path):
        super().__init__(_serve, (text, device, seconds, str(trace)), daemon=True)
        self.seconds, self.trace = seconds, trace
        self.hung = 0
        self.known: tuple[Case | None, tuple[str | None, str | None]] = None, (None, None)

    def facts(self) -> dict[str, Any]:
        """Starts a child, and returns what it says about its target."""
        self.start()
        facts: dict[str, Any] = self._answer(self.introduce)
        return facts

    def about(self, call: KernelCall) -> tuple[str | None, str | None]:
        """Which part of a call the target has no argument for, and which limit the call is beyond."""
        if self.hung >= PATIENCE:
            return f"it gave no answer {PATIENCE} times", None
        if self.known[0] != call.case:
            self.known = call.case, self._ask("about", call)
        return self.known[1]

    def run(self, call: KernelCall) -> None:
        """Fills the outputs of a call with what the target gives for its case."""
        answer: Answer = self._ask("run", call)
        if answer.error:
            if is_lost(answer.error):
                self.stop()
            raise Failure(answer.error, "crashes" if is_lost(answer.error) else "raises", answer.at)
        call.changed_in_subprocess = answer.broken
        if answer.lse is None:
            call.lse = None
        for tensor, data in ((call.out, answer.out), (call.lse, answer.lse)):
            if tensor is not None and data is not None:
                whole_of(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _ask(self, what: str, call: KernelCall) -> Any:
        if call.case is None:
            raise ArgumentError("call", "one without a case", "a call that `build` made: its case is what a child gets")
        if self.process is None:
            self.facts()
        self.ask((what, call.case))
        answer = self._answer(self.receive)
        if isinstance(answer, torch.OutOfMemoryError):
            raise answer
        return answer

    def _answer(self, wait: Callable[[float], Any]) -> Any:
        """What the child sends, or the `Failure` that a death or a late answer is."""
        try:
            return wait(max(self.seconds, GRACE) + GRACE)
        except (EOFError, OSError) as error:
            failure = self._failure(isinstance(error, TimeoutError))
        raise failure

    def _failure(self, late: bool) -> Failure:
        """How the child ended, and where it was."""
        code = None if late else self.exit_code()
        self.stop()
        said = self.trace.read_text(errors="replace") if self.trace.exists() else ""
        frames = re.findall(r'File "(.*)", line (\d+) in ', said)
        at = frame_at([(file, int(line)) for file, line in frames])
        if late or said.startswith("Timeout"):
            self.hung += 1
            return Failure(f"no answer within {self.seconds:g} s; its process was ended", "hangs", at)
        how = f"with {_signal(-code)}" if code is not None and code < 0 else f"with exit status {code}"
        return Failure(f"its process died {how}", "crashes", at)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The child's side.


def _serve(line: Connection, text: str, device: str | None, seconds: float, trace: str) -> None:
    begin_child()
    with open(trace, "w") as file:
        faulthandler.enable(file)  # says where a process was when it died
        faulthandler.dump_traceback_later(max(seconds, GRACE), exit=True, file=file)
        try:
            target = find(text, device)
        except ArgumentError as error:
            line.send((error.argument, str(error.given), error.allowed))
            return
        except Exception as error:
            traceback.print_exc()
            line.send(("target", f"{text}, which raises {type(error).__name__}: {error}", "a module that can be imported"))
            return
        line.send({"name": target.name, "device": target.device, "refuses": target.refuses, "version": target.version})
        call: KernelCall | None = None
        while True:
            faulthandler.cancel_dump_traceback_later()
            try:
                what, case = line.recv()
            except EOFError:
                return
            if call is None or call.case != case:
                try:
                    with one_thread():
                        call = build(case, target.device)
                except torch.OutOfMemoryError as error:
                    line.send(error)
                    continue
            faulthandler.dump_traceback_later(seconds, exit=True, file=file)
            answer = (target.missing(call), target.limits(call)) if what == "about" else _answer(target, call)
            call = call if what == "about" else None
            try:
                line.send(answer)
            except OSError:
                return  # nobody asks any more


def _answer(target: Target, call: KernelCall) -> Answer:
    try:
        with all_threads():
            target.run(call)
        out, lse = (None if t is None else _bytes(whole_of(t)) for t in (call.out, call.lse))
        return Answer(out or b"", lse, tuple(call.changed_inputs()))
    except Exception as error:
        failure = Failure.of(error)
        return Answer(error=str(failure), at=failure.at)


def _bytes(whole: torch.Tensor) -> bytes:
    here = whole.cpu()
    return ctypes.string_at(here.data_ptr(), here.numel())
