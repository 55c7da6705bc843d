"""A target in a subprocess: if it crashes or hangs, the subprocess ends and the run continues.

The parent sends the case, not its tensors. The child builds the call, runs the target on it, and sends back the outputs with their
guards, and which inputs were changed. The parent copies them into a call of its own and compares it with the exact result. So the
parent never uses the target's device: an illegal access on a GPU ends with the child. After a crash the next request starts another
child.
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

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.diagnosis.attempt import call_of
from quire.conformance.runner.find_target import find
from quire.conformance.runner.target import Failure, Target, frame_at, is_lost
from quire.conformance.runner.threads import all_threads, one_thread
from quire.conformance.runner.worker import SubprocessWorker, begin_child
from quire.errors import ArgumentError

SECONDS = 120.0
"""Time limit of a call; the first call may compile a kernel."""
GRACE = 60.0
"""A child that hangs exits by itself at the time limit; if it has not after this many further seconds, it is killed. Importing a
target may take this long at least."""
MOST_TIMEOUTS = 3
"""After so many timeouts the remaining cases are skipped."""
MOST_CRASHES = 5
"""After so many crashes without a single result the remaining cases are skipped."""


class CallResult(NamedTuple):
    """What a child sends after a call."""

    outputs: tuple[tuple[str, bytes, str, tuple[int, ...]], ...] = ()
    """The name, the bytes, the type and the shape of each tensor that the target wrote."""
    broken: tuple[str, ...] = ()
    error: str = ""
    at: str = ""


@contextmanager
def in_subprocess(text: str, device: str | None = None, seconds: float = SECONDS) -> Iterator[Target]:
    """A context with the target of this name in a subprocess. `seconds` is the time limit of a call."""
    with tempfile.TemporaryDirectory() as folder:
        worker = TargetWorker(text, device, seconds, Path(folder) / "trace")
        try:
            facts = worker.facts()
            yield Target(
                facts["name"],
                worker.run,
                limits=lambda call: worker.support(call)[1],
                missing=lambda call: worker.support(call)[0],
                refuses=facts["refuses"],
                version=facts["version"],
                runs_on=facts["device"],
                operation=facts["operation"],
            )
        finally:
            worker.stop()


class TargetWorker(SubprocessWorker):
    """The subprocess of one target."""

    def __init__(self, text: str, device: str | None, seconds: float, trace: Path):
        super().__init__(_serve, (text, device, seconds, str(trace)), daemon=True)
        self.seconds, self.trace = seconds, trace
        self.timeouts = self.crashes = 0
        self.gave_result = False
        self.known: tuple[Case | None, tuple[str | None, str | None]] = None, (None, None)

    def facts(self) -> dict[str, Any]:
        """Starts a child, and returns the facts about its target."""
        self.start()
        facts: dict[str, Any] = self._wait(self.ready_message)
        return facts

    def support(self, call: KernelCall | WriteCall) -> tuple[str | None, str | None]:
        """Which part of a call the target has no argument for, and which limit the call is beyond."""
        if self.timeouts >= MOST_TIMEOUTS:
            return f"not run: the target timed out {MOST_TIMEOUTS} times", None
        if self.crashes >= MOST_CRASHES and not self.gave_result:
            return f"not run: the target crashed in each of the first {MOST_CRASHES} calls", None
        if self.known[0] != call.case:
            self.known = call.case, self._request("support", call)
        return self.known[1]

    def run(self, call: KernelCall | WriteCall) -> None:
        """Runs the target on the case of a call in the child, and copies the outputs into the call."""
        result: CallResult = self._request("run", call)
        if result.error:
            if is_lost(result.error):
                self.stop()
            raise Failure(result.error, "crashes" if is_lost(result.error) else "raises", result.at)
        self.gave_result = True
        call.changed_in_subprocess = result.broken
        call.take_outputs({name: _tensor(data, kind, shape) for name, data, kind, shape in result.outputs})

    def _request(self, what: str, call: KernelCall | WriteCall) -> Any:
        if call.case is None:
            raise ArgumentError("call", "one without a case", "a call that `build` made: its case is sent to the child")
        if self.process is None:
            self.facts()
        self.request((what, call.case))
        response = self._wait(self.receive)
        if isinstance(response, torch.OutOfMemoryError):
            raise response
        return response

    def _wait(self, wait: Callable[[float], Any]) -> Any:
        """The child's next message. Raises a `Failure` if the child crashes or the time limit is reached."""
        try:
            return wait(max(self.seconds, GRACE) + GRACE)
        except (EOFError, OSError) as error:
            failure = self._failure(isinstance(error, TimeoutError))
        raise failure

    def _failure(self, late: bool) -> Failure:
        """Describes how the child ended, and at which line of the target."""
        code = None if late else self.exit_code()
        self.stop()
        trace = self.trace.read_text(errors="replace") if self.trace.exists() else ""
        frames = re.findall(r'File "(.*)", line (\d+) in ', trace)
        at = frame_at([(file, int(line)) for file, line in frames])
        if late or trace.startswith("Timeout"):
            self.timeouts += 1
            return Failure(f"no result within {self.seconds:g} s; its process was killed", "hangs", at)
        self.crashes += 1
        how = f"with {_signal(-code)}" if code is not None and code < 0 else f"with exit status {code}"
        return Failure(f"its process died {how}", "crashes", at)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The child's side.


def _serve(connection: Connection, text: str, device: str | None, seconds: float, trace: str) -> None:
    begin_child()
    with open(trace, "w") as file:
        faulthandler.enable(file)  # writes the traceback of a crash
        faulthandler.dump_traceback_later(max(seconds, GRACE), exit=True, file=file)
        try:
            target = find(text, device)
        except ArgumentError as error:
            connection.send((error.argument, str(error.given), error.allowed))
            return
        except Exception as error:
            traceback.print_exc()
            connection.send(("target", f"{text}, which raises {type(error).__name__}: {error}", "a module that can be imported"))
            return
        connection.send(
            {"name": target.name, "device": target.device, "refuses": target.refuses, "version": target.version}
            | {"operation": target.operation}
        )
        call: KernelCall | WriteCall | None = None
        while True:
            faulthandler.cancel_dump_traceback_later()
            try:
                what, case = connection.recv()
            except EOFError:
                return
            if call is None or call.case != case:
                try:
                    with one_thread():
                        call = call_of(case, target.device)
                except torch.OutOfMemoryError as error:
                    connection.send(error)
                    continue
            faulthandler.dump_traceback_later(seconds, exit=True, file=file)
            response = (target.missing(call), target.limits(call)) if what == "support" else _run(target, call)
            call = call if what == "support" else None
            try:
                connection.send(response)
            except OSError:
                return  # the parent closed the connection


def _run(target: Target, call: KernelCall | WriteCall) -> CallResult:
    try:
        with all_threads():
            target.run(call)
        return CallResult(tuple((name, *_data(x)) for name, x in call.outputs().items()), tuple(call.changed_inputs()))
    except Exception as error:
        failure = Failure.of(error)
        return CallResult(error=str(failure), at=failure.at)


def _data(x: torch.Tensor) -> tuple[bytes, str, tuple[int, ...]]:
    whole = x.contiguous()
    kind = str(x.dtype).removeprefix("torch.")
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size()), kind, tuple(x.shape)


def _tensor(data: bytes, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=getattr(torch, kind))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, kind)).view(shape)
