"""Where an error is: the worst element with its expected and actual value, the faulty key, and the extent of the error."""

from __future__ import annotations

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.diagnosis.attempt import Attempt
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.budget import lse_ratios
from quire.conformance.oracle.exact import Stages
from quire.conformance.reporting.report import Finding, Where

SHOWN = 8
"""How much of a long list is shown."""


def where(done: Attempt, stages: Stages | None = None) -> Where:
    """The worst element, and the faulty key if the fault has one."""
    if done.error or not done.call.live:
        return Where()
    row, head, dim = worst_element(done)
    call = done.call
    starts, lens = call.q_starts.tolist(), call.kv_lens.tolist()
    seq = max((i for i in range(call.seqs) if starts[i] <= row), default=0)
    position = lens[seq] - (starts[seq + 1] - starts[seq]) + row - starts[seq]
    key, page, offset = _key(call, seq, row - starts[seq], stages)
    return Where(seq, row, position, head, dim, key, page, offset)


def worst_element(done: Attempt) -> tuple[int, int, int | None]:
    """Row, head and dim of the largest error; without a dim if only LSEs are wrong."""
    of_lse = _lse_alone(done)
    if of_lse is not None:
        row, head = divmod(int(of_lse.argmax()), of_lse.shape[1])
        return row, head, None
    # An element that is not finite is the worst; among those, the first.
    row, rest = divmod(int(done.ratios.argmax()), done.ratios.shape[1] * done.ratios.shape[2])
    head, dim = divmod(rest, done.ratios.shape[2])
    return row, head, dim


def values_at_worst(done: Attempt) -> tuple[float | None, float | None]:
    """Expected and actual value of the worst element."""
    if done.error or not done.call.live:
        return None, None
    row, head, dim = worst_element(done)
    if dim is None:
        assert done.lse is not None
        return float(done.truth.outcome.lse[row, head]), float(done.lse[row, head])
    return float(done.truth.outcome.out[row, head, dim]), float(done.out[row, head, dim])


def spread(done: Attempt) -> str:
    """Which elements are wrong, in words."""
    live = done.call.live
    of_lse = _lse_alone(done)
    wrong = (done.ratios if of_lse is None else of_lse[..., None]) > 1
    rows, heads, dims = (wrong.any(a).any(b) for a, b in ((2, 1), (2, 0), (1, 0)))
    starts = done.call.q_starts.tolist()
    seqs = [i for i in range(done.call.seqs) if bool(rows[starts[i] : starts[i + 1]].any())]
    words = [
        f"{int(wrong.sum())} of {wrong.numel()} " + ("elements" if of_lse is None else "LSEs, while the output is correct"),
        _some("sequences", seqs, done.call.seqs),
        _some("rows", rows.nonzero().flatten().tolist(), live),
        _some("heads", heads.nonzero().flatten().tolist(), done.call.q_heads),
        _constant_error(done, wrong[..., 0])
        if of_lse is not None
        else _some("dims", dims.nonzero().flatten().tolist(), wrong.shape[2]),
    ]
    return ", ".join(word for word in words if word)


def _constant_error(done: Attempt, wrong: torch.Tensor) -> str:
    """The error of the LSEs, if it is the same everywhere."""
    assert done.lse is not None
    steps = (done.lse[: done.call.live].double() - done.truth.outcome.lse[: done.call.live])[wrong]
    same = float(steps.max() - steps.min()) <= 2 * float(done.truth.lse_budget.max())
    return f"each by {float(steps.mean()):+.4g}" if same else ""


def _some(name: str, numbers: list[int], of: int) -> str:
    """`all rows`, or `rows 1,2,3`."""
    if len(numbers) == of:
        return f"all {name}"
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{name} {','.join(map(str, numbers[:SHOWN]))}{more}"


def _lse_alone(done: Attempt) -> torch.Tensor | None:
    """Error over budget of every LSE, if it is wrong and the output is not."""
    if done.lse is None or bool((done.ratios > 1).any()):
        return None
    found = lse_ratios(done.lse, done.truth, done.call.live)
    return found if bool((found > 1).any()) else None


def _key(call: KernelCall, seq: int, query: int, stages: Stages | None) -> tuple[int | None, int | None, int | None]:
    """Position, page and offset of the first key that a fault hides or shows wrongly, or reads from another slot."""
    if stages is None:
        return None, None, None
    try:
        key = _changed_key(call, seq, query, stages)
    except (RuntimeError, IndexError):
        key = None
    if key is None:
        return None, None, None
    column, offset = divmod(int(x.key_numbers(call, torch.tensor([key]))), call.page_size)
    page = int(call.page_table[seq, column]) if column < call.page_table.shape[1] else None
    return key, page, offset


def _changed_key(call: KernelCall, seq: int, query: int, stages: Stages) -> int | None:
    w = x.Work(call)
    at = x.read(w)
    sequence = x.sequences(w, at)[seq]
    n = sequence.kv_len
    if stages.visibility is not x.visibility:
        changed = stages.visibility(w, sequence, n)[query] != x.visibility(w, sequence, n)[query]
    elif stages.locate is not x.locate or stages.read is not x.read:
        positions = torch.arange(n)
        a, b = x.locate(w, at, sequence, positions), stages.locate(w, stages.read(w), sequence, positions)
        changed = (a[0] != b[0]) | (a[1] != b[1])
    else:
        return None
    keys = changed.nonzero().flatten()
    return int(keys[0]) if keys.numel() else None


def cell(finding: Finding, call: KernelCall) -> tuple[int, int] | None:
    """Sequence and column of the page of the faulty key, where one is known."""
    place = finding.where
    if place.sequence is None or place.key is None:
        return None
    return place.sequence, int(x.key_numbers(call, torch.tensor([place.key]))) // call.page_size
