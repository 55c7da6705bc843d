"""A stream measured: on a CPU each contestant in a process of its own, on a GPU all in this one, over the same memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import quire
from quire.bench.gpu import why
from quire.bench.stream.compilations import counted
from quire.bench.stream.contestants import Contestant, Own
from quire.bench.stream.graphs import Capture, Graphed, capture_all
from quire.bench.stream.replay import Eager, Replay, Runner, device_seconds, replay, warm_up
from quire.bench.stream.result import Result
from quire.bench.stream.setup import Setup, Spec
from quire.bench.stream.worker import measure
from quire.bench.worker import WITHOUT_AMX

ALWAYS = ("quire", "quire torch", "gather + SDPA")
VLLM = "vLLM"
GRAPHS = " + graphs"
"""What the name of a contestant ends in if its decode-only steps are captured graphs."""

Tell = Callable[[str], None]


def measure_cpu(
    spec: Spec, *, vllm: str | None = None, turns: int = 1, tell: Tell = lambda name: None, names: Sequence[str] = ALWAYS
) -> list[Result]:
    """Every contestant, one after the other. Of several turns the one with the least total time counts."""
    jobs = [(name, sys.executable) for name in names] + ([(VLLM, vllm)] if vllm is not None else [])
    results: dict[str, Result] = {}
    for _ in range(turns):
        for name, python in jobs:
            environment = {} if name == "quire" else WITHOUT_AMX
            result = measure(name, spec, lambda name=name: tell(name), python=python, environment=environment)  # type: ignore[misc]
            results[name] = _better(results.get(name), result)
    return [results[name] for name, _ in jobs]


def _better(before: Result | None, now: Result) -> Result:
    """A wrong turn is never forgotten."""
    if before is None:
        return now
    if before.total is None or now.total is None:
        return before if before.total is None else now
    return min(before, now, key=lambda result: result.total or 0.0)


def measure_gpu(
    spec: Spec,
    peers: Mapping[str, Contestant],
    *,
    capture: Capture | None,
    tell: Tell = lambda name: None,
    device: torch.device | str = "cuda",
    attention: Callable[..., list[float]] = device_seconds,
) -> list[Result]:
    """Quire and the peers, each call by call and, with `capture`, with graphs for the steps that only decode."""
    setup = Setup(spec, device)
    results: list[Result] = []
    contestants: dict[str, Contestant] = {"quire": Own, **peers}
    with torch.no_grad():
        for name, contestant in contestants.items():
            for how in (None, capture) if capture is not None else (None,):
                label = name if how is None else name + GRAPHS
                results.append(_measured(setup, label, contestant, how, tell, attention))
                gc.collect()
    return results


def _measured(
    setup: Setup,
    name: str,
    contestant: Contestant,
    capture: Capture | None,
    tell: Tell,
    attention: Callable[..., list[float]],
) -> Result:
    """One contestant. Whatever it raises becomes its note, and never ends the run."""
    try:
        with counted() as compilations:
            if name.startswith("quire"):
                prepare(setup)
            warm_up(setup, contestant(setup, None))
            graphs = [] if capture is None else capture_all(setup, contestant, capture)

            def runner() -> Runner:
                layers = contestant(setup, None)
                return Eager(setup, layers) if capture is None else Graphed(setup, layers, graphs)

            compilations.take()
            replayed = replay(setup, runner(), lambda: tell(name))
            compiled = compilations.take()
            if not replayed.error.right:
                return Result.of(name, replayed, compiled)
            on_device = attention(setup, runner(), [step.host for step in replayed.steps], lambda: tell(name))
    except Exception as error:
        return Result(name, note=why(error))
    steps = [step._replace(attention=seconds) for step, seconds in zip(replayed.steps, on_device)]
    return Result.of(name, Replay(steps, replayed.error), compiled)


def prepare(setup: Setup) -> None:
    """Compiles the kernels of the layer before the clock starts, if this Quire can."""
    compile_all: Any = getattr(quire, "prepare", None)
    if compile_all is not None and setup.device.type == "cuda":
        compile_all(setup.caches()[0], q_heads=setup.model.q_heads, q_dtype=setup.fused.dtype)
