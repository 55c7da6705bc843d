"""Attention over shared prefixes: a program takes some keys of a prefix and some rows of the queries of all of its sequences, so that
the keys are read once for all of these rows. It stores partial results, which `attend_kernel` and `combine_shared_kernel` add to those of
the other keys of each sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.attend import attend_unit
from quire.kernels.triton.device.combine import combined_row, finish_row, query_of_row
from quire.kernels.triton.device.features import load_slopes
from quire.kernels.triton.device.schedule import is_selected, lengths, uniform
from quire.kernels.triton.device.shared_parts import add_shared, prefix_keys, store_part
from quire.kernels.triton.device.tiles import clamp_page_ids
from quire.kernels.triton.device.units import WorkUnit, initial_state, load_queries, workspace_views

COLUMNS = tl.constexpr(8)
"""Columns of the page table that are compared at a time: 32 or 64 bytes."""
LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def shared_kernel(query, cache, batch, new, features, T: tl.constexpr, C: tl.constexpr):
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
        acc, row_max, row_sum, _ = attend_unit(
            initial_state(T, C), q, scale, unit, batch, cache, new, features, low // T.KEYS * T.KEYS, stop, T, C
        )
        row_sum = tl.where(wrong | (differs > 0) | (absent > 0), float("nan"), row_sum)
        store_part(batch, interval + level, unit.token, unit.head, unit.live, acc, row_max, row_sum, C)


@triton.jit
def shared_rows(batch, features, first, count, row_tile, head, low, high, T: tl.constexpr, C: tl.constexpr):
    """The unit of one tile of rows over keys [low, high), the sequence of each row, and which rows do not have these keys before their
    new tokens. The pages are those of the unit's first sequence."""
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
        kv_head, index * 0, start + nth, q_head, live, context + nth, load_slopes(features, high, q_head, live), None,
    )  # fmt: skip
    return unit, seq, high > context


@triton.jit
def compare_pages(batch, cache, own, seq, live, low, high, T: tl.constexpr, C: tl.constexpr):
    """Whether a page of keys [low, high) of sequence `own` does not exist, and which rows are of sequences with other pages."""
    differs = tl.zeros([T.ROWS], tl.int32)
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
def combine_shared_kernel(out, workspace, cache, features, batch, tile, C: tl.constexpr):
    """As `combine_kernel`, for sequences of which some share prefixes."""
    split = tl.program_id(0)
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    _, _, headers = workspace_views(workspace, tile.rows, C)
    parts = tl.load(headers + split * 5)
    second = tl.load(headers + split * 5 + 1)
    token = tl.load(headers + split * 5 + 2)
    tokens = tl.load(headers + split * 5 + 3)
    head = tl.load(headers + split * 5 + 4)
    if parts > 0:
        seq = tl.load(headers + workspace.programs * 5 + split * 2)
        q_len = tl.load(headers + workspace.programs * 5 + split * 2 + 1)
        for index in range(tl.program_id(1), tile.rows, tl.num_programs(1)):
            live, nth, kv_head, of_group = query_of_row(index, tokens, head, tile, C)
            if live:
                q_head = kv_head * C.GROUP + of_group
                acc, row_max, row_sum = combined_row(workspace, split, index, parts, second, tile.rows, C)
                here = tl.zeros([1], tl.int32)
                acc, row_max, row_sum = add_shared(
                    acc, row_max, row_sum, batch, seq, q_len, here + token + nth, here + q_head, here == 0, C
                )
                finish_row(out, acc, row_max, row_sum, cache, features, token + nth, q_head, C)
