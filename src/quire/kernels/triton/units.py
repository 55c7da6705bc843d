"""A unit: a tile of query rows of one sequence and one key head, or of some that are together, from its first query to its stored
output."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.formats import decode, encode
from quire.kernels.triton.schedule import lengths
from quire.kernels.triton.tiles import LOG2E, as_factor

LN2 = tl.constexpr(0.6931471805599453)


class Unit(NamedTuple):
    """Where a unit's queries are, and what they can see: some of the keys [low, high), never others."""

    row: Any
    start: Any
    """The row's first token."""
    context: Any
    cached: Any
    """Keys below come from pages, others from `New`."""
    low: Any
    high: Any
    all_from: Any
    """Keys [all_from, all_to) are seen by every query of the unit."""
    all_to: Any
    sees_from: Any
    """`[ROWS]`: the first key that each query sees, and the one after the last; a tree's are asked one by one"""
    sees_to: Any
    kv_head: Any
    """The first, if several are together."""
    member: Any
    """`[ROWS]`: which of those together; so are token, head, live, at, slope"""
    token: Any
    head: Any
    live: Any
    at: Any
    """Position in the sequence."""
    slope: Any


@triton.jit
def locate(rows, features, row, q_tile, head, T: tl.constexpr, C: tl.constexpr):
    """Works out where a unit's queries are and what they see."""
    start, q_len, kv_len = lengths(rows, row, True)
    return place(rows, features, row, start, q_len, kv_len, q_tile, head, tl.arange(0, T.ROWS), T, C)


@triton.jit
def place(rows, features, row, start, q_len, kv_len, q_tile, head, index, T: tl.constexpr, C: tl.constexpr):
    """The same for those of a unit's queries that `index` names."""
    context = kv_len - q_len
    member = index * 0
    if T.TOGETHER > 1:
        kv_head = head * T.TOGETHER
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
    live = (member < T.TOGETHER) & (local < T.TOKENS) & (of_group < C.GROUP) & (nth < q_len)
    token = start + nth
    q_head = (kv_head + member) * C.GROUP + of_group
    last = tl.minimum(first + T.TOKENS, q_len) - 1

    position = context + nth
    if features.positions is not None:
        position = tl.load(features.positions + token.to(tl.int64) * features.positions_step, mask=live, other=0).to(tl.int32)
    right = kv_len * 0
    if C.CAUSAL is None:
        one_way = tl.load(rows.causal + row * rows.causal_step) != 0
        right = tl.where(one_way, 0, kv_len + q_len if C.RIGHT is None else C.RIGHT)
    elif not C.CAUSAL:
        right = right + (kv_len + q_len if C.RIGHT is None else C.RIGHT)
    low = kv_len * 0
    high = kv_len
    all_from = low
    all_to = low
    if not C.TREE:
        if C.LEFT is not None:
            low = tl.maximum(context + first - C.LEFT, 0)
            all_from = tl.maximum(context + last - C.LEFT, 0)
        high = tl.minimum(tl.maximum(context + last + 1 + right, 0), kv_len)
        all_to = tl.minimum(tl.maximum(context + first + 1 + right, 0), kv_len)
    sees_from = low
    sees_to = high
    if not C.TREE:
        if C.LEFT is not None:
            sees_from = tl.maximum(position - C.LEFT, 0)
        sees_to = tl.minimum(position + right + 1, kv_len)
    cached = kv_len
    if C.NEW:
        cached = tl.where(q_len >= C.CONTEXT_FROM, context, kv_len)
    slope = context * 0.0
    if features.alibi is not None:
        slope = tl.load(features.alibi + q_head * features.alibi_step, mask=live, other=0.0).to(tl.float32) * LOG2E
    return Unit(
        row, start, context, cached, low, high, all_from, all_to, sees_from, sees_to,
        kv_head, member, token, q_head, live, position, slope,
    )  # fmt: skip


@triton.jit
def load_queries(query, cache, features, unit, T: tl.constexpr, C: tl.constexpr):
    """A unit's queries `[ROWS, K_WIDTH]`, ready for the product, and the scale of their scores, in units of log 2."""
    dim = tl.arange(0, C.K_WIDTH)
    at = unit.token.to(tl.int64)[:, None] * query.token + unit.head[:, None] * query.head + dim[None, :] * query.dim
    q = tl.load(query.at + at, mask=unit.live[:, None] & (dim < C.HEAD_DIM)[None, :], other=0)
    q = decode(q, tl.constexpr(C.Q_FORMAT), C.HARDWARE)
    if C.NEGATE:
        q = -q
    scale = features.scale
    if features.q_scale is not None:
        scale *= tl.load(features.q_scale)
    if C.K_SCALE_STEPS is not None and not C.PER_KEY:
        if T.TOGETHER > 1 and C.K_SCALE_STEPS[2] != 0:
            scale *= tl.load(cache.k_scale + (unit.kv_head + unit.member) * C.K_SCALE_STEPS[2], mask=unit.live, other=1.0)
        else:
            scale *= tl.load(cache.k_scale + unit.kv_head * C.K_SCALE_STEPS[2])
    if C.BALANCE == "here":
        q, exponent = balanced(q)
        scale = scale * exponent
    elif C.BALANCE == "before":
        place = unit.token.to(tl.int64) * (C.KV_HEADS * C.GROUP) + unit.head
        scale = scale * tl.load(query.exponents + place, mask=unit.live, other=1.0)
    return as_factor(q, C), scale


@triton.jit
def balanced(q):
    """Queries as fp16, and the power of two that each was divided by: fp16 holds less than bf16 does, so the largest element is
    brought to [1, 2), exactly. Rows with an infinity or a NaN stay as they are."""
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    exponent = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    exponent = tl.where((exponent > 0) & (exponent < float("inf")), exponent, 1.0)
    return (q / exponent[:, None]).to(tl.float16), exponent


@triton.jit
def nothing_yet(T: tl.constexpr, C: tl.constexpr):
    """The state of a unit that has met no key: weighted values, largest logit, sum of weights, and which keys of a tile missed
    their page."""
    ROWS: tl.constexpr = T.ROWS
    KEYS: tl.constexpr = T.KEYS
    WIDTH: tl.constexpr = C.V_WIDTH
    return (
        tl.zeros([ROWS, WIDTH], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([KEYS], tl.int1),
    )


@triton.jit
def finish(weighted, top, total, head, live, features, cache, kv_head, C: tl.constexpr):
    """Lets the sink take its weight; gives the output of each row, fp32, and its LSE. `kv_head` is one for all, or one a row."""
    if features.sinks is not None:
        sink = tl.load(features.sinks + head * features.sinks_step, mask=live, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        weighted = weighted * shrink[:, None]
        top = higher
    # A row that saw nothing has a total of 0: zeros, and an LSE of -inf.
    factor = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    if C.V_SCALE_STEPS is not None and not C.PER_KEY:
        if kv_head.type.is_block():
            factor *= tl.load(cache.v_scale + kv_head * C.V_SCALE_STEPS[2], mask=live, other=1.0)
        else:
            factor *= tl.load(cache.v_scale + kv_head * C.V_SCALE_STEPS[2])
    if features.out_scale is not None:
        factor /= features.out_scale if C.OUT_NUMBER else tl.load(features.out_scale)
    lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * LN2)
    return weighted * factor[:, None], lse


@triton.jit
def store(out, token, head, live, result, lse, broken, dim, C: tl.constexpr):
    """Stores a unit's output and LSE; NaN if one of its pages did not exist."""
    result = tl.where(broken, float("nan"), result)
    at = token.to(tl.int64)[:, None] * out.token + head[:, None] * out.head + dim[None, :] * out.dim
    mask = live[:, None] & (dim < C.V_DIM)[None, :]
    tl.store(out.at + at, encode(result, tl.constexpr(C.OUT), False).to(out.at.dtype.element_ty), mask=mask)
    if out.lse is not None:
        lse = tl.where(broken, float("nan"), lse)
        tl.store(out.lse + token.to(tl.int64) * out.lse_token + head * out.lse_head, lse, mask=live)


@triton.jit
def parts_of(room, rows, C: tl.constexpr):
    """The largest logits, the sums of weights and the headers in a workspace of tiles of so many rows."""
    places = room.programs * 2 * rows
    tops = room.at + places * C.V_WIDTH
    return tops, tops + places, (tops + 2 * places).to(tl.pointer_type(tl.int32), bitcast=True)
