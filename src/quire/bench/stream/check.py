"""Whether a contestant is right: at some steps, for some rows, its output beside the reference in float64. The keys and values come
from the rows that were given, never from a cache: a token that was lost, or written elsewhere, is seen."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from quire import reference
from quire.bench.stream.setup import Setup
from quire.bench.stream.trace import Row, Step
from quire.bench.truth import HEADS, QUERIES, Sample, plain

CHECKED_STEPS = 12
CHECKED_ROWS = 2


class Error(NamedTuple):
    """The largest difference, and what is allowed."""

    error: float
    budget: float

    @property
    def right(self) -> bool:
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """The error as a share of the budget; NaN counts as infinite."""
        return self.error / self.budget if self.error == self.error else float("inf")


class Checker:
    """Follows the trace and knows of each sequence which rows it was given."""

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
        self.worst = Error(0.0, 1.0)
        self.checked = 0

    def begin(self, index: int, step: Step) -> None:
        """Notes which rows the sequences of a step are given."""
        for child, parent in step.forks:
            self.given[child] = list(self.given[parent])
        at = self.setup.start(index)
        for row in step.rows:
            self.given.setdefault(row.sequence, []).append((at, row.new))
            at += row.new

    def check(self, index: int, step: Step, outs: list[torch.Tensor]) -> None:
        """Compares some rows of one layer, if this is one of the steps to check."""
        if index not in self.steps:
            return
        draw = random.Random(index)
        layer = draw.randrange(self.setup.model.layers)
        token, first_token = 0, {}
        for row in step.rows:
            first_token[row], token = token, token + row.new
        longest = max(step.rows, key=lambda row: row.new)
        for row in {longest, *draw.sample(step.rows, min(CHECKED_ROWS, len(step.rows)))}:
            error = self._compare(row, layer, outs[layer][first_token[row] : first_token[row] + row.new])
            self.checked += 1
            if error.share > self.worst.share or self.checked == 1:
                self.worst = error

    def end(self, step: Step) -> None:
        """Forgets rejected drafts and finished sequences."""
        for row in step.rows:
            if row.kept < row.new:
                at, _ = self.given[row.sequence].pop()
                self.given[row.sequence].append((at, row.kept))
        for sequence in step.frees:
            del self.given[sequence]

    def _compare(self, row: Row, layer: int, got: torch.Tensor) -> Error:
        setup, model = self.setup, self.setup.model
        given = [torch.arange(at, at + count, device="cpu") for at, count in self.given[row.sequence]]
        rows = torch.cat(given).to(setup.device) + layer
        heads = torch.linspace(0, model.kv_heads - 1, min(HEADS, model.kv_heads), device="cpu").long().to(setup.device)
        group = model.q_heads // model.kv_heads
        q_heads = (heads[:, None] * group + torch.arange(group, device=setup.device)).flatten()
        count = min(QUERIES, row.new)
        q = setup.split(setup.fused[rows[-count:]])[0][:, q_heads]
        k, v = (x[:, heads] for x in setup.split(setup.fused[rows])[1:])
        want = reference.attention(q, k, v)[0]
        near = plain(Sample(slice(0, count), q_heads, q, k, v), model.dtype, got.dtype, None)
        rounding = torch.finfo(got.dtype).eps / 2 * float(want.abs().max())
        budget = 2 * float((near.double() - want).abs().max()) + rounding
        return Error(float((got[-count:][:, q_heads].double() - want).abs().max()), budget)
