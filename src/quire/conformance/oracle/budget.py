"""The error budget of a kernel: twice the error of a straightforward computation in the same precision on the same call.

The straightforward computation is the exact pipeline in fp32. With 16-bit queries it is also run with queries, keys, weights and
values each rounded once to that type before they are multiplied, as matrix units do. With 8-bit queries only weights and values
are rounded to 8 bits, and factors of q·k to bf16. Its error, relative to the weighted magnitudes of the values, is the largest
over the call, so that one accurate row does not tighten the budget. One rounding of the output is added. With `out_scale`,
outputs and budgets are divided by the scale, and an output beyond the range of its fp8 type must be the largest number of the
type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.exact import PLAIN, Outcome, Stages, exact
from quire.conformance.oracle.rounding import ReducedPrecision

SMALL = 2.0**-23
LOG2_E = 1.4426950408889634
SAFETY_FACTOR = 2.0
"""How many times the error of the straightforward computation is allowed."""


@dataclass
class Truth:
    """The correct result of a call, and the error budget of every element."""

    outcome: Outcome
    budget: torch.Tensor
    """[tokens, q_heads, v_head_dim]"""
    lse_budget: torch.Tensor
    """[tokens, q_heads]"""


def truth(call: KernelCall, stages: Stages = PLAIN, losses: tuple[float, float] | None = None, only: int | None = None) -> Truth:
    """The outcome of the pipeline and its budget. `losses` are the `rounding_losses` of the correct call, if they are known; they
    are the same with a fault."""
    outcome = as_stored(call, exact(call, stages, only=only))
    lost, lost_lse = rounding_losses(call) if losses is None else losses
    budget = allowed(lost, outcome.weighted, outcome.out, call.out.dtype)
    lse_budget = SAFETY_FACTOR * lost_lse + 8 * SMALL * outcome.lse.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1)
    return Truth(outcome, budget, lse_budget)


def allowed(lost: float, weighted: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The budget of each element of an output of this dtype: `SAFETY_FACTOR` times the loss, and one rounding of the output."""
    rounding = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * rounding
    # The number that is rounded is up to `lost` away from the exact one, which matters for types with few bits.
    return SAFETY_FACTOR * lost * (1 + rounding) * weighted + rounding * out.abs() + smallest


def least_loss(top: float, step: float, head_dim: int = 64) -> float:
    """The smallest loss that is allowed: one fp32 rounding of the largest logit, in base 2 as kernels compute it; the roundings of
    a sum over `head_dim` products; and one rounding step of the type of the factors."""
    # A sequential fp32 sum of n terms rounds n times, each time by up to half a unit of the partial sum. For partial sums that grow
    # like sqrt(i) the standard deviation is about 0.2 * sqrt(n) units of the final sum.
    return max(4.0, top * (LOG2_E + math.sqrt(head_dim) / 4)) * SMALL + step


def as_stored(call: KernelCall, outcome: Outcome) -> Outcome:
    """An outcome in the units of the output: divided by `out_scale` and saturated, but not rounded."""
    if call.out_scale is None:
        return outcome
    largest = torch.finfo(call.out.dtype).max
    out = (outcome.out / call.out_scale).clamp(-largest, largest)
    return replace(outcome, out=out, weighted=outcome.weighted / call.out_scale)


def rounding_losses(
    call: KernelCall, stages: Stages = PLAIN, factors: ReducedPrecision | None = None, right: Outcome | None = None
) -> tuple[float, float]:
    """The largest relative error of a straightforward computation in the precision of a kernel, and the largest error of its LSE.
    `factors` is the type to which factors are rounded, by default that of the queries; `right` is the exact outcome, if it is
    known."""
    right = exact(call, stages) if right is None else right
    rounded = factor_type(call) if factors is None else factors
    tries = [exact(call, stages, torch.float32)]
    if rounded is not None:
        tries.append(exact(call, stages, torch.float32, rounded))
    step = 0.0 if rounded is None else rounded.step if isinstance(rounded, ReducedPrecision) else torch.finfo(rounded).eps / 2
    lost, lost_lse = least_loss(right.top, step, call.q.shape[2]), 0.0
    live = slice(0, call.live)
    for plain in tries:
        error = (plain.out[live].double() - right.out[live]).abs() / right.weighted[live].clamp(min=1e-30)
        error = torch.where(right.weighted[live] > 0, error, 0.0)
        lse = (plain.lse[live].double() - right.lse[live]).abs().nan_to_num(0.0, 0.0, 0.0)
        if error.numel():
            lost, lost_lse = max(lost, float(error.max())), max(lost_lse, float(lse.max()))
    return lost, lost_lse


def factor_type(call: KernelCall) -> torch.dtype | None:
    """The type to which a kernel may round factors: that of the queries; None if they are fp32."""
    return None if call.q.dtype is torch.float32 else call.q.dtype


def distance(out: torch.Tensor, lse: torch.Tensor | None, unwritten: torch.Tensor, want: Truth, live: int) -> tuple[float, float]:
    """The largest error divided by its budget, of the output and of the LSE: a match is at most 1."""
    return float(ratios(out, unwritten, want, live).max()) if live else 0.0, lse_distance(lse, want, live)


def ratios(out: torch.Tensor, unwritten: torch.Tensor, want: Truth, live: int) -> torch.Tensor:
    """Error divided by budget, for every element of a live row; infinite where a number is missing or must not be written."""
    got, right = out[:live].double(), want.outcome.out[:live]
    off = (got - right).abs() / want.budget[:live]
    off = torch.where((got == right) | (got.isnan() & right.isnan()), 0.0, off).nan_to_num(torch.inf, torch.inf, torch.inf)
    kept = ~want.outcome.written[:live]
    bare = unwritten[:live]
    return torch.where(kept, torch.where(bare, 0.0, torch.inf), torch.where(bare & (off > 1), torch.inf, off))


def lse_distance(lse: torch.Tensor | None, want: Truth, live: int) -> float:
    return 0.0 if lse is None or not live else float(lse_ratios(lse, want, live).max())


def lse_ratios(lse: torch.Tensor, want: Truth, live: int) -> torch.Tensor:
    """Error divided by budget, for the LSE of every live row. A NaN in `want` means that a fault does not predict this LSE."""
    got, right = lse[:live].double(), want.outcome.lse[:live]
    off = (got - right).abs() / want.lse_budget[:live]
    free = right.isnan() | ~want.outcome.written[:live, :, 0]
    return torch.where((got == right) | free, 0.0, off).nan_to_num(torch.inf, torch.inf, torch.inf)
