"""Divides long sequences into work units, and lists them in the order in which programs take them. Program i takes sequence i.

`units` has the number of units taken, the number of all units, and from HEADER on FIELDS numbers for each unit: its sequence, its
query tile, the first token of the sequence, its new tokens, all of its tokens, and its flags: whether a page is missing and, with
spans, whether these leave out keys. With spans, the first key that some query sees and the one after the last follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.attend import has_missing_page, table_too_short
from quire.kernels.triton.device.schedule import is_selected, lengths, long_work, work_of
from quire.kernels.triton.device.tiles import clamp_page_ids
from quire.kernels.triton.device.units import locate_unit

HEADER = tl.constexpr(16)
FIELDS = tl.constexpr(8)
MISSING = tl.constexpr(1)
GAPS = tl.constexpr(2)
"""The flags of a unit."""
PAGES = tl.constexpr(32)
"""Pages that are checked at a time if spans leave out keys."""


@triton.jit
def units_kernel(units, batch, cache, features, T: tl.constexpr, C: tl.constexpr):
    seq = tl.program_id(0)
    before = tl.full([], 0, tl.int32)
    total = tl.full([], 0, tl.int32)
    short = tl.full([], 0, tl.int32)
    for base in range(0, batch.seqs, C.SCAN):
        other = base + tl.arange(0, C.SCAN)
        work = work_of(batch, other, True, T, C).to(tl.int32)
        total += tl.sum(work)
        _, q_len, _ = lengths(batch, other, other < batch.seqs)
        short += tl.sum((is_selected(q_len, C) & (q_len > 0) & (q_len <= batch.short)).to(tl.int32))
        before += tl.sum(tl.where(other < seq, work, 0))
    if is_first_program(seq, C):
        tl.store(units, 0)
        tl.store(units + 1, total)
        tl.store(units + 2, short)
    start, q_len, kv_len = lengths(batch, seq, True)
    tiles = long_work(batch, q_len, T, C).to(tl.int32)
    if C.SPANS:
        for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
            unit = locate_unit(batch, features, seq, tile, 0, T, C)
            gaps = leaves_out_keys(unit)
            invalid = table_too_short(batch, cache, unit, C) | misses_page(batch, cache, unit, gaps, C)
            at = units + HEADER + (before + tiles - 1 - tile) * FIELDS
            tl.store(at, seq)
            tl.store(at + 1, tile)
            tl.store(at + 2, start)
            tl.store(at + 3, q_len)
            tl.store(at + 4, kv_len)
            tl.store(at + 5, tl.where(invalid, MISSING, 0) + tl.where(gaps, GAPS, 0))
            tl.store(at + 6, unit.low)
            tl.store(at + 7, unit.high)
    elif tiles > 0:
        unit = locate_unit(batch, features, seq, tiles - 1, 0, T, C)
        invalid = table_too_short(batch, cache, unit, C) or has_missing_page(batch, cache, unit, C)
        for base in range(0, tiles, C.SCAN):
            # In reverse order: later queries see more keys, and the longest work should start first.
            nth = base + tl.arange(0, C.SCAN)
            at = units + HEADER + (before + nth) * FIELDS
            here = nth < tiles
            tl.store(at, seq, mask=here)
            tl.store(at + 1, tiles - 1 - nth, mask=here)
            tl.store(at + 2, start, mask=here)
            tl.store(at + 3, q_len, mask=here)
            tl.store(at + 4, kv_len, mask=here)
            tl.store(at + 5, invalid.to(tl.int32), mask=here)


@triton.jit
def is_first_program(seq, C: tl.constexpr):
    """With spans, several programs take the units of a sequence."""
    if C.SPANS:
        return (seq == 0) & (tl.program_id(1) == 0)
    else:
        return seq == 0


@triton.jit
def leaves_out_keys(unit):
    """Whether no query of a unit sees some key between those that are seen: a span ends where no other one goes on."""
    sees = unit.visible_from < unit.visible_to
    begin, end = unit.visible_from, unit.visible_to
    goes_on = sees[None, :] & (begin[None, :] <= end[:, None]) & (end[:, None] < end[None, :])
    ends = tl.max(goes_on.to(tl.int32), 1) == 0
    return tl.max((sees & ends & (end < unit.high)).to(tl.int32), 0) > 0


@triton.jit
def misses_page(batch, cache, unit, gaps, C: tl.constexpr):
    """Whether a page that some query of a unit needs does not exist. The table has a column for each of them."""
    missing = tl.full([], 0, tl.int32)
    end = tl.minimum(unit.high, unit.cached)
    columns = tl.where(unit.low < end, tl.minimum((end + C.PAGE_SIZE - 1) // C.PAGE_SIZE, batch.table_width), 0)
    for first in range(unit.low // C.PAGE_SIZE, columns, PAGES):
        column = first + tl.arange(0, PAGES)
        needed = column < columns
        if gaps:
            begin = column * C.PAGE_SIZE
            sees = (unit.visible_from < tl.minimum(unit.visible_to, unit.cached))[:, None]
            sees &= unit.visible_from[:, None] < (begin + C.PAGE_SIZE)[None, :]
            sees &= tl.minimum(unit.visible_to, unit.cached)[:, None] > begin[None, :]
            needed &= tl.max(sees.to(tl.int32), 0) > 0
        page = tl.load(batch.page_table + unit.seq.to(tl.int64) * batch.table_row + column * batch.table_step, mask=needed, other=0)
        _, exists = clamp_page_ids(page, cache.pages)
        missing += tl.sum((needed & ~exists).to(tl.int32), 0)
    return missing > 0
