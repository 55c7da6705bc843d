"""The steps of a serving engine as data: arrivals, chunked prefill, decode, verification of drafts, completion. A seed
determines the trace, and every implementation replays the same one."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from quire.bench.stream.traffic import Traffic
from quire.errors import ArgumentError

LOAD = 0.8
"""The share of the engine's sequences that is in use on average once the stream is steady."""
PREFILL_LOAD = 0.7
"""The largest share of the token budget that new prompts may need on average."""


class ScheduledSequence(NamedTuple):
    """One sequence in one step."""

    sequence: int
    new: int
    """Tokens that the operator is given."""
    kept: int
    """Tokens that stay. The others are rejected drafts, trimmed after the step."""
    prefill: bool


class Step(NamedTuple):
    """What happens in one step, in this order: forks, the operator over all sequences, trims, frees."""

    forks: tuple[tuple[int, int], ...]
    """(new sequence, the sequence whose tokens it shares)."""
    sequences: tuple[ScheduledSequence, ...]
    frees: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(entry.new for entry in self.sequences)

    @property
    def decode_only(self) -> bool:
        return not any(entry.prefill for entry in self.sequences)


class StreamRequest(NamedTuple):
    """One request: what arrives, and when."""

    sequence: int
    arrival: float
    """In steps from the start of the trace."""
    prompt: int
    """New tokens of the prompt, without the shared prefix."""
    output: int
    """Tokens to generate. The first comes out of the prefill, the last is never given to the operator. 0 for a shared prefix,
    which stays for the whole trace."""
    prefix: int | None = None
    """The sequence whose tokens it shares."""


@dataclass(frozen=True)
class EngineLimits:
    """The limits of the engine that schedules the requests."""

    steps: int
    budget: int
    """Tokens of one step."""
    sequences: int
    """Sequences that run at the same time, shared prefixes not counted."""
    capacity: int
    """Tokens that the cache of a layer can hold."""
    scale: float = 1.0
    """Factor on all lengths, for machines on which the published ones would take too long."""

    def check(self, traffic: Traffic) -> None:
        for name in ("steps", "budget", "sequences", "capacity"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "1 or more")
        if not 0 < self.scale <= 1:
            raise ArgumentError("scale", self.scale, "above 0, at most 1")
        if self.budget < self.sequences * (1 + traffic.drafts):
            allowed = f"{self.sequences * (1 + traffic.drafts)} or more: every sequence decodes in every step"
            raise ArgumentError("budget", self.budget, allowed)


@dataclass(frozen=True)
class Trace:
    """The requests that arrived and the steps that served them."""

    stream: str
    seed: int
    engine: EngineLimits
    requests: tuple[StreamRequest, ...]
    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a step."""
        return max(step.tokens for step in self.steps)

    @property
    def max_sequences(self) -> int:
        return max(len(step.sequences) for step in self.steps)

    def lengths(self) -> Iterator[dict[int, int]]:
        """For each step the lengths of all live sequences as the operator sees them: drafts included, nothing freed yet."""
        lens: dict[int, int] = {}
        for step in self.steps:
            for child, parent in step.forks:
                lens[child] = lens[parent]
            for entry in step.sequences:
                lens[entry.sequence] = lens.get(entry.sequence, 0) + entry.new
            yield lens
            for entry in step.sequences:
                lens[entry.sequence] -= entry.new - entry.kept
            for sequence in step.frees:
                del lens[sequence]

    @property
    def max_kv_len(self) -> int:
        return max(max(lens.values()) for lens in self.lengths())

    def pages(self, page_size: int) -> int:
        """The most pages in use at once. A fork shares the full pages of its parent and copies the last one when it writes."""
        lens_of_prefixes = {r.sequence: r.prompt for r in self.requests if not r.output}
        shared = {r.sequence: lens_of_prefixes[r.prefix] // page_size for r in self.requests if r.prefix is not None}
        return max(sum(-(-n // page_size) - shared.get(s, 0) for s, n in lens.items()) for lens in self.lengths())

    def summary(self) -> dict[str, Any]:
        """The figures of the trace that a report shows."""
        prefill = sum(entry.new for step in self.steps for entry in step.sequences if entry.prefill)
        return {
            "stream": self.stream,
            "seed": self.seed,
            "engine": asdict(self.engine),
            "steps": len(self.steps),
            "decode_only_steps": sum(step.decode_only for step in self.steps),
            "requests": sum(bool(r.output) for r in self.requests),
            "finished": sum(len(step.frees) for step in self.steps),
            "forks": sum(len(step.forks) for step in self.steps),
            "tokens": self.tokens,
            "prefill_tokens": prefill,
            "rejected_tokens": sum(entry.new - entry.kept for step in self.steps for entry in step.sequences),
            "mean_sequences": sum(len(step.sequences) for step in self.steps) / len(self.steps),
            "max_sequences": self.max_sequences,
            "max_kv_len": self.max_kv_len,
        }


def generate(traffic: Traffic, engine: EngineLimits, seed: int) -> Trace:
    """The trace of a seed: `engine.steps` steps, none of them empty."""
    engine.check(traffic)
    return _Scheduler(traffic, engine, seed).trace()


@dataclass
class _Running:
    """A request that has a sequence."""

    request: StreamRequest
    prefilled: int = 0
    generated: int = 0

    @property
    def decodes(self) -> bool:
        return self.prefilled == self.request.prompt and self.request.output > 0


@dataclass
class _Scheduler:
    """First come, first served. Sequences that decode come first, then prefills in chunks until the token budget is used up."""

    traffic: Traffic
    engine: EngineLimits
    seed: int
    requests: list[StreamRequest] = field(default_factory=list)
    waiting: deque[StreamRequest] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    prefixes: dict[int, _Running] = field(default_factory=dict)
    reserved: int = 0
    """Tokens that the running requests have or will have."""

    def __post_init__(self) -> None:
        # Two generators: the requests of a seed do not depend on how many drafts were drawn before them.
        self.lengths, self.acceptance = random.Random(self.seed), random.Random(self.seed + 1)
        steps_of_a_request = self.traffic.output.mean * self.engine.scale / self.traffic.tokens_per_decode + 1
        by_sequences = LOAD * self.engine.sequences / steps_of_a_request
        by_budget = PREFILL_LOAD * self.engine.budget / (self.traffic.prompt.mean * self.engine.scale)
        by_capacity = LOAD * self.engine.capacity / (steps_of_a_request * self._mean_tokens())
        self.rate = min(by_sequences, by_budget, by_capacity)
        for length in self.traffic.prefixes:
            self._arrive(StreamRequest(len(self.requests), 0.0, self._scaled(length), 0))
        # Half of the sequences of the steady stream wait at the start, so that a short trace is not all ramp.
        for _ in range(max(1, math.ceil(self.rate * steps_of_a_request / 2))):
            self._arrive(self._drawn(0.0))
        self.next_arrival = self.lengths.expovariate(self.rate)

    def _mean_tokens(self) -> float:
        return (self.traffic.prompt.mean + self.traffic.output.mean) * self.engine.scale

    def _scaled(self, length: float) -> int:
        """At most a quarter of the capacity: a request that can never be served would hold up all others."""
        return max(1, min(round(length * self.engine.scale), self.engine.capacity // 4))

    def _drawn(self, arrival: float) -> StreamRequest:
        prompt, output = (self._scaled(lengths.draw(self.lengths)) for lengths in (self.traffic.prompt, self.traffic.output))
        # The prefixes are the first requests, so that their numbers are those of their sequences.
        prefix = self.lengths.randrange(len(self.traffic.prefixes)) if self.traffic.prefixes else None
        return StreamRequest(len(self.requests), arrival, prompt, output, prefix)

    def _arrive(self, request: StreamRequest) -> None:
        self.requests.append(request)
        self.waiting.append(request)

    def trace(self) -> Trace:
        steps: list[Step] = []
        now = 0.0
        while len(steps) < self.engine.steps:
            while self.next_arrival <= now:
                self._arrive(self._drawn(self.next_arrival))
                self.next_arrival += self.lengths.expovariate(self.rate)
            step = self._step()
            if step.sequences:
                steps.append(step)
                now += 1.0
            else:
                now = self.next_arrival  # nothing to do until the next request
        return Trace(self.traffic.name, self.seed, self.engine, tuple(self.requests), tuple(steps))

    def _step(self) -> Step:
        scheduled: list[ScheduledSequence] = []
        frees: list[int] = []
        budget = self.engine.budget
        # A prefix is forked in the steps after the one that completes it.
        complete = {number for number, running in self.prefixes.items() if running.prefilled == running.request.prompt}
        for running in [r for r in self.running if r.decodes]:
            scheduled.append(self._decode(running))
            budget -= scheduled[-1].new
            self._finish(running, frees)
        prefilling = [r for r in (*self.prefixes.values(), *self.running) if r.prefilled < r.request.prompt]
        for running in prefilling:
            budget -= self._prefill(running, budget, scheduled, frees)
        forks = []
        while budget and self.waiting and self._admits(self.waiting[0], complete, frees):
            running = self._start(self.waiting.popleft())
            if running.request.prefix is not None:
                forks.append((running.request.sequence, running.request.prefix))
            budget -= self._prefill(running, budget, scheduled, frees)
        self.reserved -= sum(self._needs(self.requests[sequence]) for sequence in frees)
        return Step(tuple(forks), tuple(scheduled), tuple(frees))

    def _decode(self, running: _Running) -> ScheduledSequence:
        """A sequence that decodes: its next token and the drafts after it, of which some are kept."""
        accepted = 0
        while accepted < self.traffic.drafts and self.acceptance.random() < self.traffic.acceptance:
            accepted += 1
        kept = min(1 + accepted, running.request.output - running.generated)
        running.generated += kept
        return ScheduledSequence(running.request.sequence, 1 + self.traffic.drafts, kept, False)

    def _prefill(self, running: _Running, budget: int, scheduled: list[ScheduledSequence], frees: list[int]) -> int:
        """Gives the next chunk of a prompt to the step; returns its tokens."""
        count = min(budget, running.request.prompt - running.prefilled)
        if count:
            scheduled.append(ScheduledSequence(running.request.sequence, count, count, True))
            running.prefilled += count
            if running.decodes:
                running.generated = 1
                self._finish(running, frees)
        return count

    def _finish(self, running: _Running, frees: list[int]) -> None:
        if running.generated >= running.request.output:
            self.running.remove(running)
            frees.append(running.request.sequence)

    def _needs(self, request: StreamRequest) -> int:
        return request.prompt + request.output + self.traffic.drafts

    def _admits(self, request: StreamRequest, complete: set[int], frees: list[int]) -> bool:
        """Whether a request can start. Sequences that finish in this step still count."""
        if self.reserved + self._needs(request) > self.engine.capacity and self.running:
            return False
        if not request.output:
            return True
        ready = request.prefix is None or request.prefix in complete
        return ready and len(self.running) + len(frees) < self.engine.sequences

    def _start(self, request: StreamRequest) -> _Running:
        running = _Running(request)
        if request.output:
            self.running.append(running)
        else:
            self.prefixes[request.sequence] = running
        self.reserved += self._needs(request)
        return running
