"""A picture in text: for each query of a sequence, which keys are missing, counted twice, or visible but should be hidden.

A query's output is a mean of values. If a kernel multiplies the weight of key k by r_k (0: missing, 2: counted twice), then

    sum over keys of r_k * weight_k * (value_k - output) = 0        in every head and dim

and the factors can be solved for, since all heads share them. Where no such factors explain the output, there is no picture.
"""

from __future__ import annotations

import torch

from quire.conformance.diagnosis.attempt import Attempt
from quire.conformance.faults.solve import SequenceWeights, weights_of_row
from quire.conformance.oracle import exact as x

MOST_KEYS = 96
MOST_QUERIES = 12
EXPLAINED = 6.0
"""Budgets by which the factors may miss the output."""
MARKS = "`.` correct weight, `x` missing, `2` counted twice, `+` visible but should be hidden"


def key_picture(done: Attempt) -> str:
    """The picture of the first wrong sequence that is short enough; empty if there is none, or it shows no such key."""
    call = done.call
    if call.live == 0 or call.out_scale is not None or not bool((done.ratios > 1).any()):
        return ""
    starts, lens = call.q_starts.tolist(), call.kv_lens.tolist()
    for seq in done.wrong_sequences:
        if not 0 < lens[seq] <= MOST_KEYS:
            continue
        rows = list(range(starts[seq], starts[seq + 1]))
        wrong = [row for row in rows if bool(done.wrong_rows[row])]
        lines = [_line(done, row, lens[seq]) for row in wrong[:MOST_QUERIES]]
        if all(lines) and any(mark in line for line in lines for mark in "x2+"):
            queries = f"first {len(lines)} of {len(wrong)} wrong queries" if len(wrong) > len(lines) else "wrong queries"
            head = f"sequence {seq}, {queries} by keys 0..{lens[seq] - 1}: {MARKS}"
            first = lens[seq] - len(rows) - starts[seq]
            return "\n".join((head, *(f"  query {first + row:4}  {line}" for row, line in zip(wrong, lines))))
    return ""


def _line(done: Attempt, row: int, keys: int) -> str:
    """The marks of one query's keys; empty if no factors explain its output."""
    place = weights_of_row(done.seen, row)
    if place is None:
        return ""
    mine, query = place
    got = done.out[row].double()
    if not bool(got.isfinite().all()):
        return ""
    factors = _factors(done, mine, query, row, got)
    if factors is None:
        return ""
    visible = mine.visible[query, :keys].tolist()
    marks = [_mark(float(r), bool(seen)) for r, seen in zip(factors, visible)]
    # Factors of zero solve the equations too.
    return "" if "?" in marks or "." not in marks else "".join(marks).rstrip()


def _factors(done: Attempt, mine: SequenceWeights, query: int, row: int, got: torch.Tensor) -> torch.Tensor | None:
    w = x.Work(done.call)
    bias = x.bias(w, mine.sequence, mine.visible.shape[1])
    logits = x.capped(w, mine.raw)[:, query] + (bias[:, query] if isinstance(bias, torch.Tensor) else bias)
    expected = mine.visible[query].double()
    top = logits.masked_fill(expected == 0, -torch.inf).amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, logits.amax(-1, keepdim=True))
    weights = torch.exp((logits - top).clamp(max=60))
    total = (weights * expected).sum(-1, keepdim=True).clamp(min=1e-30)
    weights = weights / total
    values = mine.v[:, mine.heads].transpose(0, 1)  # [q_heads, keys, dim]
    budget = done.truth.budget[row].clamp(min=1e-30)
    a = (weights[..., None] * (values - got[:, None, :]) / budget[:, None, :]).transpose(1, 2).reshape(-1, expected.numel())
    b = torch.zeros(a.shape[0], dtype=a.dtype)
    if mine.sinks is not None:
        sink = torch.exp((mine.sinks[:, None] - top).clamp(max=60)) / total
        b = (sink * got / budget).reshape(-1)
    # Keys whose weight is too small to show keep the factor that they should have.
    system = torch.cat((a, torch.eye(expected.numel(), dtype=a.dtype)))
    wanted = torch.cat((b, expected))
    found = torch.linalg.lstsq(system, wanted[:, None]).solution.flatten()
    missed = float((a @ found - b).abs().max())
    return found if missed <= EXPLAINED and bool(found.isfinite().all()) else None


def _mark(factor: float, visible: bool) -> str:
    if abs(factor) < 0.25:
        return "x" if visible else " "
    if abs(factor - 1) < 0.25:
        return "." if visible else "+"
    return "2" if abs(factor - 2) < 0.25 and visible else "?"
