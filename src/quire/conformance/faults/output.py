"""Faults of the output: rows, heads and dims that are exchanged, not written or wrong by a factor."""

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
        into.lse[rows] = torch.nan  # the LSE of such a row is not predicted
        return into

    return finished(finish)


def _moved(index: Any, parts: tuple[str, ...] = ("out", "weighted", "lse")) -> Stages:
    """Reorders elements: `index(tensor)` for each of these parts of the outcome."""

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
        "rows of the output keep the previous content of the memory",
        "no program computes the row: skipped because of its length, beyond the grid, or an early return",
        lambda rows: _unwritten(rows),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.unwritten_rows,
        symptom=True,
        inject=_last_row,
        issues=("vLLM #28905",),
    ),
    Fault(
        "elements-unwritten",
        "output",
        "some heads or dims of the output keep the previous content of the memory",
        "a grid or a vector width that does not divide the number of heads or dims",
        lambda heads=None, dims=None: _unwritten_elements(heads, dims),
        lambda call: call.live > 0 and call.q_heads > 1,
        tries=(),
        solve=solve.unwritten_elements,
        symptom=True,
        inject=lambda call: {"heads": [call.q_heads - 1], "dims": None},
        issues=("vLLM reshape_and_cache drops heads when Hk*D/x > 512",),
    ),
    Fault(
        "row-zero",
        "output",
        "rows of the output are zero",
        "the row is treated as empty",
        lambda rows: _zero(rows),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.zero_rows,
        symptom=True,
        inject=_last_row,
        issues=("FlashInfer #1654", "FlashInfer #3219"),
    ),
    Fault(
        "rows-swapped",
        "output",
        "rows contain the results of other rows",
        "rows are sorted for load balancing, and their order is not restored",
        lambda rows: _moved(lambda t: t[torch.tensor(rows)]),
        lambda call: call.live > 1,
        tries=(),
        solve=solve.row_map,
        inject=_swap_ends,
    ),
    Fault(
        "heads-swapped",
        "output",
        "heads contain the results of other heads",
        "the heads of a group are packed in one order and unpacked in another",
        lambda heads: _moved(lambda t: t[:, torch.tensor(heads)]),
        lambda call: call.q_heads > 1,
        tries=(),
        solve=solve.head_order,
        lasting=True,
        inject=lambda call: {"heads": list(range(call.q_heads))[::-1]},
    ),
    Fault(
        "dims-moved",
        "output",
        "dims of the output contain the results of other dims",
        "a vectorised store uses another order than the load",
        lambda dims: _moved(lambda t: t[..., torch.tensor(dims)], ("out", "weighted")),
        lambda call: call.out.shape[2] > 1,
        tries=(),
        solve=solve.dim_order,
        lasting=True,
        inject=lambda call: {"dims": [*range(1, call.out.shape[2]), 0]},
    ),
    Fault(
        "output-off-by-factor",
        "output",
        "all outputs are wrong by one factor",
        "an unrequested output scale, or a correction that is applied twice",
        lambda factor: _factor(factor),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.out_factor,
        lasting=True,
        inject=lambda call: {"factor": 1.5},
    ),
    Fault(
        "output-off-by-head-factors",
        "output",
        "the outputs of each head are wrong by a factor of their own",
        "scales per head are applied to the wrong head, or where there are none",
        lambda factors: _factor(factors),
        lambda call: call.q_heads > 1,
        tries=(),
        solve=solve.head_factors,
        lasting=True,
        inject=lambda call: {"factors": [1.0 + 0.25 * h for h in range(call.q_heads)]},
    ),
)
