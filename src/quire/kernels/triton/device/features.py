"""The attention features. Each feature is a group of functions below: causality, window, spans, tree mask, ALiBi, softcap, sinks
and the shard. The kernels of Triton and Gluon call only the hooks, which compose the features:

    query_position     tree mask                       where a query lies in its sequence
    visible_range      causality, window, spans        the keys that the queries of a unit see, as ranges
    is_visible         all of these, tree mask         which query sees which key of a tile
    first_needed_key   window                          the first key that a sequence needs
    end_in_pages       spans                           the end of the keys of the pages that a unit needs
    needs_pages        window, spans, tree mask        whether a unit needs keys of the pages
    load_slopes        ALiBi                           what a unit loads once
    transform_scores   softcap, ALiBi                  products become logits
    add_sink           sinks                           one more term of the denominator
    keys_before        shard                           how many keys of the cache lie before a position
    position_of        shard                           the position of a key
    selected_keys      selection                       the positions of the keys of a tile of selected keys
    shared_keys        shared prefixes                 how many keys of a sequence are read for several sequences at once

and constants by which they choose their loops: `has_left_edge`, `decides_by_key` and `leaves_gaps`.

A *key* is a number in the order of the pages, and a *position* a number in the sequence. They differ only with a shard and with a
selection, where a key is a number in the order of the selected entries.

A feature that a call does not use costs nothing: its argument is None or a constant says so, and the compiler removes the code.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.device.arguments import Number, Pointer, Stride, UnitStride

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST_SCALE = tl.constexpr(3.0e38)
"""About the largest number of fp32."""
MODERATE_CAP = tl.constexpr(256.0)
"""Softcaps up to this may have an error of 2^-22 in the tanh where 16-bit products have a larger one."""


class Features(NamedTuple):
    """The arguments of the features: the scale, then `Options.numbers`, `Options.tensors` and the scales of queries and output."""

    scale: Number
    """Multiplies q·k, in units of log 2, never negative."""
    softcap: Number
    alibi: Pointer
    alibi_step: Stride
    sinks: Pointer
    sinks_step: Stride
    mask: Pointer
    mask_token: Stride
    mask_column: UnitStride
    positions: Pointer
    positions_step: Stride
    q_scale: Pointer
    out_scale: Pointer


# Hooks


@triton.constexpr_function
def has_left_edge(C):
    """Whether a window or spans hide the keys before them, or a unit leaves them to others: then its first tiles are masked too."""
    return C.LEFT is not None or C.SPANS or C.SHARED


@triton.constexpr_function
def decides_by_key(C):
    """Whether visibility is decided key by key, as with a tree mask or a selection: then no tile is known to be visible to every
    query, and pages are checked when they are read, since only some of them may be needed."""
    return C.TREE or C.SELECT is not None


@triton.constexpr_function
def leaves_gaps(C):
    """Whether any key between two others may be hidden from every query: then its page may be missing, pages are checked when they
    are read, and what the key holds must have no effect."""
    return C.TREE or C.SPANS or C.SELECT is not None


@triton.jit
def query_position(features, token, position, live):
    """The positions of queries: `position`, unless positions are given, as with a tree mask."""
    if features.positions is not None:
        position = load_positions(features, token.to(tl.int64), live).to(tl.int32)
    return position


@triton.jit
def visible_range(batch, seq, context, first, last, position, q_len, kv_len, token, live, C: tl.constexpr):
    """What the new tokens `first` to `last` of a sequence see; `token` are their rows. Six bounds: some query sees keys [low,
    high), every query sees [all_from, all_to), and each query sees [visible_from, visible_to). If visibility is decided by key,
    `is_visible` decides."""
    if C.SPANS:
        return range_of_spans(batch, token, live, kv_len)
    else:
        return range_by_lengths(batch, seq, context, first, last, position, q_len, kv_len, C)


@triton.jit
def range_by_lengths(batch, seq, context, first, last, position, q_len, kv_len, C: tl.constexpr):
    """The bounds of `visible_range` without spans."""
    right = keys_to_the_right(batch, seq, q_len, kv_len, C)
    low = kv_len * 0
    high = kv_len
    all_from = low
    all_to = low
    visible_from = low
    visible_to = high
    if C.SELECT is not None:
        high = selected_count(batch, C)
        if C.LEFT is not None:
            visible_from = window_begin(position, C)
        visible_to = tl.minimum(position + right + 1, kv_len)
    elif not decides_by_key(C):
        if C.LEFT is not None:
            low = window_begin(context + first, C)
            all_from = window_begin(context + last, C)
        high = tl.minimum(tl.maximum(context + last + 1 + right, 0), kv_len)
        all_to = tl.minimum(tl.maximum(context + first + 1 + right, 0), kv_len)
        if C.LEFT is not None:
            visible_from = window_begin(position, C)
        visible_to = tl.minimum(position + right + 1, kv_len)
    if C.SHARED:
        low = shared_keys(batch, seq, q_len, C)
        all_from = low
        visible_from = position * 0 + low
    if batch.ranks is not None:
        low = keys_before(batch, low)
        high = keys_before(batch, high)
        all_from = keys_before(batch, all_from)
        all_to = keys_before(batch, all_to)
        visible_from = keys_before(batch, visible_from)
        visible_to = keys_before(batch, visible_to)
    return low, high, all_from, all_to, visible_from, visible_to


@triton.jit
def is_visible(unit, features, key, k_position, inside, C: tl.constexpr):
    """Which query row sees which key, `[ROWS, KEYS]`; `k_position` has the positions of the keys. The result is undefined for
    rows that hold no query."""
    if C.SELECT is not None:
        visible = inside[None, :] & unit.live[:, None] & (k_position >= 0)[None, :]
        visible &= k_position[None, :] < unit.visible_to[:, None]
        if has_left_edge(C):
            visible &= k_position[None, :] >= unit.visible_from[:, None]
        return visible
    elif decides_by_key(C):
        visible = is_in_tree(unit, features, k_position, inside)
        if has_window(C):
            visible = limit_to_window(visible, distance_of(unit, features, key, k_position), C)
        return visible
    elif has_left_edge(C):
        return (key[None, :] < unit.visible_to[:, None]) & (key[None, :] >= unit.visible_from[:, None])
    else:
        return key[None, :] < unit.visible_to[:, None]


@triton.jit
def first_needed_key(shard, context, C: tl.constexpr):
    """The first key that some query of a sequence needs. If visibility is decided by key or by spans, that may be any key."""
    if C.LEFT is not None and not decides_by_key(C):
        return keys_before(shard, window_begin(context, C))
    else:
        return context * 0


@triton.jit
def end_in_pages(unit, C: tl.constexpr):
    """One past the last key of the pages that some query of a unit may see; with spans exactly, 0 if there is none."""
    if C.SPANS:
        end = tl.minimum(unit.visible_to, unit.cached)
        return tl.max(tl.where(unit.visible_from < end, end, 0))
    else:
        return unit.cached


@triton.jit
def needs_pages(batch, unit, C: tl.constexpr):
    """Whether some query of a unit may see a key that is in the pages."""
    needed = end_in_pages(unit, C) > first_needed_key(batch, unit.context, C)
    if C.LEFT is not None and C.TREE:
        needed &= tl.max((unit.live & (keys_before(batch, unit.position - C.LEFT) < unit.cached)).to(tl.int32)) > 0
    return needed


@triton.jit
def transform_scores(score, scale, unit, features, key, k_position, C: tl.constexpr):
    """Turns products into logits: scale, softcap, ALiBi. Returns the factor that remains to be applied, in units of log 2. It is
    applied together with the subtraction of the maximum, as one fused multiply-add."""
    if features.softcap is not None:
        score, scale = cap_scores(score, scale, features, C)
    if features.alibi is not None:
        score = add_alibi(score * per_row(scale), unit, features, key, k_position)
        scale = scale * 0.0 + 1.0
    return score, scale


@triton.jit
def per_row(scale):
    """Broadcasts a scale against scores: there is one for all rows or, with balanced queries or several key heads, one a row."""
    if scale.type.is_block():
        return scale[:, None]
    else:
        return scale


# Causality


@triton.jit
def keys_to_the_right(batch, seq, q_len, kv_len, C: tl.constexpr):
    """How many keys after its own position a query may see: none in a causal sequence, otherwise as many as the window allows."""
    right = kv_len * 0
    if C.CAUSAL is None:
        one_way = tl.load(batch.causal + seq * batch.causal_step) != 0
        right = tl.where(one_way, 0, kv_len + q_len if C.RIGHT is None else C.RIGHT)
    elif not C.CAUSAL:
        right = right + (kv_len + q_len if C.RIGHT is None else C.RIGHT)
    return right


# Window


@triton.constexpr_function
def has_window(C):
    return C.LEFT is not None or C.RIGHT is not None


@triton.jit
def window_begin(position, C: tl.constexpr):
    """The first key in the window of a query at `position`."""
    return tl.maximum(position - C.LEFT, 0)


@triton.jit
def limit_to_window(visible, distance, C: tl.constexpr):
    """Of the visible keys those that are in the window, by their distances."""
    if C.LEFT is not None:
        visible &= distance <= C.LEFT
    if C.RIGHT is not None:
        visible &= distance >= -C.RIGHT
    return visible


# Spans


@triton.jit
def load_span(batch, token, kv_len, inside):
    """The keys [begin, end) that new tokens see, within those of their sequence; 0 and 0 outside."""
    at = batch.spans + token.to(tl.int64) * batch.spans_token
    begin = tl.load(at, mask=inside, other=0)
    end = tl.load(at + batch.spans_side, mask=inside, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), kv_len).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), kv_len).to(tl.int32)
    return keys_before(batch, begin), keys_before(batch, end)


@triton.jit
def range_of_spans(batch, token, live, kv_len):
    """The bounds of `visible_range`. If no query sees a key, the first is `kv_len` and the second 0."""
    begin, end = load_span(batch, token, kv_len, live)
    low = tl.min(tl.where(begin < end, begin, kv_len), 0)
    high = tl.max(tl.where(begin < end, end, 0), 0)
    all_from = tl.max(tl.where(live, begin, 0), 0)
    all_to = tl.min(tl.where(live, end, kv_len), 0)
    return low, high, all_from, all_to, begin, end


@triton.jit
def is_in_some_span(batch, start, stop, position, STEP: tl.constexpr):
    """Which positions some of the new tokens [start, stop) see. Reads STEP spans at a time."""
    seen = position < 0
    for base in range(0, tl.minimum(stop - start, batch.tokens).to(tl.int32), STEP):
        token = start + base + tl.arange(0, STEP)
        inside = (token >= 0) & (token < stop) & (token < batch.tokens)
        at = batch.spans + token.to(tl.int64) * batch.spans_token
        begin = tl.load(at, mask=inside, other=0)
        end = tl.load(at + batch.spans_side, mask=inside, other=0)
        here = (position[:, None] >= begin[None, :]) & (position[:, None] < end[None, :])
        seen |= tl.max(here.to(tl.int32), 1) > 0
    return seen


# Tree mask


@triton.jit
def load_positions(features, token, inside):
    """The given positions of new tokens."""
    return tl.load(features.positions + token * features.positions_step, mask=inside, other=0)


@triton.jit
def distance_of(unit, features, key, k_position):
    """q_pos - k_pos, `[ROWS, KEYS]`. The positions of new tokens may be given."""
    if features.positions is not None:
        is_new = k_position >= unit.context
        token = (unit.start + k_position - unit.context).to(tl.int64)
        position = load_positions(features, token, is_new & (key < unit.high))
        return unit.position[:, None] - tl.where(is_new, position.to(tl.int32), k_position)[None, :]
    else:
        return unit.position[:, None] - k_position[None, :]


@triton.jit
def is_in_tree(unit, features, k_position, inside):
    """Which query row sees which key under the mask, `[ROWS, KEYS]`: all of the context, and new tokens where the mask is set."""
    column = k_position - unit.context
    visible = inside[None, :] & unit.live[:, None]
    mask = tl.load(
        features.mask + unit.token.to(tl.int64)[:, None] * features.mask_token + column[None, :] * features.mask_column,
        mask=visible & (column >= 0)[None, :],
        other=0,
    )
    return visible & ((column < 0)[None, :] | (mask != 0))


@triton.jit
def lowest_position(features, start, stop, tokens, LARGEST: tl.constexpr, STEP: tl.constexpr):
    """The lowest of the given positions of new tokens [start, stop) that exist, or LARGEST. Reads STEP at a time."""
    lowest = start * 0 + LARGEST
    for base in range(0, tl.minimum(stop - start, tokens).to(tl.int32), STEP):
        token = start + base + tl.arange(0, STEP)
        inside = (token >= 0) & (token < stop) & (token < tokens)
        position = load_positions(features, token, inside).to(tl.int64)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, position, LARGEST)))
    return lowest


# Shard. Its numbers are fields of a batch.


@triton.jit
def keys_before(shard, position):
    """How many keys of the cache lie before a position; 0 for a negative one. Without a shard, the position."""
    if shard.ranks is not None:
        cycle = shard.ranks * shard.interleave
        position = tl.maximum(position, 0)
        rest = position % cycle - shard.rank * shard.interleave
        return position // cycle * shard.interleave + tl.minimum(tl.maximum(rest, 0), shard.interleave)
    else:
        return position


@triton.jit
def position_of(shard, key):
    """The position of a key. Without a shard, the key."""
    if shard.ranks is not None:
        return (key // shard.interleave * shard.ranks + shard.rank) * shard.interleave + key % shard.interleave
    else:
        return key


@triton.jit
def is_in_shard(shard, position):
    """Whether the key at a position of 0 or more is in the cache, with a shard."""
    return position // shard.interleave % shard.ranks == shard.rank


# Selection. Its tensor is a field of a batch.


@triton.constexpr_function
def keys_per_entry(C):
    """How many keys an entry of a selection selects."""
    return C.PAGE_SIZE if C.SELECT == "columns" else 1


@triton.jit
def selected_count(batch, C: tl.constexpr):
    """How many keys the entries of a row select, those included that do not exist."""
    return batch.select_count * keys_per_entry(C)


@triton.jit
def selected_row(batch, seq, first_token, kv_head, C: tl.constexpr):
    """Where the entries of a unit begin. With selected positions, a unit has one token."""
    # Not None without a selection: Gluon cannot return it in a tuple with Triton 3.6.
    row = seq * 0
    if C.SELECT is not None:
        of = first_token if C.SELECT == "positions" else seq
        row = of.to(tl.int64) * batch.select_row + kv_head.to(tl.int64) * batch.select_head
    return row


@triton.jit
def selected_keys(batch, unit, key, C: tl.constexpr):
    """The positions of keys, -1 for those that do not exist, and which of these have an entry out of range."""
    inside = key < unit.high
    at = unit.selected + (key // keys_per_entry(C)).to(tl.int64) * batch.select_step
    entry = tl.load(batch.select + at, mask=inside, other=-1)
    exists = (entry >= 0) & (entry < (unit.cached + keys_per_entry(C) - 1) // keys_per_entry(C))
    wrong = ~exists & (entry != -1)
    position = tl.where(exists, entry, 0).to(tl.int32) * keys_per_entry(C) + key % keys_per_entry(C)
    return tl.where(exists, position, -1), wrong


# Shared prefixes. Their tensors are fields of a batch. They are used without a shard: a key is its position.


@triton.jit
def shared_keys(batch, seq, q_len, C: tl.constexpr):
    """How many keys of a sequence are read with shared prefixes."""
    shares = (q_len > 0) & (q_len <= batch.shared_tokens)
    return whole_parts(batch, tl.load(batch.chains + seq * (batch.levels + 1), mask=shares, other=0) * C.PAGE_SIZE, C)


@triton.jit
def whole_parts(batch, keys, C: tl.constexpr):
    """The keys of prefixes that are read once, of so many: in a batch-invariant call whole pieces, which are parts there."""
    return keys // batch.part_keys * batch.part_keys if C.INVARIANT else keys


# ALiBi


@triton.jit
def load_slopes(features, context, q_head, live):
    """The ALiBi slope of each query row, in units of log 2; 0 without ALiBi."""
    slope = context * 0.0
    if features.alibi is not None:
        slope = tl.load(features.alibi + q_head * features.alibi_step, mask=live, other=0.0).to(tl.float32) * LOG2E
    return slope


@triton.jit
def add_alibi(score, unit, features, key, k_position):
    """Subtracts the slope times the distance of query and key."""
    # Not a product and a difference: a compiler could contract either product with it, another one in another loop.
    return tl.fma(-unit.slope[:, None], tl.abs(distance_of(unit, features, key, k_position)).to(tl.float32), score)


# Softcap


@triton.jit
def cap_scores(score, scale, features, C: tl.constexpr):
    """softcap * tanh(score * scale / softcap). Returns the tanh, and the softcap in units of log 2 as the scale that remains."""
    cap = features.softcap * LOG2E
    score = score * per_row(tl.minimum(scale / cap, LARGEST_SCALE))
    if C.DOT != "fp32":
        # Its error is absolute: softcap times 2^-22 in a logit.
        if features.softcap <= MODERATE_CAP:
            score = tanh_by_exponential(score, C)
        else:
            score = tanh(score, C)
    else:
        score = tanh(score, C)
    return score, scale * 0.0 + cap


@triton.jit
def tanh_by_exponential(x, C: tl.constexpr):
    """Within 2^-22 of tanh(x), in five instructions on NVIDIA's GPUs; two of them are of the special function unit."""
    return 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x * (2.0 * LOG2E)), C)


@triton.jit
def tanh(x, C: tl.constexpr):
    """Within 5 units in the last place of fp32. A quotient of polynomials, which needs one instruction of the special function
    unit: exponentials already keep it busy. From 8 on the result is 1 in fp32."""
    x = tl.minimum(x, 8.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x, -8.0, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    above = 1.0 + square * (0.12930378 + square * (0.0029558307 + square * 1.1475324e-05))
    below = 1.0 + square * (0.46263632 + square * (0.023835884 + square * (0.00023931797 + square * 2.4732912e-07)))
    return x * above * reciprocal(below, C)


@triton.jit
def reciprocal(x, C: tl.constexpr):
    """1 / x for x of ordinary magnitude. A division that is right for every x takes eight instructions on NVIDIA's GPUs."""
    if C.NVIDIA:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


# Sinks


@triton.jit
def add_sink(acc, row_max, row_sum, head, live, features):
    """Adds the sink's term to the denominator of each row."""
    if features.sinks is not None:
        sink = tl.load(features.sinks + head * features.sinks_step, mask=live, other=0.0).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        row_sum = tl.fma(row_sum, rescale, tl.exp2(sink - base))
        acc = acc * rescale[:, None]
        row_max = new_max
    return acc, row_max, row_sum
