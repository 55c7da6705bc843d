"""Divides long sequences into work units, and lists them in the order in which programs take them. Program i takes sequence i.

`units` has the number of units taken, the number of all units, and from HEADER on FIELDS numbers for each unit: its sequence, its
query tile, the first token of the sequence, its new tokens, all of its tokens, and whether a page is missing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.attend import has_missing_page, table_too_short
from quire.kernels.triton.device.schedule import is_selected, lengths, long_work, work_of
from quire.kernels.triton.device.units import locate_unit

HEADER = tl.constexpr(16)
FIELDS = tl.constexpr(8)


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
    if seq == 0:
        tl.store(units, 0)
        tl.store(units + 1, total)
        tl.store(units + 2, short)
    start, q_len, kv_len = lengths(batch, seq, True)
    tiles = long_work(batch, q_len, T, C).to(tl.int32)
    if tiles > 0:
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
