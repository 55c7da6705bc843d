"""Progress on standard error: a bar on a terminal; elsewhere a line for each part of a run, some 40 lines of a long run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

Tell = Callable[..., None]
"""`tell(name)`: a part begins or has ended. `tell(name, line)`: the line is printed to standard output, above the bar."""


class progress:
    """`with progress(total) as tell:` counts the parts of a run; None if their number is not known. With `begins`, `tell` is called
    when a part begins, not when it has ended."""

    def __init__(self, total: int | None, quiet: bool = False, begins: bool = False):
        self.total, self.quiet, self.begins = total, quiet, begins
        self.count, self.every = -1 if begins else 0, max(1, (total or 1) // 40)
        self.bar: Any = None

    def __enter__(self) -> Tell:
        if self.quiet:
            return lambda name, line="": None
        self.start = time.perf_counter()
        if not sys.stderr.isatty():
            return self._line
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True)
        self.bar.start()
        self.task = self.bar.add_task("", total=self.total)
        return self._advance

    def _advance(self, name: str, line: str = "") -> None:
        self.count += 1
        self.bar.update(self.task, description=name, completed=self.count)
        if line and sys.stdout.isatty():
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif line:
            print(line, flush=True)

    def _line(self, name: str, line: str = "") -> None:
        self.count += 1
        if line:
            print(line, flush=True)
        elif (self.count + self.begins) % self.every == 0:
            seconds = time.perf_counter() - self.start
            done = str(self.count) if self.total is None else f"{self.count}/{self.total}"
            print(f"{seconds:5.0f} s  {done}  {'begins: ' if self.begins else ''}{name}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def announce(name: str, quiet: bool = False) -> None:
    """One line on standard error, before a part of a run that takes long."""
    if not quiet:
        print(f"{name} ...", file=sys.stderr, flush=True)
