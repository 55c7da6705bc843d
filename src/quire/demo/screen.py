"""Displays a run: a live table in a terminal, lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from quire.demo.engine import DemoEngine
from quire.demo.model import LAYERS

if TYPE_CHECKING:
    from rich.console import RenderableType

Show = Callable[[DemoEngine], None]
"""Called after every step."""

_COLOURS = {"to come": "dim", "waiting": "yellow", "prefill": "cyan", "decode": "green", "held": "blue", "done": "dim"}


@contextmanager
def screen(quiet: bool) -> Iterator[Show]:
    """The display that fits the output."""
    if quiet:
        yield lambda engine: None
    elif sys.stdout.isatty() and find_spec("rich") and not _dumb():
        with _live() as show:
            yield show
    else:
        yield Lines().show


def _dumb() -> bool:
    """Whether the terminal cannot move its cursor: a live table would be drawn once, at the end."""
    from rich.console import Console

    return Console().is_dumb_terminal


class Lines:
    """Prints events, and every few steps a summary."""

    def __init__(self, every: int = 10):
        self.every, self._printed = every, 0

    def show(self, engine: DemoEngine) -> None:
        for event in engine.events[self._printed :]:
            print(f"step {event.step:3}  {event.text}")
        self._printed = len(engine.events)
        if engine.step % self.every == 0:
            states = [request.state for request in (engine.prefix, *engine.requests)]
            counts = ", ".join(f"{states.count(state)} {state}" for state in ("waiting", "prefill", "decode", "done"))
            print(f"step {engine.step:3}  {counts}; {engine.pool.usage()}; {speed(engine)}", flush=True)


def speed(engine: DemoEngine) -> str:
    return f"{engine.tokens / engine.seconds:.0f} tokens/s" if engine.seconds else ""


def why(engine: DemoEngine) -> Iterator[str]:
    """Which kernel each layer uses and why: one line for each kernel."""
    for name in dict.fromkeys(kernel for _, kernel in engine.decisions):
        layers = [layer for layer, kernel in engine.decisions if kernel == name]
        decision = engine.decisions[layers[-1], name][1]
        which = "all layers" if len(layers) == len(LAYERS) else f"layers {', '.join(map(str, layers))}"
        yield f"kernel of {which}: {name}, because {decision.because} ({decision.platform.vendor} {decision.platform.arch})"


@contextmanager
def _live(most_per_second: float = 15.0) -> Iterator[Show]:
    from rich.live import Live

    shown = 0.0
    with Live(auto_refresh=False) as live:

        def show(engine: DemoEngine) -> None:
            nonlocal shown
            if time.perf_counter() - shown > 1 / most_per_second or not engine.running:
                shown = time.perf_counter()
                live.update(_picture(engine), refresh=True)

        yield show


def _picture(engine: DemoEngine) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"step {engine.step}", title_justify="left", box=None, header_style="bold")
    for name, width in (("request", 8), ("state", 8), ("tokens", 7), ("pages", 6)):
        # Fixed widths: long text is truncated instead.
        right = name in ("tokens", "pages")
        table.add_column(name, min_width=width, max_width=width, justify="right" if right else "left", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for request in (engine.prefix, *engine.requests):
        pages = len(request.sequence.pages) if request.sequence else 0
        colour = _COLOURS[request.state]
        table.add_row(request.name, request.state, str(len(request.tokens)), str(pages), request.text[-72:], style=colour)
    usage = engine.pool.usage()
    held, width = usage.pages - usage.free, 40
    filled = round(width * held / usage.pages)
    bar = Text.assemble("pages ", ("█" * filled, "green" if usage.free else "red"), ("░" * (width - filled), "dim"), f" {usage}")
    lines = [
        Text(f"{speed(engine)}, the contract checked in full; forks {engine.forks}, copies {engine.copies}, waits {engine.waits}")
    ]
    lines += [Text(line) for line in why(engine)]
    lines += [Text(f"step {event.step:3}  {event.text}", style="dim") for event in engine.events[-5:]]
    return Group(table, Text(), bar, *lines)
