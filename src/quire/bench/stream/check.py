"""Whether an implementation is right: at some steps, for some sequences, its output is compared with float64. The expected keys and
values come from the rows of q, k and v that were given, never from a cache: a lost or misplaced token is seen."""

from __future__ import annotations

import random

import torch

from quire.bench.reference_check import HEADS, QUERIES, ReferenceSample, SampleError, expected
from quire.bench.stream.setup import Setup
from quire.bench.stream.trace import ScheduledSequence, Step

CHECKED_STEPS = 12
CHECKED_SEQUENCES = 2


class Checker:
    """Follows the trace and records which rows each sequence was given."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.given: dict[int, list[tuple[int, int]]] = {}
        """For each sequence (first row, number of rows), in order."""
        steps = setup.trace.steps
        spread = {(len(steps) - 1) * i // max(1, CHECKED_STEPS - 1) for i in range(CHECKED_STEPS)}
        # Both kinds of steps, and the first that shares a prefix, wherever they are.
        for wanted in (lambda s: s.decode_only, lambda s: not s.decode_only, lambda s: bool(s.forks)):
            spread |= {next((i for i, step in enumerate(steps) if wanted(step)), 0)}
        self.steps = frozenset(spread)
        self.worst = SampleError(0.0, 1.0)
        self.checked = 0

    def begin(self, index: int, step: Step) -> None:
        """Records which rows the sequences of a step are given."""
        for child, parent in step.forks:
            self.given[child] = list(self.given[parent])
        at = self.setup.start(index)
        for entry in step.sequences:
            self.given.setdefault(entry.sequence, []).append((at, entry.new))
            at += entry.new

    def check(self, index: int, step: Step, outs: list[torch.Tensor]) -> None:
        """Compares some sequences of one layer, if this is one of the steps to check."""
        if index not in self.steps:
            return
        draw = random.Random(index)
        layer = draw.randrange(self.setup.model.layers)
        token, first_token = 0, {}
        for entry in step.sequences:
            first_token[entry], token = token, token + entry.new
        longest = max(step.sequences, key=lambda entry: entry.new)
        for entry in {longest, *draw.sample(step.sequences, min(CHECKED_SEQUENCES, len(step.sequences)))}:
            error = self._compare(entry, layer, outs[layer][first_token[entry] : first_token[entry] + entry.new])
            self.checked += 1
            if error.share > self.worst.share or self.checked == 1:
                self.worst = error

    def end(self, step: Step) -> None:
        """Forgets rejected drafts and finished sequences."""
        for entry in step.sequences:
            if entry.kept < entry.new:
                at, _ = self.given[entry.sequence].pop()
                self.given[entry.sequence].append((at, entry.kept))
        for sequence in step.frees:
            del self.given[sequence]

    def _compare(self, entry: ScheduledSequence, layer: int, got: torch.Tensor) -> SampleError:
        setup, model = self.setup, self.setup.model
        given = [torch.arange(at, at + count, device="cpu") for at, count in self.given[entry.sequence]]
        rows = torch.cat(given).to(setup.device) + layer
        heads = torch.linspace(0, model.kv_heads - 1, min(HEADS, model.kv_heads), device="cpu").long().to(setup.device)
        group = model.q_heads // model.kv_heads
        q_heads = (heads[:, None] * group + torch.arange(group, device=setup.device)).flatten()
        count = min(QUERIES, entry.new)
        q = setup.split(setup.fused[rows[-count:]])[0][:, q_heads]
        k, v = (x[:, heads] for x in setup.split(setup.fused[rows])[1:])
        (want,) = expected([ReferenceSample(slice(entry.new - count, entry.new), q_heads, q, k, v)], got.dtype)
        return want.compare(got)
