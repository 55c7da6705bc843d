"""Shared prefixes. A program takes some keys of a prefix and some rows of the queries of all of its sequences, so that the keys are
read once for all of these rows, and stores partial results. The program that computes the first of a row's other keys adds them.

The keys of a prefix are divided into parts at multiples of `batch.part_keys`. A sequence has the parts of its prefixes, of which
each continues the one before it. The part of a prefix of level l that begins in interval i has number i + l, so that a sequence's
parts have different numbers.

In a batch-invariant call parts are the pieces of its keys, and a prefix ends at its last multiple of a piece: each sequence reads
the keys after that itself. The pieces of a sequence are then the same as without prefixes, with the same products and sums, and
they are merged in the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.features import load_slopes, whole_parts
from quire.kernels.triton.device.partials import merge_softmax
from quire.kernels.triton.device.schedule import is_selected, lengths, uniform
from quire.kernels.triton.device.tiles import attend_unit, clamp_page_ids
from quire.kernels.triton.device.units import WorkUnit, initial_state, load_queries

COLUMNS = tl.constexpr(8)
"""Columns of the page table that are compared at a time: 32 or 64 bytes."""
LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def read_prefixes(query, cache, batch, new, features, T: tl.constexpr, C: tl.constexpr):
    """The keys of all prefixes, divided among all programs."""
    total = batch.prefix_count * 0
    for base in range(0, batch.prefix_count, C.SCAN):
        total += tl.sum(prefix_work(batch, base + tl.arange(0, C.SCAN), T, C))
    total = uniform(total, C)
    for nth in range(tl.program_id(0), total * T.HEADS, tl.num_programs(0)):
        prefix, begin = find_prefix(batch, nth // T.HEADS, T, C)
        shared_unit(query, cache, batch, new, features, prefix, nth // T.HEADS - begin, nth % T.HEADS, T, C)


@triton.jit
def prefix_work(batch, prefix, T: tl.constexpr, C: tl.constexpr):
    """The units of prefixes and one head: parts of their keys times tiles of their rows; 0 beyond the last."""
    inside = prefix < batch.prefix_count
    count = tl.load(batch.prefixes + prefix * 5 + 1, mask=inside, other=0)
    begin, end = prefix_keys(batch, prefix, inside, C)
    parts = (end - 1) // batch.part_keys - begin // batch.part_keys + 1
    return tl.where((count > 0) & (begin < end), parts * row_tiles(batch, count, T), 0)


@triton.jit
def row_tiles(batch, count, T: tl.constexpr):
    """How many tiles the queries of some sequences take. Each sequence has `shared_tokens` places for new tokens."""
    return (count * batch.shared_tokens + T.TOKENS - 1) // T.TOKENS


@triton.jit
def find_prefix(batch, at, T: tl.constexpr, C: tl.constexpr):
    """The prefix whose work contains the unit `at`, and where its work begins."""
    found = batch.prefix_count * 0
    begin = found
    before = found
    for base in range(0, batch.prefix_count, C.SCAN):
        prefix = base + tl.arange(0, C.SCAN)
        work = prefix_work(batch, prefix, T, C)
        passed = (before + tl.cumsum(work) <= at) & (prefix < batch.prefix_count)
        found += tl.sum(passed.to(tl.int32))
        begin += tl.sum(tl.where(passed, work, 0))
        before += tl.sum(work)
    return uniform(found, C), uniform(begin, C)


@triton.jit
def shared_unit(query, cache, batch, new, features, prefix, nth, head, T: tl.constexpr, C: tl.constexpr):
    """One part of a prefix and one tile of rows."""
    first = tl.load(batch.prefixes + prefix * 5)
    count = tl.load(batch.prefixes + prefix * 5 + 1)
    level = tl.load(batch.prefixes + prefix * 5 + 4)
    begin, end = prefix_keys(batch, prefix, prefix >= 0, C)
    tiles = row_tiles(batch, count, T)
    interval = begin // batch.part_keys + nth // tiles
    low = tl.maximum(begin, interval * batch.part_keys)
    high = tl.minimum(end, (interval + 1) * batch.part_keys)
    unit, seq, wrong = shared_rows(batch, features, first, count, nth % tiles, head, low, high, T, C)
    if uniform(tl.max(unit.live.to(tl.int32)), C) > 0:
        absent, differs = compare_pages(batch, cache, unit.seq, seq, unit.live, low, high, T, C)
        stop = tl.where(absent > 0, low // T.KEYS * T.KEYS, high)
        q, scale = load_queries(query, cache, features, unit, T, C)
        # In a batch-invariant call a part is one piece: that of the state which was not merged yet.
        state = attend_unit(initial_state(T, C), q, scale, unit, batch, cache, new, features, low // T.KEYS * T.KEYS, stop, T, C)
        row_sum = tl.where(wrong | (differs > 0) | (absent > 0), float("nan"), state[2])
        store_part(batch, interval + level, unit.token, unit.head, unit.live, state[0], state[1], row_sum, C)


@triton.jit
def shared_rows(batch, features, first, count, row_tile, head, low, high, T: tl.constexpr, C: tl.constexpr):
    """The unit of one tile of rows over keys [low, high), the sequence of each row, and which rows do not have these keys before
    their new tokens. The pages are those of the unit's first sequence."""
    index = tl.arange(0, T.ROWS)
    if C.GROUP < T.ROWS:
        kv_head = head
        local = index // C.GROUP
        of_group = index % C.GROUP
    else:
        PARTS: tl.constexpr = T.HEADS // C.KV_HEADS
        kv_head = head // PARTS
        local = index * 0
        of_group = (head % PARTS) * T.ROWS + index
    place = row_tile * T.TOKENS + local
    member = place // batch.shared_tokens
    nth = place % batch.shared_tokens
    inside = (local < T.TOKENS) & (of_group < C.GROUP) & (member < count)
    seq = tl.load(batch.members + first + member, mask=inside, other=0)
    start, q_len, kv_len = lengths(batch, seq, inside)
    live = inside & (nth < q_len) & (q_len <= batch.shared_tokens) & is_selected(q_len, C)
    leader = uniform(tl.min(tl.where(live, member, LARGEST)), C)
    own = tl.load(batch.members + first + leader, mask=leader < count, other=0)
    context = kv_len - q_len
    q_head = kv_head * C.GROUP + of_group
    unit = WorkUnit(
        own, low * 0, high, high, low, high, low, high, index * 0 + low, index * 0 + high,
        kv_head, index * 0, start + nth, q_head, live, context + nth, load_slopes(features, high, q_head, live), own * 0,
    )  # fmt: skip
    return unit, seq, high > context


@triton.jit
def compare_pages(batch, cache, own, seq, live, low, high, T: tl.constexpr, C: tl.constexpr):
    """Whether a page of keys [low, high) of sequence `own` does not exist, and which rows are of sequences with other pages."""
    ROWS: tl.constexpr = T.ROWS
    differs = tl.zeros([ROWS], tl.int32)
    end = (high + C.PAGE_SIZE - 1) // C.PAGE_SIZE
    absent = ((end > batch.table_width) | (cache.pages < 1)).to(tl.int32)
    for base in range(low // C.PAGE_SIZE, tl.minimum(end, batch.table_width), COLUMNS):
        column = base + tl.arange(0, COLUMNS)
        inside = column < tl.minimum(end, batch.table_width)
        page = tl.load(batch.page_table + own.to(tl.int64) * batch.table_row + column * batch.table_step, mask=inside, other=0)
        at = seq.to(tl.int64)[:, None] * batch.table_row + column[None, :] * batch.table_step
        mine = tl.load(batch.page_table + at, mask=inside[None, :] & live[:, None], other=0)
        wrong = (mine != page[None, :]) & inside[None, :] & live[:, None]
        differs += tl.max(wrong.to(tl.int32), 1)
        _, exists = clamp_page_ids(page, cache.pages)
        absent += tl.max((inside & ~exists).to(tl.int32))
    return uniform(absent, C), differs


@triton.jit
def prefix_keys(batch, prefix, inside, C: tl.constexpr):
    """The keys [begin, end) of prefixes that are read once; none outside."""
    begin = tl.load(batch.prefixes + prefix * 5 + 2, mask=inside, other=0)
    end = tl.load(batch.prefixes + prefix * 5 + 3, mask=inside, other=0)
    return whole_parts(batch, begin * C.PAGE_SIZE, C), whole_parts(batch, end * C.PAGE_SIZE, C)


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
    live &= token * 0 + number < batch.parts
    tl.store(batch.parts_at + place[:, None] * C.V_WIDTH + dim[None, :], acc, mask=live[:, None])
    tl.store(row_maxima + place, row_max, mask=live)
    tl.store(row_sums + place, row_sum, mask=live)


@triton.jit
def add_shared(acc, row_max, row_sum, batch, seq, q_len, token, head, live, C: tl.constexpr):
    """Adds the keys of a sequence's prefixes to the softmax state of rows."""
    row_maxima, row_sums = part_views(batch, C)
    dim = tl.arange(0, C.V_WIDTH)
    levels = tl.where(q_len <= batch.shared_tokens, batch.levels, 0)
    for level in range(levels):
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
            if C.INVARIANT:
                acc, row_max, row_sum = merge_softmax(acc, row_max, row_sum, part_acc, part_max, part_sum)
            else:
                new_max = tl.maximum(row_max, part_max)
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
                rescale = tl.exp2(row_max - base)
                fraction = tl.exp2(part_max - base)
                row_sum = row_sum * rescale + part_sum * fraction
                acc = acc * rescale[:, None] + part_acc * fraction[:, None]
                row_max = new_max
    return acc, row_max, row_sum
