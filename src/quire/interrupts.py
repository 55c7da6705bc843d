"""What Ctrl-C does in each phase of a command: at the start it ends the process at once, in a run it raises KeyboardInterrupt, at
the end it is ignored. It imports little, because it must be in place before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 and the number of SIGINT."""
_owned = False


def begin() -> None:
    """The process belongs to the command line from here on: until `allow`, Ctrl-C ends it at once. An import that is cut in the
    middle cannot be repeated, and some packages swallow the exception. A process that ignores SIGINT (nohup) continues to."""
    global _owned
    _owned = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _owned:
        signal.signal(signal.SIGINT, end)


def allow() -> None:
    """A command runs: Ctrl-C raises KeyboardInterrupt, so that results until then are reported."""
    if _owned:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def importing() -> Iterator[None]:
    """A context within a run in which large packages are imported: Ctrl-C ends the process at once."""
    if _owned:
        signal.signal(signal.SIGINT, end)
    yield
    allow()


def ignore() -> None:
    """The result is complete: Ctrl-C would only cut its output."""
    if _owned:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def end(number: int = 0, frame: FrameType | None = None) -> None:
    """Ends the process without cleaning up. With `--json` the least object that a program expects is printed."""
    command = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].isalpha() else ""
    try:
        os.write(2, f"\nquire{' ' if command else ''}{command}: interrupted\n".encode())
        if command and "--json" in sys.argv:
            os.write(1, f'{{"schema": 1, "command": "{command}", "interrupted": true}}\n'.encode())
    finally:
        os._exit(INTERRUPTED)


@contextmanager
def held() -> Iterator[None]:
    """A context for starting processes: they do not get Ctrl-C, this process gets it at the end of the block. A process that is
    started only in part would print a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it changes the mask of signals itself when it starts
    arrived: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # The mask is what children inherit. It is the mask of one thread: another one may get the signal, so the handler waits, too.
    defers = callable(handler) and threading.current_thread() is threading.main_thread()
    if defers:
        signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if defers:
            signal.signal(signal.SIGINT, handler)
        if arrived:
            signal.raise_signal(signal.SIGINT)
