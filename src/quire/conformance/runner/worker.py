"""A subprocess that serves requests over a pipe: the parent's end, and the start of the child."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from quire import interrupts
from quire.errors import ArgumentError


class SubprocessWorker:
    """The parent's end. The child runs `serve(connection, *arguments)`. It first sends a ready message, or the arguments of an
    `ArgumentError` as a tuple, and then one response to each request. It exits when the connection is closed."""

    def __init__(self, serve: Callable[..., None], arguments: tuple[Any, ...], *, daemon: bool):
        self.serve, self.arguments, self.daemon = serve, arguments, daemon
        self.process: Any = None
        self.connection: Connection | None = None
        self._ready: Any = None

    def start(self) -> None:
        """Starts a child without waiting for its ready message."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs, *self.arguments), daemon=self.daemon)
        with interrupts.held():
            self.process.start()
        theirs.close()
        self._ready = None

    @property
    def is_ready(self) -> bool:
        """Whether the ready message was received."""
        return self._ready is not None

    def ready_message(self, seconds: float | None = None) -> Any:
        """Waits for the child's ready message. Raises an `ArgumentError` if the child sent one, EOFError if the child died."""
        if self._ready is None:
            self._ready = self.receive(seconds)
        if isinstance(self._ready, tuple):
            self.stop()
            raise ArgumentError(*self._ready)
        return self._ready

    def request(self, message: Any) -> None:
        """Sends a request."""
        assert self.connection is not None
        try:
            self.connection.send(message)
        except OSError:
            pass  # the child died: `receive` will raise

    def receive(self, seconds: float | None = None) -> Any:
        """Waits for the next response. Raises TimeoutError after `seconds`, EOFError or OSError if the child died."""
        assert self.connection is not None
        if not self.connection.poll(seconds):
            raise TimeoutError
        return self.connection.recv()

    def exit_code(self) -> int | None:
        """The exit code of a child that closed its connection."""
        self.process.join()
        code: int | None = self.process.exitcode
        return code

    def close(self) -> None:
        """Closes the connection: an idle child then exits."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def stop(self, seconds: float = 0.0) -> None:
        """Closes the connection, and kills the child if it has not exited after `seconds`."""
        self.close()
        if self.process is not None:
            self.process.join(seconds)
            self.process.kill()
            self.process.join()
            self.process = None


def begin_child() -> None:
    """Called first in a child: redirects its output to standard error, because the parent prints a report to standard output, and
    leaves interrupts to the parent."""
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
