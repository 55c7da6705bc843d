"""One call of a target: its result, the exact result, and the distance of a prediction from its result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from quire.conformance.cases.build import build
from quire.conformance.cases.build_write import build_write
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.diagnosis import precision
from quire.conformance.diagnosis.write_attempt import attempt_write
from quire.conformance.faults import Observation
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.budget import Truth, distance, lse_ratios, ratios, rounding_losses, truth
from quire.conformance.oracle.exact import PLAIN, Stages
from quire.conformance.runner.target import Failure, Target
from quire.conformance.runner.threads import all_threads

NEAR = 64.0
"""A prediction at most this many budgets away is compared again with its own budget: a fault may make a computation coarser."""
COARSEST = 256.0
"""How much larger than the budget of the correct computation that budget may be."""


class TriedCall(Protocol):
    """A call of any operation that was run, and its exact result: an `Attempt` or a `WriteAttempt`."""

    failure: Failure | None

    @property
    def call(self) -> Any: ...
    @property
    def error(self) -> str: ...
    @property
    def off(self) -> float: ...
    @property
    def is_correct(self) -> bool: ...
    @property
    def wrong_elements(self) -> int: ...
    @property
    def wrong_sequences(self) -> tuple[int, ...]: ...
    @property
    def seen(self) -> Any: ...
    def distance_to(self, stages: Any) -> float: ...
    def share_missed(self, stages: Any) -> float: ...


@dataclass
class Attempt:
    """A call that was run, and its exact result."""

    call: KernelCall
    truth: Truth
    losses: tuple[float, float]
    failure: Failure | None = None

    @property
    def error(self) -> str:
        return "" if self.failure is None else str(self.failure)

    @property
    def off(self) -> float:
        """The largest error in budgets; at most 1 is correct."""
        return max(self.distances) if not self.error else torch.inf

    @property
    def is_correct(self) -> bool:
        return not self.error and self.off <= 1

    @property
    def distances(self) -> tuple[float, float]:
        return distance(self.out, self.lse, self.bare, self.truth, self.call.live)

    def distance_to(self, stages: Stages) -> float:
        """How far the result is from what these stages predict, in budgets."""
        if self.worst is not None and stages.finish is x.finish and (near := self._to(stages, self.losses, self.worst)) > NEAR:
            return near
        near = self._to(stages, self.losses)
        return near if not 1 < near <= NEAR else self._coarse(stages)

    def _coarse(self, stages: Stages) -> float:
        """The distance with a budget of the prediction's own. If the correct result is as near by that budget, the result does not
        support the fault."""
        own = rounding_losses(self.call, stages)
        losses = tuple(min(max(a, b), COARSEST * b + 1e-12) for a, b in zip(own, self.losses))
        near = self._to(stages, (losses[0], losses[1]))
        return near if near > 1 or self._to(PLAIN, (losses[0], losses[1])) > 4 else torch.inf

    def differs(self, stages: Stages) -> bool:
        """Whether these stages predict another result than the correct one."""
        want, live = truth(self.call, stages, self.losses), self.call.live
        if not live:
            return False
        nothing = torch.zeros_like(self.bare)
        off = float(ratios(want.outcome.out, nothing, self.truth, live).max())
        if self.lse is not None:
            off = max(off, float(lse_ratios(want.outcome.lse, self.truth, live).max()))
        return not off <= 1

    def share_missed(self, stages: Stages) -> float:
        """The share of elements that are not what these stages predict."""
        want = truth(self.call, stages, self.losses)
        off = ratios(self.out, self.bare, want, self.call.live)
        return float((off > 1).double().mean()) if off.numel() else 0.0

    @cached_property
    def ratios(self) -> torch.Tensor:
        """Error over budget of every live element, [rows, q_heads, v_head_dim]."""
        return ratios(self.out, self.bare, self.truth, self.call.live)

    @property
    def wrong_elements(self) -> int:
        """How many elements of the output are beyond their budget."""
        return int((self.ratios > 1).sum())

    @cached_property
    def wrong_rows(self) -> torch.Tensor:
        """Rows with an element, or an LSE, beyond its budget: bool [rows]."""
        wrong = self.ratios.amax((1, 2)) > 1 if self.ratios.numel() else torch.zeros(self.call.live, dtype=torch.bool)
        if self.lse is not None and self.call.live:
            wrong = wrong | (lse_ratios(self.lse, self.truth, self.call.live).amax(1) > 1)
        return wrong

    @cached_property
    def wrong_sequences(self) -> tuple[int, ...]:
        """Sequences with a wrong row."""
        starts = self.call.q_starts.tolist()
        return tuple(i for i in range(self.call.seqs) if bool(self.wrong_rows[starts[i] : starts[i + 1]].any()))

    @cached_property
    def seen(self) -> Observation:
        return Observation(self.call, self.truth)

    @cached_property
    def worst(self) -> int | None:
        """The sequence with the largest error. A prediction that does not explain it need not be computed for the others."""
        live = self.call.live
        if not live or self.call.seqs < 2:
            return None
        row = int(self.ratios.amax((1, 2)).argmax())
        if self.lse is not None and self.distances[1] > self.distances[0]:
            row = int(lse_ratios(self.lse, self.truth, live).amax(1).argmax())
        starts = self.call.q_starts.tolist()
        return next(i for i in range(self.call.seqs) if starts[i] <= row < starts[i + 1])

    @cached_property
    def out(self) -> torch.Tensor:
        return self.call.out.cpu()

    @cached_property
    def lse(self) -> torch.Tensor | None:
        return None if self.call.lse is None else self.call.lse.cpu()

    @cached_property
    def bare(self) -> torch.Tensor:
        """Elements of the output that were never written."""
        return self.call.unwritten().cpu()

    def _to(self, stages: Stages, losses: tuple[float, float], only: int | None = None) -> float:
        """The LSE may be as predicted, or correct: a fault of the output need not be one of the LSE, which is stored separately."""
        want, live = truth(self.call, stages, losses, only), self.call.live
        if not live:
            return 0.0
        starts = self.call.q_starts.tolist()
        rows = slice(0, live) if only is None else slice(starts[only], starts[only + 1])
        off = float(ratios(self.out, self.bare, want, live)[rows].max())
        if self.lse is None:
            return off
        return max(off, min(float(lse_ratios(self.lse, each, live)[rows].max()) for each in (want, self.truth)))


def attempt(case: Case, target: Target, call: KernelCall | None = None) -> Attempt:
    """Builds a case and runs a target on it."""
    call = build(case, target.device) if call is None else call
    losses = rounding_losses(call)
    done = Attempt(call, truth(call, losses=losses), losses)
    try:
        with all_threads():
            target.run(call)
    except Exception as error:
        done.failure = Failure.of(error)
    return done


def call_of(case: Case, device: torch.device | str = "cpu") -> KernelCall | WriteCall:
    """The call of a case of any operation."""
    return build_write(case, device) if case.operation == "write" else build(case, device)


def attempt_any(case: Case, target: Target, call: Any = None) -> TriedCall:
    """Builds a case of any operation and runs a target on it."""
    return attempt_write(case, target, call) if case.operation == "write" else attempt(case, target, call)


def try_any(case: Case, target: Target) -> TriedCall | None:
    """As `try_case`, for any operation."""
    if case.operation == "attend":
        return try_case(case, target)
    try:
        return attempt_write(case, target) if case.live and can_run(case, target) else None
    except (IndexError, ValueError, RuntimeError):
        return None


def can_run(case: Case, target: Target) -> bool:
    """Whether a target takes a case: it has the arguments, and the case is within its limits."""
    call = call_of(case, target.device)
    return target.missing(call) is None and target.limits(call) is None


def try_case(case: Case, target: Target) -> Attempt | None:
    """A case on a target; None if it cannot be built or run there."""
    try:
        if case.live < 1 or not can_run(case, target):
            return None
        return attempt(case, target)
    except (IndexError, ValueError, RuntimeError):
        return None


def run_on(target: Target) -> precision.RunCase:
    """Runs cases on a target, for `precision`."""

    def run_case(case: Case) -> tuple[KernelCall, Truth] | None:
        if not can_run(case, target):
            return None
        done = attempt(case, target)
        return None if done.error else (done.call, done.truth)

    return run_case
