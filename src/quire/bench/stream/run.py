"""The measurement of a stream: on a CPU each implementation in its own process, on a GPU all in this one, over the same memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

import quire
from quire.bench.gpu import why
from quire.bench.stream.compilations import counted
from quire.bench.stream.graphs import Capture, GraphRunner, capture_all
from quire.bench.stream.implementations import QuireLayers, StreamImplementation
from quire.bench.stream.replay import EagerRunner, Replay, Runner, device_seconds, replay, warm_up
from quire.bench.stream.result import StreamResult
from quire.bench.stream.setup import Setup, Spec
from quire.bench.stream.worker import measure
from quire.bench.worker import WITHOUT_AMX

ALWAYS = ("quire", "quire torch", "gather + SDPA")
VLLM = "vLLM"
GRAPHS = " + graphs"
"""What the name of an implementation ends in if its decode-only steps are captured graphs."""

Progress = Callable[[str], None]
"""Called after every step with the name of the implementation."""


def measure_cpu(
    spec: Spec,
    *,
    vllm: str | None = None,
    repetitions: int = 1,
    progress: Progress = lambda name: None,
    names: Sequence[str] = ALWAYS,
) -> Iterator[StreamResult]:
    """Every implementation, one after the other. Of several repetitions the one with the least total time counts. After an
    interrupt the implementations that were measured are yielded before it is raised again."""
    jobs = [(name, sys.executable) for name in names] + ([(VLLM, vllm)] if vllm is not None else [])
    results: dict[str, StreamResult] = {}
    interrupted = False
    try:
        for _ in range(repetitions):
            for name, python in jobs:
                environment = {} if name == "quire" else WITHOUT_AMX
                result = measure(name, spec, partial(progress, name), python=python, environment=environment)
                results[name] = _better(results.get(name), result)
    except KeyboardInterrupt:
        interrupted = True
    yield from results.values()
    if interrupted:
        raise KeyboardInterrupt


def _better(before: StreamResult | None, now: StreamResult) -> StreamResult:
    """The faster of two results; a wrong one is always kept."""
    if before is None:
        return now
    if before.total is None or now.total is None:
        return before if before.total is None else now
    return min(before, now, key=lambda result: result.total or 0.0)


def measure_gpu(
    spec: Spec,
    peers: Mapping[str, StreamImplementation],
    *,
    capture: Capture | None,
    progress: Progress = lambda name: None,
    device: torch.device | str = "cuda",
    attention: Callable[..., list[float]] = device_seconds,
) -> Iterator[StreamResult]:
    """Quire and the peers, each call by call and, with `capture`, with graphs for the steps that only decode."""
    setup = Setup(spec, device)
    implementations: dict[str, StreamImplementation] = {"quire": QuireLayers, **peers}
    for name, implementation in implementations.items():
        for how in (None, capture) if capture is not None else (None,):
            label = name if how is None else name + GRAPHS
            yield _measured(setup, label, implementation, how, progress, attention)
            gc.collect()


def _measured(
    setup: Setup,
    name: str,
    implementation: StreamImplementation,
    capture: Capture | None,
    progress: Progress,
    attention: Callable[..., list[float]],
) -> StreamResult:
    """One implementation. Whatever it raises becomes its note, and does not end the run."""
    try:
        with torch.no_grad(), counted() as compilations:
            if name.startswith("quire"):
                prepare(setup)
            warm_up(setup, implementation(setup, None))
            graphs = [] if capture is None else capture_all(setup, implementation, capture)

            def runner() -> Runner:
                layers = implementation(setup, None)
                return EagerRunner(setup, layers) if capture is None else GraphRunner(setup, layers, graphs)

            compilations.take()
            replayed = replay(setup, runner(), partial(progress, name))
            compiled = compilations.take()
            if not replayed.error.right:
                return StreamResult.of(name, replayed, compiled)
            on_device = attention(setup, runner(), [step.host for step in replayed.steps], partial(progress, name))
    except Exception as error:
        return StreamResult(name, note=why(error))
    steps = [step._replace(attention=seconds) for step, seconds in zip(replayed.steps, on_device)]
    return StreamResult.of(name, Replay(steps, replayed.error), compiled)


def prepare(setup: Setup) -> None:
    """Compiles the kernels of the layer before anything is timed."""
    if setup.device.type == "cuda":
        quire.prepare(setup.caches()[0], q_heads=setup.model.q_heads, q_dtype=setup.fused.dtype)
