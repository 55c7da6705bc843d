"""The replay of a stream on a CPU: right implementations agree, and every planted fault is reported as wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import quire
from quire.bench.stream import run
from quire.bench.stream.compilations import counted
from quire.bench.stream.graphs import GraphRunner, capture_all
from quire.bench.stream.implementations import QuireLayers
from quire.bench.stream.replay import EagerRunner, Player, replay, warm_up
from quire.bench.stream.result import StreamResult
from quire.bench.stream.setup import UNWRITTEN, Setup, Spec, StreamModel
from quire.bench.stream.trace import EngineLimits
from quire.bench.stream.worker import measure

SPEC = Spec("agents", 1, StreamModel(2, 4, 2, 16, 16), EngineLimits(steps=24, budget=48, sequences=6, capacity=4096, scale=1 / 64))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So little work is done sooner by one thread, above all where other tests run beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def setup() -> Setup:
    made = Setup(SPEC)
    assert any(step.forks for step in made.trace.steps) and any(step.decode_only for step in made.trace.steps)
    return made


@pytest.mark.parametrize("kernel", [None, "torch"])
def test_own_kernels_are_right_and_timed(setup: Setup, kernel: str | None) -> None:
    warm_up(setup, QuireLayers(setup, kernel=kernel))
    seen: list[int] = []
    replayed = replay(setup, EagerRunner(setup, QuireLayers(setup, kernel=kernel)), lambda: seen.append(1))
    assert replayed.error.right and replayed.error.error > 0
    assert len(replayed.steps) == len(seen) == len(setup.trace.steps)
    for step in replayed.steps:
        assert step.attention > 0 and step.host > 0
        assert step.total >= step.attention + step.host - 1e-9


def test_kernels_give_the_same_outputs(setup: Setup) -> None:
    outs = []
    for kernel in (None, "torch"):
        replay(setup, EagerRunner(setup, QuireLayers(setup, kernel=kernel)))
        outs.append([out[: setup.trace.steps[-1].tokens].float().clone() for out in setup.outs])
    for mine, other in zip(*outs):
        torch.testing.assert_close(mine, other, rtol=2**-7, atol=2**-7)
        assert mine.isfinite().all()


def test_no_two_layers_are_given_the_same(setup: Setup) -> None:
    replay(setup, EagerRunner(setup, QuireLayers(setup)))
    assert not torch.equal(*(out[: setup.trace.steps[-1].tokens] for out in setup.outs))


class Faulty(QuireLayers):
    """Writes and attends in two calls, so that something can go wrong between them."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        assert self.batch is not None
        quire.write(k, v, self.caches[layer], self.batch)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        assert self.batch is not None
        self.write(layer, k, v)
        quire.attend(q, self.caches[layer], self.batch, out=out)


class DropsToken(Faulty):
    """The first new token of a step is never written."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        assert self.batch is not None
        cache = self.caches[layer]
        slots = self.batch.slots_of_tokens(k.shape[0], cache.page_size)
        slots[0] = -1
        quire.write(k, v, cache, self.batch, slots=slots)


class ForgetsCopies(Faulty):
    """The tail of a shared prefix is not copied to the page that continues it."""

    def plan(self, planned: Any) -> None:
        batch = planned.batch
        hints = {"max_q_len": batch.max_q_len, "max_kv_len": batch.max_kv_len}
        self.batch = quire.Batch(batch.page_table, batch.kv_lens, batch.q_starts, **hints)


class MixesLayers(Faulty):
    """The last layer attends over the pages of the first."""

    def __init__(self, setup: Setup, fixed: Any = None):
        super().__init__(setup)
        self.caches[-1] = self.caches[0]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer == 0:
            super().write(layer, k, v)


class LeavesRow(Faulty):
    """The last row of the output is not written."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        kept = out[-1].clone()
        super().run(layer, q, k, v, out)
        out[-1] = kept


def test_two_calls_are_right_as_well(setup: Setup) -> None:
    assert replay(setup, EagerRunner(setup, Faulty(setup))).error.right


@pytest.mark.parametrize("fault", [DropsToken, ForgetsCopies, MixesLayers, LeavesRow])
def test_a_fault_is_reported_as_wrong(setup: Setup, fault: Callable[..., QuireLayers]) -> None:
    result = StreamResult.of("peer", replay(setup, EagerRunner(setup, fault(setup))))
    assert not result.right and result.note == "wrong result: no times"
    assert (result.total, result.p99, result.steps) == (None, None, [])


def test_nothing_of_the_contestant_before_is_left(setup: Setup) -> None:
    """An implementation that writes nothing would be right over the pages of one that did."""

    class WritesNothing(Faulty):
        def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            assert self.batch is not None
            self.caches[layer].copy_pages(self.batch.copies)

    replay(setup, EagerRunner(setup, QuireLayers(setup)))
    assert not replay(setup, EagerRunner(setup, WritesNothing(setup))).error.right
    setup.clear()
    assert all(bool((x == UNWRITTEN).all()) for pair in setup.memory for x in pair)


def test_pages_suffice_and_come_back(setup: Setup) -> None:
    player = Player(setup)
    least = setup.pages
    for step in setup.trace.steps:
        player.begin(step)
        least = min(least, player.pool.free_pages)
        player.end(step)
    assert least == 0, "the pool has exactly the pages that the trace needs"
    for sequence in list(player.sequences.values()):
        player.pool.free(sequence)
    assert player.pool.free_pages == setup.pages


def test_graphs_replay_the_steps_that_only_decode(setup: Setup) -> None:
    graphs = capture_all(setup, QuireLayers, lambda run: run)
    runner = GraphRunner(setup, QuireLayers(setup), graphs)
    replayed = replay(setup, runner)
    assert replayed.error.right
    assert runner.replayed == sum(step.decode_only for step in setup.trace.steps) > 0


def test_a_graph_of_another_moment_is_wrong(setup: Setup) -> None:
    """What a graph would give if its buffers were not filled anew."""
    graphs = capture_all(setup, QuireLayers, lambda run: run)
    for graph in graphs:
        graph.replay = lambda graph=graph: graph.outs[-1].zero_()  # type: ignore[misc]
    for graph in graphs:
        for out in graph.outs:
            out.zero_()
    assert not replay(setup, GraphRunner(setup, QuireLayers(setup), graphs)).error.right


def test_on_a_gpu_each_contestant_is_replayed_with_and_without_graphs(setup: Setup) -> None:
    def broken(setup: Setup, fixed: Any) -> QuireLayers:
        raise RuntimeError("no such card")

    def attention(setup: Setup, runner: Any, host: list[float], progress: Callable[[], None]) -> list[float]:
        return [1e-4] * len(host)

    told: list[str] = []
    results = run.measure_gpu(
        SPEC,
        {"peer": QuireLayers, "broken": broken, "wrong": DropsToken},
        capture=lambda run: run,
        progress=told.append,
        device="cpu",
        attention=attention,
    )
    names = ["quire", "peer", "broken", "wrong"]
    assert [r.implementation for r in results] == [n + how for n in names for how in ("", run.GRAPHS)]
    for result in results:
        if "broken" in result.implementation:
            assert (result.right, result.note) == (False, "RuntimeError: no such card")
        elif "wrong" in result.implementation:
            assert (result.right, result.total) == (False, None)
        else:
            assert result.right and result.attention == pytest.approx(1e-4 * SPEC.engine.steps)
            assert result.excess is not None and result.excess > 0 and result.compilations in (0, None)
    assert {"quire", "quire + graphs", "peer"} <= set(told)


def test_compilations_are_counted() -> None:
    triton = pytest.importorskip("triton")
    knobs = triton.knobs.compilation
    before = knobs.listener
    call = {"src": None, "metadata": {}, "metadata_group": {}, "times": None}
    heard: list[bool] = []
    knobs.listener = lambda **given: heard.append(given["cache_hit"])
    try:
        with counted() as compilations:
            knobs.listener(**call, cache_hit=False)
            knobs.listener(**call, cache_hit=True)
            assert (compilations.take(), compilations.loaded) == (1, 1)
            assert compilations.take() == 0
        assert heard == [False, True], "the listener that was there before is called as well"
        knobs.listener(**call, cache_hit=False)
        assert compilations.count == 0
    finally:
        knobs.listener = before


def test_a_process_that_dies_is_a_note() -> None:
    result = measure("no such implementation", SPEC, lambda: None)
    assert not result.right and result.note.startswith("exit status 1: KeyError")


def test_another_process_replays_the_same(setup: Setup) -> None:
    told: list[int] = []
    result = measure("quire", SPEC, partial(told.append, 1))
    assert result.right and len(told) == len(result.steps) == len(setup.trace.steps)
    assert result.error == replay(setup, EagerRunner(setup, QuireLayers(setup))).error.error


def test_an_interrupt_keeps_the_implementations_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, *args: Any, **how: Any) -> StreamResult:
        if name == "quire torch":
            raise KeyboardInterrupt
        return StreamResult(name, total=1.0)

    monkeypatch.setattr(run, "measure", measure)
    found: list[StreamResult] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(run.measure_cpu(SPEC))
    assert [result.implementation for result in found] == ["quire"]
