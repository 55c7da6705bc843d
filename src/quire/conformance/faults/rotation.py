"""Faults of writes that rotate: positions, pairs, norms, and what is rotated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quire.conformance.cases.write_call import WriteCall
from quire.conformance.faults.fault import Fault, Parameters
from quire.conformance.faults.written_places import like_parts, own_positions, prepared, sequences_of
from quire.conformance.oracle import write as oracle
from quire.conformance.oracle.write import RIGHT, Rows, WriteOutcome, WriteStages, WriteWork

PARTS: tuple[Parameters, ...] = ({"parts": "kq"}, {"parts": "k"}, {"parts": "q"})
"""Keys and queries, or one of them."""


def _positions(change: Callable[[WriteWork], torch.Tensor]) -> WriteStages:
    """Tokens are rotated by positions `change(w)`, within the tables."""

    def positions(w: WriteWork) -> torch.Tensor:
        assert w.call.cos is not None
        return change(w).clamp(0, w.call.cos.shape[0] - 1)

    return RIGHT.replace(positions=positions)


def _last_positions(w: WriteWork) -> torch.Tensor:
    return torch.tensor(w.case.kv_lens)[sequences_of(w.call)[0]] - 1


def _rotation(change: Callable[[WriteWork, Rows, torch.Tensor], Rows], parts: str = "kq") -> WriteStages:
    """Keys and queries are rotated by `change(w, rows, positions)`."""

    def rotate(w: WriteWork, part: str, rows: Rows, at: torch.Tensor) -> Rows:
        return change(w, rows, at) if part in parts else oracle.rotate(w, part, rows, at)

    return RIGHT.replace(rotate=rotate)


def _right(w: WriteWork, rows: Rows, at: torch.Tensor) -> Rows:
    return oracle.rotate(w, "k", rows, at)


def _with_pairs(pairs: Callable[[WriteWork], tuple[torch.Tensor, torch.Tensor]], sign: float = 1.0) -> WriteStages:
    return _rotation(lambda w, rows, at: oracle.rotated(w, rows, at, pairs(w), sign))


def _of_whole_head(w: WriteWork) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of the two halves of a head, although only a part of it is rotated."""
    first = torch.arange(w.case.rotated // 2)
    return first, first + w.case.head_dim // 2


def _at_the_end(w: WriteWork) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = oracle.pairs_of(w, w.call.interleaved)
    return tuple(at + w.case.head_dim - w.case.rotated for at in (first, second))  # type: ignore[return-value]


def _in_place(w: WriteWork, rows: Rows, at: torch.Tensor) -> Rows:
    """The second element of a pair is made from the first one after its rotation."""
    first, second = oracle.pairs_of(w, w.call.interleaved)
    right = _right(w, rows, at)
    assert w.call.cos is not None and w.call.sin is not None
    cos, sin = (table.cpu().double()[at][:, None] for table in (w.call.cos, w.call.sin))
    x = right.x.clone()
    x[..., second] = rows.x[..., second] * cos + right.x[..., first] * sin
    return right._replace(x=x)


def _tables_swapped() -> WriteStages:
    def change(w: WriteWork, rows: Rows, at: torch.Tensor) -> Rows:
        return _right(WriteWork(replace(w.call, cos=w.call.sin, sin=w.call.cos)), rows, at)

    return _rotation(change)


def _norms(change: Callable[[WriteWork, str, Rows, torch.Tensor], Rows], parts: str = "kq") -> WriteStages:
    """Heads are normalised by `change(w, part, rows, weight)`."""

    def norm(w: WriteWork, part: str, rows: Rows) -> Rows:
        weight = oracle.weight_of(w, part)
        return rows if weight is None else change(w, part, rows, weight) if part in parts else oracle.norm(w, part, rows)

    return RIGHT.replace(norm=norm)


def _norm_last() -> WriteStages:
    def turn(w: WriteWork, s: WriteStages, part: str, rows: Rows, at: torch.Tensor) -> Rows:
        return s.norm(w, part, s.rotate(w, part, rows, at))

    return RIGHT.replace(turn=turn)


def _weight_of_other(w: WriteWork, part: str, rows: Rows, weight: torch.Tensor) -> Rows:
    other = oracle.weight_of(w, "k" if part == "q" else "q")
    return oracle.normalised(rows, weight if other is None else other, w.call.eps)


def _other_offset(w: WriteWork, part: str, rows: Rows, weight: torch.Tensor) -> Rows:
    return oracle.normalised(rows, weight + (-1.0 if w.call.unit_offset else 1.0), w.call.eps)


def _without_mean(w: WriteWork, part: str, rows: Rows, weight: torch.Tensor) -> Rows:
    return oracle.normalised(rows._replace(x=rows.x - rows.x.mean(-1, keepdim=True)), weight, w.call.eps)


def _queries_of_skipped_missing() -> WriteStages:
    def finish(w: WriteWork, into: WriteOutcome) -> WriteOutcome:
        if into.q_written is not None:
            into.q_written &= w.live_slots >= 0
        return into

    return RIGHT.replace(finish=finish)


def _rotates(call: WriteCall) -> bool:
    return call.case.rotated > 0


def _normalises(call: WriteCall) -> bool:
    return call.k_norm is not None


def _positions_differ(other: Callable[[WriteCall], torch.Tensor]) -> Callable[[WriteCall], bool]:
    """Whether tokens are rotated by other positions than these."""
    return lambda call: call.positions is not None and bool((other(call) != call.positions[: call.live].cpu()).any())


ROTATION = (
    Fault(
        "rope-pairs-exchanged",
        "writes: rotation",
        "interleaved pairs of elements are rotated where half-split ones should be, or the other way round",
        "models of both kinds exist: Llama and GPT-NeoX pair i with i + rotary_dim / 2, GPT-J pairs 2i with 2i + 1",
        lambda: _with_pairs(lambda w: oracle.pairs_of(w, not w.call.interleaved)),
        lambda call: call.case.rotated > 2,
    ),
    Fault(
        "rope-direction-inverted",
        "writes: rotation",
        "keys and queries are rotated in the other direction",
        "the sign of the sine is exchanged between the two elements of a pair",
        lambda: _with_pairs(lambda w: oracle.pairs_of(w, w.call.interleaved), -1.0),
        _rotates,
    ),
    Fault(
        "rope-position-off",
        "writes: rotation",
        "tokens are rotated by the position after or before their own",
        "positions are computed from lengths that do, or do not, count the new token",
        lambda by: _positions(lambda w: oracle.positions(w) + by),
        _rotates,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "rope-position-of-row",
        "writes: rotation",
        "tokens are rotated by their row in the batch",
        "the row of a token is taken for its position in its sequence",
        lambda: _positions(lambda w: torch.arange(w.call.live)),
        _positions_differ(lambda call: torch.arange(call.live)),
    ),
    Fault(
        "rope-position-without-context",
        "writes: rotation",
        "tokens are rotated by their number among the new tokens of their sequence",
        "the context is not added: positions begin with 0 in every step",
        lambda: _positions(lambda w: sequences_of(w.call)[1]),
        _positions_differ(lambda call: sequences_of(call)[1]),
    ),
    Fault(
        "rope-position-of-last-token",
        "writes: rotation",
        "all new tokens of a sequence are rotated by the position of its last one",
        "a kernel for decodes computes one position for each sequence",
        lambda: _positions(_last_positions),
        lambda call: _rotates(call) and any(q > 1 for q in call.case.q_lens),
    ),
    Fault(
        "rope-positions-ignored",
        "writes: rotation",
        "tokens are rotated by their positions in their sequences, although others are given",
        "positions are computed from lengths alone",
        lambda: _positions(lambda w: own_positions(w.call)),
        _positions_differ(own_positions),
    ),
    Fault(
        "rope-missing",
        "writes: rotation",
        "keys, queries or both are not rotated",
        "the rotation is left to another kernel",
        lambda parts: _rotation(lambda w, rows, at: rows, parts),
        _rotates,
        PARTS,
    ),
    Fault(
        "rope-twice",
        "writes: rotation",
        "keys, queries or both are rotated twice",
        "the model has rotated them before the write",
        lambda parts: _rotation(lambda w, rows, at: _right(w, _right(w, rows, at), at), parts),
        _rotates,
        PARTS,
    ),
    Fault(
        "rope-values-rotated",
        "writes: rotation",
        "values are rotated as keys are",
        "one function stores both",
        lambda: prepared(lambda w, s, part, rows: oracle.rotate(w, part, rows, s.positions(w)), "v"),
        lambda call: _rotates(call) and like_parts(call),
    ),
    Fault(
        "rope-partial-ignored",
        "writes: rotation",
        "elements are paired with those of the other half of the head, although only a part of it is rotated",
        "rotary_dim is taken to be head_dim",
        lambda: _with_pairs(_of_whole_head),
        lambda call: 0 < call.case.rotated < call.case.head_dim and not call.interleaved and call.case.head_dim % 2 == 0,
    ),
    Fault(
        "rope-at-the-end",
        "writes: rotation",
        "the last elements of a head are rotated, and not the first",
        "DeepSeek's heads have the rotated elements at the end",
        lambda: _with_pairs(_at_the_end),
        lambda call: 0 < call.case.rotated < call.case.head_dim,
    ),
    Fault(
        "rope-in-place",
        "writes: rotation",
        "the second element of each pair is made from the first one after its rotation",
        "both elements are rotated in place, one after the other",
        lambda: _rotation(_in_place),
        _rotates,
    ),
    Fault(
        "rope-tables-swapped",
        "writes: rotation",
        "sines are taken for cosines and cosines for sines",
        "the halves of a packed table of cosines and sines are exchanged",
        _tables_swapped,
        _rotates,
    ),
    Fault(
        "rope-queries-of-skipped-tokens-missing",
        "writes: rotation",
        "queries of tokens with slot -1 are not written",
        "a kernel returns early where there is nothing to store",
        _queries_of_skipped_missing,
        lambda call: call.q is not None and bool((call.slots[: call.live] < 0).any()),
    ),
    Fault(
        "norm-after-rotation",
        "writes: rotation",
        "heads are rotated first and normalised after that",
        "the norm is fused at the wrong side of the rotation: its weight then belongs to other elements",
        _norm_last,
        _normalises,
    ),
    Fault(
        "norm-missing",
        "writes: rotation",
        "keys, queries or both are not normalised",
        "QK norm belongs to some models only",
        lambda parts: _norms(lambda w, part, rows, weight: rows, parts),
        _normalises,
        PARTS,
    ),
    Fault(
        "norm-weight-ignored",
        "writes: rotation",
        "normalised heads are not multiplied by their weight",
        "the weight is not passed",
        lambda: _norms(lambda w, part, rows, weight: oracle.normalised(rows, torch.ones_like(weight), w.call.eps)),
        _normalises,
    ),
    Fault(
        "norm-weights-swapped",
        "writes: rotation",
        "keys are multiplied by the weight of queries, and queries by that of keys",
        "two arguments of the same shape are exchanged",
        lambda: _norms(_weight_of_other),
        lambda call: _normalises(call) and call.q is not None,
    ),
    Fault(
        "norm-offset-exchanged",
        "writes: rotation",
        "heads are multiplied by 1 + weight where it should be the weight, or the other way round",
        "Gemma stores weights minus 1",
        lambda: _norms(_other_offset),
        _normalises,
    ),
    Fault(
        "norm-over-all-heads",
        "writes: rotation",
        "the mean of squares is that of all heads of a token",
        "some models normalise the whole projection before it is split into heads",
        lambda: _norms(lambda w, part, rows, weight: oracle.normalised(rows, weight, w.call.eps, (-2, -1))),
        lambda call: _normalises(call) and call.case.kv_heads > 1,
    ),
    Fault(
        "norm-subtracts-mean",
        "writes: rotation",
        "the mean of a head is subtracted before it is normalised",
        "LayerNorm instead of RMSNorm",
        lambda: _norms(_without_mean),
        _normalises,
    ),
)
