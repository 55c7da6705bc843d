"""Traces of serving streams: one seed gives one trace, every token is served once, and the engine's limits hold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from quire.bench.stream.setup import Spec, StreamModel
from quire.bench.stream.trace import EngineLimits, Trace, generate
from quire.bench.stream.traffic import AGENTS, CHAT, DOCUMENTS, TRAFFIC, LogNormal
from quire.errors import ArgumentError

ENGINE = EngineLimits(steps=400, budget=96, sequences=8, capacity=8192, scale=1 / 32)
TRACES = [(name, seed) for name in TRAFFIC for seed in (0, 7)]


def traced(name: str, seed: int) -> Trace:
    return generate(TRAFFIC[name], ENGINE, seed)


@pytest.mark.parametrize("name, seed", TRACES)
def test_a_seed_is_a_trace(name: str, seed: int) -> None:
    trace = traced(name, seed)
    assert trace == traced(name, seed)
    assert trace.steps != traced(name, seed + 1).steps
    spec = Spec(name, seed, StreamModel(1, 2, 1, 8, 16), ENGINE)
    assert Spec.from_json(spec.to_json()).trace() == trace
    assert len(trace.steps) == ENGINE.steps and all(step.sequences for step in trace.steps)


@pytest.mark.parametrize("name, seed", TRACES)
def test_every_token_is_served_once(name: str, seed: int) -> None:
    trace = traced(name, seed)
    prefilled: Counter[int] = Counter()
    decoded: Counter[int] = Counter()
    freed: dict[int, int] = {}
    for index, step in enumerate(trace.steps):
        assert len({row.sequence for row in step.sequences}) == len(step.sequences)
        for row in step.sequences:
            request = trace.requests[row.sequence]
            assert row.sequence not in freed
            if row.prefill:
                assert row.kept == row.new and not decoded[row.sequence]
                prefilled[row.sequence] += row.new
            else:
                assert prefilled[row.sequence] == request.prompt and 1 <= row.kept <= row.new == 1 + TRAFFIC[name].drafts
                decoded[row.sequence] += row.kept
        freed |= dict.fromkeys(step.frees, index)
    assert len(freed) > 20
    for sequence in freed:
        request = trace.requests[sequence]
        assert prefilled[sequence] == request.prompt
        assert decoded[sequence] == request.output - 1
    for sequence, count in prefilled.items():
        assert count <= trace.requests[sequence].prompt
        assert decoded[sequence] <= max(0, trace.requests[sequence].output - 1)


@pytest.mark.parametrize("name, seed", TRACES)
def test_the_limits_of_the_engine_hold(name: str, seed: int) -> None:
    trace = traced(name, seed)
    assert max(step.tokens for step in trace.steps) <= ENGINE.budget
    prefixes = {r.sequence for r in trace.requests if not r.output}
    assert max(len({row.sequence for row in step.sequences} - prefixes) for step in trace.steps) <= ENGINE.sequences
    assert trace.pages(16) <= ENGINE.capacity // 16 + 2 * ENGINE.sequences
    assert any(step.decode_only for step in trace.steps) and any(not step.decode_only for step in trace.steps)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_prefix_is_complete_before_it_is_forked(seed: int) -> None:
    trace = traced("agents", seed)
    done: Counter[int] = Counter()
    forks: dict[int, int] = {}
    for step in trace.steps:
        for child, parent in step.forks:
            assert done[parent] == trace.requests[parent].prompt and trace.requests[child].prefix == parent
            assert child not in forks
            forks[child] = parent
        for row in step.sequences:
            if trace.requests[row.sequence].prefix is not None:
                assert row.sequence in forks
            done[row.sequence] += row.new
        assert not set(step.frees) & set(range(len(AGENTS.prefixes))), "a prefix stays"
    assert len(forks) > 20
    assert sum(row.new > row.kept for step in trace.steps for row in step.sequences) > 20


def test_arrivals_are_those_of_a_poisson_process() -> None:
    """Gaps have the mean and the spread of an exponential distribution."""
    trace = generate(CHAT, replace(ENGINE, steps=6000), 3)
    arrivals = [r.arrival for r in trace.requests if r.arrival > 0]
    gaps = [b - a for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert len(gaps) > 1000 and spread == pytest.approx(mean, rel=0.15)


@pytest.mark.parametrize(
    "lengths, published",
    [(CHAT.prompt, 1155), (CHAT.output, 211), (DOCUMENTS.prompt, 12035), (DOCUMENTS.output, 343), (LogNormal(182, 1.0), 182)],
    ids=["chat prompt", "chat output", "documents prompt", "documents output", "log-normal"],
)
def test_lengths_have_the_published_mean(lengths: object, published: float) -> None:
    """Both the formula and what is drawn; the means were not used to make the quantiles."""
    draw = random.Random(0)
    drawn = sum(lengths.draw(draw) for _ in range(40_000)) / 40_000  # type: ignore[attr-defined]
    assert lengths.mean == pytest.approx(published, rel=0.08)  # type: ignore[attr-defined]
    assert drawn == pytest.approx(lengths.mean, rel=0.05)  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [{"steps": 0}, {"scale": 0.0}, {"scale": 2.0}, {"budget": 31}, {"capacity": 0}], ids=str)
def test_engines_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(change))):
        generate(AGENTS, replace(ENGINE, **change), 0)  # type: ignore[arg-type]
