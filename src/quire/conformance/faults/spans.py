"""Faults of spans: the interval of keys that each new token sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import TILES, has, with_visibility
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import BatchSequence, Stages, Work


def _changed(change: Callable[[torch.Tensor, KernelCall, BatchSequence], torch.Tensor]) -> Stages:
    """The spans of a sequence's new tokens [q_len, 2] are replaced by `change(spans of the call, call, sequence)`."""

    def visibility(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        assert w.call.spans is not None
        spans = w.call.spans.long().cpu().clone()
        spans[sequence.first : sequence.first + sequence.q_len] = change(spans, w.call, sequence)
        return oracle.visible_at(_with_spans(w, spans), sequence, distances, w.call.window)

    return with_visibility(visibility)


def _with_spans(w: Work, spans: torch.Tensor | None) -> Work:
    return Work(dataclasses.replace(w.call, spans=spans), w.number, w.factors)


def _ignored() -> Stages:
    """Causality in place of the spans."""
    return with_visibility(
        lambda w, sequence, distances: oracle.visible_at(_with_spans(w, None), sequence, distances, w.call.window)
    )


def _capped() -> Stages:
    """Of its span a query sees only keys up to its own position."""
    return with_visibility(
        lambda w, sequence, distances: oracle.visible_at(w, sequence, distances, w.call.window) & (distances >= 0)
    )


def _moved(begin: int, end: int) -> Stages:
    return _changed(lambda spans, call, sequence: _of(spans, sequence) + torch.tensor([begin, end]))


def _by_tile(tile: int) -> Stages:
    """Keys of the tile in which a span begins are visible."""

    def change(spans: torch.Tensor, call: KernelCall, sequence: BatchSequence) -> torch.Tensor:
        begin, end = _of(spans, sequence).unbind(1)
        return torch.stack((torch.where(begin < end, begin // tile * tile, begin), end), 1)

    return _changed(change)


def _of(spans: torch.Tensor, sequence: BatchSequence) -> torch.Tensor:
    return spans[sequence.first : sequence.first + sequence.q_len]


def _sees_later_keys(call: KernelCall) -> bool:
    if call.spans is None:
        return False
    ends, starts = call.spans[:, 1].cpu().long(), call.q_starts.tolist()
    for first, last, kv_len in zip(starts, starts[1:], call.kv_lens.tolist()):
        if bool((ends[first:last] > torch.arange(kv_len - last + first, kv_len) + 1).any()):
            return True
    return False


SPANS = (
    Fault(
        "spans-ignored",
        "spans",
        "queries see the keys up to their own position",
        "the spans are not passed: causality applies",
        _ignored,
        has("spans"),
    ),
    Fault(
        "spans-capped-by-causality",
        "spans",
        "queries see no key after their own position",
        "causality applies in addition to the spans",
        _capped,
        _sees_later_keys,
    ),
    Fault(
        "spans-off-by-one",
        "spans",
        "each query sees a key too many or too few at an end of its span",
        "the end of an interval belongs to it in one convention and not in the other",
        lambda begin, end: _moved(begin, end),
        has("spans"),
        ({"begin": 0, "end": 1}, {"begin": 0, "end": -1}, {"begin": 1, "end": 0}, {"begin": -1, "end": 0}),
    ),
    Fault(
        "spans-by-sequence",
        "spans",
        "tokens of all sequences but the first see the keys of other tokens' spans",
        "the row of a token is counted from the start of its sequence and not from the start of q",
        lambda: _changed(lambda spans, call, sequence: spans[: sequence.q_len].clone()),
        lambda call: call.spans is not None and call.seqs > 1,
    ),
    Fault(
        "spans-begin-by-tile",
        "spans",
        "keys before a span are visible if they are in the same tile as its first key",
        "tiles before the span are skipped, but the first remaining tile is not masked",
        lambda tile: _by_tile(tile),
        has("spans"),
        tuple({"tile": n} for n in TILES),
    ),
)
