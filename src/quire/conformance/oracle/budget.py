"""How far from exact a kernel may be: twice what an honest computation in the same precision loses on the same call.

The honest computations are the exact pipeline, run in fp32, and, where a kernel gets 16-bit queries, run in fp32 with queries,
keys, weights and values each rounded once to that type before they are multiplied: what matrix units do. Their error, relative to
the weighted magnitudes of the values, is taken at its worst over the call, so that luck in one row buys nothing; on top comes one
rounding of the output itself. Under `out_scale` all of this is divided by the scale, and an output beyond the range of its fp8 type
must be the largest number of the type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.exact import PLAIN, Outcome, Stages, exact
from quire.conformance.oracle.rounding import Narrow

SMALL = 2.0**-23
LOG2_E = 1.4426950408889634
LIFT = 2.0


@dataclass
class Truth:
    """What a call must give, and how far off it may be."""

    outcome: Outcome
    budget: torch.Tensor
    """[tokens, q_heads, v_head_dim]"""
    lse_budget: torch.Tensor
    """[tokens, q_heads]"""


def truth(call: KernelCall, stages: Stages = PLAIN, losses: tuple[float, float] | None = None, only: int | None = None) -> Truth:
    """The pipeline's outcome with its budget. `losses` are those of the plain call, if they are known: a fault does not make
    arithmetic coarser."""
    outcome = as_stored(call, exact(call, stages, only=only))
    lost, lost_lse = honest_losses(call) if losses is None else losses
    budget = allowed(lost, outcome.weighted, outcome.out, call.out.dtype)
    lse_budget = LIFT * lost_lse + 8 * SMALL * outcome.lse.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1)
    return Truth(outcome, budget, lse_budget)


def allowed(lost: float, weighted: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far each element of an output of this type may be off: twice what an honest computation loses, and one rounding."""
    rounding = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * rounding
    # What is rounded is not the exact number but one that is `lost` away from it: with few bits this counts.
    return LIFT * lost * (1 + rounding) * weighted + rounding * out.abs() + smallest


def least_loss(top: float, step: float, head_dim: int = 64) -> float:
    """The least loss that is allowed for: an fp32 rounding of the largest logit, in base 2 as kernels compute it; the roundings of
    a sum over `head_dim` products; and one step of the type that factors are rounded to."""
    # A sequential fp32 sum of n terms rounds n times, each time by up to half a unit of the partial sum. For partial sums that grow
    # like sqrt(i) the standard deviation is about 0.2 * sqrt(n) units of the final sum.
    return max(4.0, top * (LOG2_E + math.sqrt(head_dim) / 4)) * SMALL + step


def as_stored(call: KernelCall, outcome: Outcome) -> Outcome:
    """An outcome in the units of the output: divided by `out_scale` and saturated, before the last rounding."""
    if call.out_scale is None:
        return outcome
    largest = torch.finfo(call.out.dtype).max
    out = (outcome.out / call.out_scale).clamp(-largest, largest)
    return replace(outcome, out=out, weighted=outcome.weighted / call.out_scale)


def honest_losses(call: KernelCall, stages: Stages = PLAIN, narrow: Narrow | None = None) -> tuple[float, float]:
    """The worst relative error of an honest computation, and the worst error of its LSE; if its factors are as narrow as that."""
    right = exact(call, stages)
    factors = factor_type(call) if narrow is None else narrow
    tries = [exact(call, stages, torch.float32)]
    if factors is not None:
        tries.append(exact(call, stages, torch.float32, factors))
    step = 0.0 if factors is None else factors.step if isinstance(factors, Narrow) else torch.finfo(factors).eps / 2
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
    """The type that a kernel's factors may have: that of its queries, unless they are fp32."""
    return None if call.q.dtype is torch.float32 else call.q.dtype


def distance(out: torch.Tensor, lse: torch.Tensor | None, unwritten: torch.Tensor, want: Truth, live: int) -> tuple[float, float]:
    """How far an output is from a truth, in budgets: at most 1 is a match. For the output and for the LSE."""
    return float(ratios(out, unwritten, want, live).max()) if live else 0.0, lse_distance(lse, want, live)


def ratios(out: torch.Tensor, unwritten: torch.Tensor, want: Truth, live: int) -> torch.Tensor:
    """Error over budget of every live element; infinite where a number is missing or should be missing."""
    got, right = out[:live].double(), want.outcome.out[:live]
    off = (got - right).abs() / want.budget[:live]
    off = torch.where((got == right) | (got.isnan() & right.isnan()), 0.0, off).nan_to_num(torch.inf, torch.inf, torch.inf)
    kept = ~want.outcome.written[:live]
    bare = unwritten[:live]
    return torch.where(kept, torch.where(bare, 0.0, torch.inf), torch.where(bare & (off > 1), torch.inf, off))


def lse_distance(lse: torch.Tensor | None, want: Truth, live: int) -> float:
    return 0.0 if lse is None or not live else float(lse_ratios(lse, want, live).max())


def lse_ratios(lse: torch.Tensor, want: Truth, live: int) -> torch.Tensor:
    """Error over budget of every live LSE. A fault that does not say what becomes of an LSE predicts NaN there."""
    got, right = lse[:live].double(), want.outcome.lse[:live]
    off = (got - right).abs() / want.lse_budget[:live]
    free = right.isnan() | ~want.outcome.written[:live, :, 0]
    return torch.where((got == right) | free, 0.0, off).nan_to_num(torch.inf, torch.inf, torch.inf)
