"""The measurements of one implementation of a stream."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.bench.stream.replay import Replay

EXCESS = 5e-3
"""Seconds by which a step may exceed its attention time."""


@dataclass(frozen=True)
class StreamResult:
    """All times in seconds. What could not be measured is None; the note has the reason."""

    implementation: str
    total: float | None = None
    attention: float | None = None
    host: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    excess: float | None = None
    """The most by which a step exceeded its attention time."""
    compilations: int | None = None
    error: float | None = None
    budget: float | None = None
    right: bool = False
    note: str = ""
    steps: list[list[float]] = field(default_factory=list)
    """Of each step: total, attention, host."""

    @property
    def own(self) -> bool:
        return self.implementation.startswith("quire")

    @classmethod
    def of(cls, implementation: str, replayed: Replay, compilations: int | None = None) -> StreamResult:
        error, budget = replayed.error
        found: dict[str, Any] = {"error": error if math.isfinite(error) else None, "budget": budget, "right": replayed.error.right}
        if not replayed.error.right:
            return cls(implementation, compilations=compilations, note="wrong result: no times", **found)
        totals = sorted(step.total for step in replayed.steps)
        return cls(
            implementation,
            total=sum(totals),
            attention=sum(step.attention for step in replayed.steps),
            host=sum(step.host for step in replayed.steps),
            p50=statistics.median(totals),
            p99=totals[min(len(totals) - 1, math.ceil(0.99 * len(totals)) - 1)],
            max=totals[-1],
            excess=max(step.total - step.attention for step in replayed.steps),
            compilations=compilations,
            steps=[list(step) for step in replayed.steps],
            **found,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"own": self.own}
