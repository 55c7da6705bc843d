"""Faults of selections: which keys the entries select, and for whom."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Stages, Work


def _selects(call: KernelCall) -> bool:
    return call.select_positions is not None or call.select_columns is not None


def _entries(change: Callable[[Work, torch.Tensor], torch.Tensor]) -> Stages:
    """The entries of a sequence, [queries, kv_heads, n], are `change(w, entries)`. Keys that this adds are read."""

    def selection(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | None:
        return oracle.picked(w, sequence, keys, change(w, oracle.selected_entries(w, sequence)))

    return PLAIN.replace(selection=selection)


def _has_own_heads(call: KernelCall) -> bool:
    return any(x is not None and x.shape[1] > 1 for x in (call.select_positions, call.select_columns))


def _ignored() -> Stages:
    return PLAIN.replace(selection=lambda w, sequence, keys: None)


def _first_query() -> Stages:
    """All queries of a sequence have the entries of its first one."""
    return _entries(lambda w, entries: entries[:1].expand_as(entries))


SELECT = (
    Fault(
        "select-ignored",
        "select",
        "queries attend to all keys",
        "the selection is not passed",
        _ignored,
        _selects,
    ),
    Fault(
        "select-neighbouring-head",
        "select",
        "each head attends to the keys of another head",
        "the entries of the next kv head are read, for example because the stride of heads is wrong",
        lambda: _entries(lambda w, entries: entries.roll(-1, 1)),
        _has_own_heads,
    ),
    Fault(
        "select-first-head",
        "select",
        "all heads attend to the keys of the first head",
        "entries that differ by head are read as if they were shared",
        lambda: _entries(lambda w, entries: entries[:, :1].expand_as(entries)),
        _has_own_heads,
    ),
    Fault(
        "select-first-query",
        "select",
        "all queries of a sequence attend to the keys of its first query",
        "positions are read once for a sequence and not for each query",
        _first_query,
        lambda call: call.select_positions is not None and bool((call.q_starts.diff() > 1).any()),
    ),
    Fault(
        "select-last-entry-missing",
        "select",
        "the key or page of the last entry is missing",
        "the last entry of a row is taken for padding",
        lambda: _entries(lambda w, entries: entries.index_fill(2, torch.tensor([entries.shape[2] - 1]), -1)),
        lambda call: (
            _selects(call)
            and any(x is not None and bool((x[..., -1] >= 0).any()) for x in (call.select_positions, call.select_columns))
        ),
    ),
)
