"""A subprocess that answers questions over a pipe: the parent's end, and how the child begins."""

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
    """The parent's end. The child runs `serve(connection, *arguments)`: it first sends what it says about itself, or the arguments
    of an `ArgumentError`, and then one answer to each question. It ends when the connection does."""

    def __init__(self, serve: Callable[..., None], arguments: tuple[Any, ...], *, daemon: bool):
        self.serve, self.arguments, self.daemon = serve, arguments, daemon
        self.process: Any = None
        self.connection: Connection | None = None
        self.greeting: Any = None

    def start(self) -> None:
        """Starts a child; what it says about itself is not waited for."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs, *self.arguments), daemon=self.daemon)
        with interrupts.held():
            self.process.start()
        theirs.close()
        self.greeting = None

    def introduce(self, seconds: float | None = None) -> Any:
        """What the child says about itself. Raises the `ArgumentError` that it met, EOFError if it died."""
        if self.greeting is None:
            self.greeting = self.receive(seconds)
        if isinstance(self.greeting, tuple):
            self.stop()
            raise ArgumentError(*self.greeting)
        return self.greeting

    def ask(self, question: Any) -> None:
        assert self.connection is not None
        try:
            self.connection.send(question)
        except OSError:
            pass  # it died before: there is no answer either

    def receive(self, seconds: float | None = None) -> Any:
        """The next answer. Raises TimeoutError if there is none in time, EOFError or OSError if the child died."""
        assert self.connection is not None
        if not self.connection.poll(seconds):
            raise TimeoutError
        return self.connection.recv()

    def exit_code(self) -> int | None:
        """How a child ended that closed its connection."""
        self.process.join()
        code: int | None = self.process.exitcode
        return code

    def close(self) -> None:
        """Ends the connection: a child that is idle ends by itself."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def stop(self, seconds: float = 0.0) -> None:
        """Ends the child: by closing the connection, and by force if it is still there after so many seconds."""
        self.close()
        if self.process is not None:
            self.process.join(seconds)
            self.process.kill()
            self.process.join()
            self.process = None


def begin_child() -> None:
    """For a child: the parent's standard output is a report, and an interrupt is the parent's to handle."""
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
