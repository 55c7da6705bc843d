"""A work unit: a tile of query rows of one sequence and one key head, or a few key heads. From loading queries to storing
output."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.device.features import add_sink, keys_before, load_slopes, query_position, selected_row, visible_range
from quire.kernels.triton.device.formats import GROUPED_FACTOR, decode, encode
from quire.kernels.triton.device.partials import empty_softmax, merge_softmax
from quire.kernels.triton.device.schedule import lengths, uniform
from quire.kernels.triton.device.tiles import to_dot_type

LN2 = tl.constexpr(0.6931471805599453)


class WorkUnit(NamedTuple):
    """Which queries a unit has, and which keys they see: a subset of [low, high)."""

    seq: Any
    start: Any
    """The first new token of the sequence."""
    context: Any
    """The position of that token."""
    cached: Any
    """Keys below come from pages, others from `New`."""
    low: Any
    high: Any
    all_from: Any
    """Keys [all_from, all_to) are visible to every query of the unit."""
    all_to: Any
    visible_from: Any
    """`[ROWS]`: the first visible key of each query, and the one after the last. Not used with a tree mask."""
    visible_to: Any
    kv_head: Any
    """The first one, if a tile has several key heads."""
    member: Any
    """`[ROWS]`, like the following fields: which of the tile's key heads."""
    token: Any
    head: Any
    live: Any
    position: Any
    """In the sequence."""
    slope: Any
    selected: Any
    """Where the unit's entries of a selection begin; 0 without one."""


@triton.jit
def locate_unit(batch, features, seq, q_tile, head, T: tl.constexpr, C: tl.constexpr):
    """The unit of one query tile of a sequence and one head index."""
    start, q_len, kv_len = lengths(batch, seq, True)
    return make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, tl.arange(0, T.ROWS), T, C)


@triton.jit
def make_unit(
    batch, features, seq, start, q_len, kv_len, q_tile, head, index, T: tl.constexpr, C: tl.constexpr, low=None, high=None
):  # fmt: skip
    """The same for the query rows `index` of the tile, with the lengths of the sequence given. If these are not all rows and there
    are spans, `low` and `high` are those of all rows."""
    context = kv_len - q_len
    member = index * 0
    if T.HEADS_PER_TILE > 1:
        kv_head = head * T.HEADS_PER_TILE
        member = index // (T.TOKENS * C.GROUP)
        local = index % (T.TOKENS * C.GROUP) // C.GROUP
        of_group = index % C.GROUP
    elif C.GROUP < T.ROWS:
        kv_head = head
        local = index // C.GROUP
        of_group = index % C.GROUP
    else:
        PARTS: tl.constexpr = T.HEADS // C.KV_HEADS
        kv_head = head // PARTS
        local = index * 0
        of_group = (head % PARTS) * T.ROWS + index
    first = q_tile * T.TOKENS
    nth = first + local
    live = (member < T.HEADS_PER_TILE) & (local < T.TOKENS) & (of_group < C.GROUP) & (nth < q_len)
    token = start + nth
    q_head = (kv_head + member) * C.GROUP + of_group
    last = tl.minimum(first + T.TOKENS, q_len) - 1

    position = query_position(features, token, context + nth, live)
    lowest, highest, all_from, all_to, visible_from, visible_to = visible_range(
        batch, seq, context, first, last, position, q_len, kv_len, token, live, C
    )
    if low is None:
        low = lowest
        high = highest
    if C.SPANS:
        low = uniform(low, C)
        high = uniform(high, C)
        all_from = uniform(all_from, C)
        all_to = uniform(all_to, C)
    cached = kv_len
    if C.NEW:
        cached = tl.where(q_len >= C.CONTEXT_FROM, context, kv_len)
    cached = keys_before(batch, cached)
    slope = load_slopes(features, context, q_head, live)
    return WorkUnit(
        seq, start, context, cached, low, high, all_from, all_to, visible_from, visible_to,
        kv_head, member, token, q_head, live, position, slope, selected_row(batch, seq, start + first, kv_head, C),
    )  # fmt: skip


@triton.jit
def load_queries(query, cache, features, unit, T: tl.constexpr, C: tl.constexpr):
    """A unit's queries in the type of the product, and the scale of their scores, in units of log 2. Queries are a tuple of one
    part `[ROWS, K_WIDTH]`, or of two if V is a part of K: a second one for the rest of the keys."""
    dim = tl.arange(0, C.K_WIDTH)
    at = unit.token.to(tl.int64)[:, None] * query.token + unit.head[:, None] * query.head + dim[None, :] * query.dim
    q = tl.load(query.at + at, mask=unit.live[:, None] & (dim < C.HEAD_DIM)[None, :], other=0)
    q = decode(q, tl.constexpr(C.Q_FORMAT), C.HARDWARE, tl.constexpr(C.DOT))
    if C.REST_DIM is not None:
        rest_dim = tl.arange(0, C.REST_WIDTH)
        at = unit.token.to(tl.int64)[:, None] * query.token + unit.head[:, None] * query.head
        at += (C.HEAD_DIM + rest_dim)[None, :] * query.dim
        rest = tl.load(query.at + at, mask=unit.live[:, None] & (rest_dim < C.REST_DIM)[None, :], other=0)
        rest = decode(rest, tl.constexpr(C.Q_FORMAT), C.HARDWARE, tl.constexpr(C.DOT))
        if C.NEGATE:
            rest = -rest
    if C.NEGATE:
        q = -q
    scale = features.scale
    if features.q_scale is not None:
        scale *= tl.load(features.q_scale)
    if C.K_SCALE_STEPS is not None and not C.PER_KEY:
        if T.HEADS_PER_TILE > 1 and C.K_SCALE_STEPS[2] != 0:
            scale *= tl.load(cache.k_scale + (unit.kv_head + unit.member) * C.K_SCALE_STEPS[2], mask=unit.live, other=1.0)
        else:
            scale *= tl.load(cache.k_scale + unit.kv_head * C.K_SCALE_STEPS[2])
        if C.K_GROUPS is not None:
            scale *= GROUPED_FACTOR
    if C.BALANCE == "here":
        if C.REST_DIM is None:
            q, exponent = balanced(q, None)
        else:
            whole = q
            q, exponent = balanced(q, rest)
            rest, _ = balanced(rest, whole)
        scale = scale * exponent
    elif C.BALANCE == "before":
        index = unit.token.to(tl.int64) * (C.KV_HEADS * C.GROUP) + unit.head
        scale = scale * tl.load(query.exponents + index, mask=unit.live, other=1.0)
    if C.REST_DIM is None:
        return (to_dot_type(q, C),), scale
    else:
        return (to_dot_type(q, C), to_dot_type(rest, C)), scale


@triton.jit
def balanced(q, other):
    """Queries as fp16, and the power of two that each was divided by: fp16 holds less than bf16 does, so the largest element is
    brought to [1, 2), exactly. Rows with an infinity or a NaN stay as they are. `other` is None, or another part of the same
    queries."""
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    if other is not None:
        largest = tl.maximum(largest, tl.max(tl.abs(other.to(tl.float32)), 1))
    exponent = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    exponent = tl.where((exponent > 0) & (exponent < float("inf")), exponent, 1.0)
    return (q / exponent[:, None]).to(tl.float16), exponent


@triton.jit
def initial_state(T: tl.constexpr, C: tl.constexpr):
    """The initial softmax state of a unit: accumulator, row maxima, row sums, and which keys of a tile lie in pages that do not
    exist. In a batch-invariant call it is that of the current piece, followed by the first three of all pieces before it."""
    KEYS: tl.constexpr = T.KEYS
    acc, row_max, row_sum = empty_softmax(T, C)
    missing = tl.zeros([KEYS], tl.int1)
    if C.INVARIANT:
        return acc, row_max, row_sum, missing, acc, row_max, row_sum
    else:
        return acc, row_max, row_sum, missing


@triton.jit
def merged(state, C: tl.constexpr):
    """The accumulator, row maxima and row sums of all keys of a unit, from its last state."""
    if C.INVARIANT:
        return merge_softmax(state[4], state[5], state[6], state[0], state[1], state[2])
    else:
        return state[0], state[1], state[2]


@triton.jit
def finish(acc, row_max, row_sum, head, live, features, cache, kv_head, C: tl.constexpr):
    """The output of each row in fp32 and its LSE, from the final softmax state. `kv_head` is one for all rows, or one a row."""
    acc, row_max, row_sum = add_sink(acc, row_max, row_sum, head, live, features)
    # A row without visible keys has a sum of 0. Its output is zero and its LSE -inf.
    factor = tl.where(row_sum == 0.0, 0.0, 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))
    if C.V_SCALE_STEPS is not None and not C.PER_KEY:
        if kv_head.type.is_block():
            factor *= tl.load(cache.v_scale + kv_head * C.V_SCALE_STEPS[2], mask=live, other=1.0)
        else:
            factor *= tl.load(cache.v_scale + kv_head * C.V_SCALE_STEPS[2])
        if C.V_GROUPS is not None:
            factor *= GROUPED_FACTOR
    if features.out_scale is not None:
        factor /= features.out_scale if C.OUT_NUMBER else tl.load(features.out_scale)
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
    result = acc * factor[:, None]
    if C.INVARIANT:
        # -0 becomes 0: a product of 0 may have either sign, and tiles whose keys a row does not see turn -0 into 0.
        result += 0.0
    return result, lse


@triton.jit
def store(out, token, head, live, result, lse, invalid, dim, C: tl.constexpr):
    """Stores a unit's output and LSE; NaN if the sequence is invalid."""
    result = tl.where(invalid, float("nan"), result)
    at = token.to(tl.int64)[:, None] * out.token + head[:, None] * out.head + dim[None, :] * out.dim
    mask = live[:, None] & (dim < C.V_DIM)[None, :]
    tl.store(out.at + at, encode(result, tl.constexpr(C.OUT), False).to(out.at.dtype.element_ty), mask=mask)
    if out.lse is not None:
        lse = tl.where(invalid, float("nan"), lse)
        tl.store(out.lse + token.to(tl.int64) * out.lse_token + head * out.lse_head, lse, mask=live)
