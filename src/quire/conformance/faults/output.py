"""Faults of the output: rows, heads and dims in the wrong place, or nowhere."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import finished
from quire.conformance.oracle.exact import Outcome, Stages, Work


def _unwritten(rows: list[int]) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.written[rows] = False
        return into

    return finished(finish)


def _unwritten_elements(heads: list[int] | None, dims: list[int] | None) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        if heads is not None:
            into.written[:, heads] = False
        if dims is not None:
            into.written[:, :, dims] = False
        return into

    return finished(finish)


def _zero(rows: list[int]) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.out[rows] = 0.0
        into.lse[rows] = torch.nan  # whatever goes with a row that was taken for an empty one
        return into

    return finished(finish)


def _moved(index: Any, parts: tuple[str, ...] = ("out", "weighted", "lse")) -> Stages:
    """Elements come from elsewhere: `index(tensor)` for each of these parts."""

    def finish(w: Work, into: Outcome) -> Outcome:
        live = w.call.live
        for name in parts:
            tensor = getattr(into, name)
            tensor[:live] = index(tensor[:live].clone())
        return into

    return finished(finish)


def _factor(factor: Any) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        f = torch.as_tensor(factor, dtype=into.out.dtype).reshape(1, -1, 1)
        into.out, into.weighted = into.out * f, into.weighted * f.abs()
        return into

    return finished(finish)


def _last_row(call: KernelCall) -> dict[str, Any]:
    return {"rows": [call.live - 1]}


def _swap_ends(call: KernelCall) -> dict[str, Any]:
    rows = list(range(call.live))
    rows[0], rows[-1] = rows[-1], rows[0]
    return {"rows": rows}


OUTPUT = (
    Fault(
        "row-unwritten",
        "output",
        "rows of the output keep what the memory held before",
        "a row that no program takes: skipped by its length, beyond the grid, returned early",
        lambda rows: _unwritten(rows),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.unwritten_rows,
        symptom=True,
        plant=_last_row,
        issues=("vLLM #28905",),
    ),
    Fault(
        "elements-unwritten",
        "output",
        "some heads or some dims of the output keep what the memory held before",
        "a grid or a vector width that does not divide",
        lambda heads=None, dims=None: _unwritten_elements(heads, dims),
        lambda call: call.live > 0 and call.q_heads > 1,
        tries=(),
        solve=solve.unwritten_elements,
        symptom=True,
        plant=lambda call: {"heads": [call.q_heads - 1], "dims": None},
        issues=("vLLM reshape_and_cache drops heads when Hk*D/x > 512",),
    ),
    Fault(
        "row-zero",
        "output",
        "rows of the output are zero",
        "a row that is taken for an empty one",
        lambda rows: _zero(rows),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.zero_rows,
        symptom=True,
        plant=_last_row,
        issues=("FlashInfer #1654", "FlashInfer #3219"),
    ),
    Fault(
        "rows-swapped",
        "output",
        "rows hold each other's results",
        "rows are sorted for balance and not sorted back",
        lambda rows: _moved(lambda t: t[torch.tensor(rows)]),
        lambda call: call.live > 1,
        tries=(),
        solve=solve.row_map,
        plant=_swap_ends,
    ),
    Fault(
        "heads-swapped",
        "output",
        "heads hold each other's results",
        "heads of a group are unpacked in another order than they were packed",
        lambda heads: _moved(lambda t: t[:, torch.tensor(heads)]),
        lambda call: call.q_heads > 1,
        tries=(),
        solve=solve.head_order,
        lasting=True,
        plant=lambda call: {"heads": list(range(call.q_heads))[::-1]},
    ),
    Fault(
        "dims-moved",
        "output",
        "dims of the output hold each other's results",
        "a vectorised store with another order than the load",
        lambda dims: _moved(lambda t: t[..., torch.tensor(dims)], ("out", "weighted")),
        lambda call: call.out.shape[2] > 1,
        tries=(),
        solve=solve.dim_order,
        lasting=True,
        plant=lambda call: {"dims": [*range(1, call.out.shape[2]), 0]},
    ),
    Fault(
        "output-off-by-factor",
        "output",
        "every output is too large or too small by one factor",
        "a scale of the output that nobody asked for, or a correction applied twice",
        lambda factor: _factor(factor),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.out_factor,
        lasting=True,
        plant=lambda call: {"factor": 1.5},
    ),
    Fault(
        "output-off-by-head-factors",
        "output",
        "every head's output is off by a factor of its own",
        "scales per head, applied to the wrong head or where there are none",
        lambda factors: _factor(factors),
        lambda call: call.q_heads > 1,
        tries=(),
        solve=solve.head_factors,
        lasting=True,
        plant=lambda call: {"factors": [1.0 + 0.25 * h for h in range(call.q_heads)]},
    ),
)
