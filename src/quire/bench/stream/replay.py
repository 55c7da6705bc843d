"""The engine's loop: pages for the new tokens, the plan of the step, every layer, then trims and frees."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from quire.batch import Batch
from quire.bench.reference_check import SampleError
from quire.bench.stream.check import Checker
from quire.bench.stream.setup import Planned, Setup, StreamLayers, planned
from quire.bench.stream.trace import Step
from quire.cache.pool import PagePool

LONGEST_SPIN = 0.05
"""Seconds for which the device may be kept busy while the host enqueues the layers of a step."""
CYCLES_PER_SECOND = 2e9
"""At least what the clock of a GPU makes: a spin may last longer than requested, never much less."""


class Timed(NamedTuple):
    """The seconds of one step."""

    total: float
    attention: float
    host: float


class Runner(Protocol):
    """Runs all layers of a step."""

    @property
    def is_peer(self) -> bool: ...

    def plan(self, step: Step, planned: Planned) -> None: ...

    def launch(self, start: int, tokens: int) -> list[torch.Tensor]:
        """All layers over the rows that start there; returns the output of each."""
        ...


class EagerRunner:
    """One call after the other."""

    def __init__(self, setup: Setup, layers: StreamLayers):
        self.setup, self.layers = setup, layers

    @property
    def is_peer(self) -> bool:
        return self.layers.is_peer

    def plan(self, step: Step, planned: Planned) -> None:
        self.layers.plan(planned)

    def launch(self, start: int, tokens: int) -> list[torch.Tensor]:
        setup = self.setup
        for layer, out in enumerate(setup.outs):
            q, k, v = setup.split(setup.fused[start + layer : start + layer + tokens])
            self.layers.run(layer, q, k, v, out[:tokens])
        return setup.outs


class Player:
    """The pool of a replay, and the sequences of the trace in it."""

    def __init__(self, setup: Setup):
        self.pool = PagePool(setup.pages, setup.model.page_size, setup.device)
        self.sequences: dict[int, Any] = {}

    def begin(self, step: Step) -> Batch:
        for child, parent in step.forks:
            self.sequences[child] = self.pool.fork(self.sequences[parent])
        for entry in step.sequences:
            if entry.sequence not in self.sequences:
                self.sequences[entry.sequence] = self.pool.sequence()
        return self.pool.step({self.sequences[entry.sequence]: entry.new for entry in step.sequences})

    def lengths(self, step: Step) -> list[int]:
        return [self.sequences[entry.sequence].length for entry in step.sequences]

    def end(self, step: Step) -> None:
        for entry in step.sequences:
            if entry.kept < entry.new:
                sequence = self.sequences[entry.sequence]
                self.pool.trim(sequence, sequence.length - (entry.new - entry.kept))
        for number in step.frees:
            self.pool.free(self.sequences.pop(number))


class Replay(NamedTuple):
    """What a replay gives: the time of each step, and the worst of the compared results."""

    steps: list[Timed]
    error: SampleError


def replay(setup: Setup, runner: Runner, progress: Callable[[], None] = lambda: None) -> Replay:
    """Replays the trace, step by step. On a GPU the attention time is left at 0: `device_seconds` measures it."""
    setup.clear()
    player, checker, steps = Player(setup), Checker(setup), []
    with frozen_heap():
        for index, step in enumerate(setup.trace.steps):
            steps.append(_step(setup, runner, player, checker, index, step))
            progress()
    return Replay(steps, checker.worst)


def _step(setup: Setup, runner: Runner, player: Player, checker: Checker, index: int, step: Step) -> Timed:
    """One step with its clock; what the checker does is outside of it."""
    checker.begin(index, step)
    started = perf_counter()
    batch = player.begin(step)
    paged = perf_counter()
    given = _given(setup, player, runner, step, batch)
    resumed = perf_counter()
    runner.plan(step, given)
    launching = perf_counter()
    outs = runner.launch(setup.start(index), step.tokens)
    launched = perf_counter()
    player.end(step)
    ended = perf_counter()
    setup.synchronize()
    total = (paged - started) + (perf_counter() - resumed)
    checker.check(index, step, outs)
    checker.end(step)
    if setup.device.type == "cuda":
        return Timed(total, 0.0, (paged - started) + (launched - resumed))
    return Timed(total, launched - launching, (paged - started) + (launching - resumed) + (ended - launched))


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keeps Python's collector from scanning what was there before, which takes 50 to 250 ms whenever it happens to. Engines do the
    same after their start. What an implementation leaves behind in each step is still collected."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def device_seconds(setup: Setup, runner: Runner, host: list[float], progress: Callable[[], None] = lambda: None) -> list[float]:
    """Replays once more and takes the time of each step's layers on the GPU alone, by events. The GPU spins until the host has
    enqueued all layers: no gap between two launches counts."""
    setup.clear()
    player, seconds = Player(setup), []
    for index, (step, expected) in enumerate(zip(setup.trace.steps, host)):
        batch = player.begin(step)
        runner.plan(step, _given(setup, player, runner, step, batch))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(min(2 * expected, LONGEST_SPIN) * CYCLES_PER_SECOND))
        begin.record()
        runner.launch(setup.start(index), step.tokens)
        end.record()
        setup.synchronize()
        player.end(step)
        seconds.append(begin.elapsed_time(end) / 1e3)
        progress()
    return seconds


def _given(setup: Setup, player: Player, runner: Runner, step: Step, batch: Batch) -> Planned:
    """What an engine has at hand for its implementations. It is not timed: Quire does without it."""
    q_lens = [entry.new for entry in step.sequences]
    given = planned(batch, q_lens, player.lengths(step), setup.model.page_size, for_peer=runner.is_peer)
    if runner.is_peer:
        setup.synchronize()
    return given


def warm_up(setup: Setup, layers: StreamLayers) -> None:
    """A short prefill and a decode step before the clock starts: threads, workspaces, and what peers compile at first use."""
    size = setup.model.page_size
    pool = PagePool(setup.pages, size, setup.device)
    sequence, length = pool.sequence(), 0
    for new in (min(size + 3, setup.trace.max_tokens, setup.pages * size - 1), 1):
        batch, length = pool.step({sequence: new}), length + new
        layers.plan(planned(batch, [new], [length], size, for_peer=layers.is_peer))
        for layer, out in enumerate(setup.outs):
            q, k, v = setup.split(setup.fused[layer : layer + new])
            layers.run(layer, q, k, v, out[:new])
    setup.synchronize()
