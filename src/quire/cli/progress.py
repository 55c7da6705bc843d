"""Progress on standard error: a bar on a terminal; elsewhere a line for each part of a run, some 40 lines of a long run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

Tell = Callable[..., None]
"""`tell(name)`: a part begins or has ended. `tell(name, line)`: the line is printed to standard output, above the bar."""


class progress:
    """`with progress(total) as tell:` counts the parts of a run."""

    def __init__(self, total: int, quiet: bool = False):
        self.total, self.quiet = total, quiet
        self.bar: Any = None

    def __enter__(self) -> Tell:
        if self.quiet:
            return lambda name, line="": None
        self.start, self.count, self.every = time.perf_counter(), 0, max(1, self.total // 40)
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress
            except ImportError:
                return self._line
            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total)
            return self._advance
        return self._line

    def _advance(self, name: str, line: str = "") -> None:
        self.bar.update(self.task, description=name, advance=1)
        if line and sys.stdout.isatty():
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif line:
            print(line, flush=True)

    def _line(self, name: str, line: str = "") -> None:
        self.count += 1
        if line:
            print(line, flush=True)
        elif self.count % self.every == 0:
            seconds = time.perf_counter() - self.start
            print(f"{seconds:5.0f} s  {self.count}/{self.total}  {name}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
