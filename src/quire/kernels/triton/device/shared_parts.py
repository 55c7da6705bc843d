"""Partial results over the keys of shared prefixes: where they are in memory, and how a row adds those of its sequence.

The keys of a prefix are divided into parts at multiples of `batch.part_keys`. A sequence has the parts of its prefixes, of which each
continues the one before it. The part of a prefix of level l that begins in interval i has number i + l: numbers of a sequence's parts
differ."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefix_keys(batch, prefix, inside, C: tl.constexpr):
    """The keys [begin, end) of prefixes; none outside."""
    begin = tl.load(batch.prefixes + prefix * 5 + 2, mask=inside, other=0)
    end = tl.load(batch.prefixes + prefix * 5 + 3, mask=inside, other=0)
    return begin * C.PAGE_SIZE, end * C.PAGE_SIZE


@triton.jit
def place_of(batch, number, token, head, C: tl.constexpr):
    """Where partial result `number` of query rows is, in rows."""
    HEADS: tl.constexpr = C.KV_HEADS * C.GROUP
    return (tl.full([], 0, tl.int64) + number) * batch.tokens * HEADS + token * HEADS + head


@triton.jit
def part_views(batch, C: tl.constexpr):
    """Pointers to the row maxima and row sums."""
    rows = (tl.full([], 0, tl.int64) + batch.parts) * batch.tokens * (C.KV_HEADS * C.GROUP)
    row_maxima = batch.parts_at + rows * C.V_WIDTH
    return row_maxima, row_maxima + rows


@triton.jit
def store_part(batch, number, token, head, live, acc, row_max, row_sum, C: tl.constexpr):
    """Stores a partial result of some rows."""
    row_maxima, row_sums = part_views(batch, C)
    place = place_of(batch, number, token, head, C)
    dim = tl.arange(0, C.V_WIDTH)
    live = live & (number < batch.parts)
    tl.store(batch.parts_at + place[:, None] * C.V_WIDTH + dim[None, :], acc, mask=live[:, None])
    tl.store(row_maxima + place, row_max, mask=live)
    tl.store(row_sums + place, row_sum, mask=live)


@triton.jit
def add_shared(acc, row_max, row_sum, batch, seq, q_len, token, head, live, C: tl.constexpr):
    """Adds the keys of a sequence's prefixes to the softmax state of rows."""
    row_maxima, row_sums = part_views(batch, C)
    dim = tl.arange(0, C.V_WIDTH)
    levels = tl.where(q_len <= batch.shared_tokens, batch.levels, 0)
    for level in range(0, levels):
        prefix = tl.load(batch.chains + seq * (batch.levels + 1) + 1 + level)
        begin, end = prefix_keys(batch, prefix, prefix >= 0, C)
        first = begin // batch.part_keys + level
        stop = tl.where(begin < end, (end - 1) // batch.part_keys + level + 1, first)
        # There is no memory for these parts: the prefix is longer than it is said to be.
        row_sum = tl.where(stop > batch.parts, float("nan"), row_sum)
        for number in range(first, tl.minimum(stop, batch.parts)):
            place = place_of(batch, number, token, head, C)
            part_max = tl.load(row_maxima + place, mask=live, other=float("-inf"))
            part_sum = tl.load(row_sums + place, mask=live, other=0.0)
            part_acc = tl.load(batch.parts_at + place[:, None] * C.V_WIDTH + dim[None, :], mask=live[:, None], other=0.0)
            new_max = tl.maximum(row_max, part_max)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2(row_max - base)
            fraction = tl.exp2(part_max - base)
            row_sum = row_sum * rescale + part_sum * fraction
            acc = acc * rescale[:, None] + part_acc * fraction[:, None]
            row_max = new_max
    return acc, row_max, row_sum
