"""Cuts long rows into units, and writes them down in the order in which programs shall take them. Program r: row r.

`units` holds how many have been taken, how many there are, and from HEADER on FIELDS numbers a unit: its row, which of the row's
query tiles it is, where the row starts, its new tokens, all of its tokens, and whether it misses a page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.attend import misses_page, runs_out
from quire.kernels.triton.schedule import is_wanted, lengths, long_work, work_of
from quire.kernels.triton.units import locate

HEADER = tl.constexpr(16)
FIELDS = tl.constexpr(8)


@triton.jit
def units_kernel(units, rows, cache, features, T: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0)
    before = tl.full([], 0, tl.int32)
    total = tl.full([], 0, tl.int32)
    short = tl.full([], 0, tl.int32)
    for base in range(0, rows.seqs, C.SCAN):
        other = base + tl.arange(0, C.SCAN)
        work = work_of(rows, other, True, T, C).to(tl.int32)
        total += tl.sum(work)
        _, q_len, _ = lengths(rows, other, other < rows.seqs)
        short += tl.sum((is_wanted(q_len, C) & (q_len > 0) & (q_len <= rows.short)).to(tl.int32))
        before += tl.sum(tl.where(other < row, work, 0))
    if row == 0:
        tl.store(units, 0)
        tl.store(units + 1, total)
        tl.store(units + 2, short)
    start, q_len, kv_len = lengths(rows, row, True)
    tiles = long_work(rows, q_len, T, C).to(tl.int32)
    if tiles > 0:
        unit = locate(rows, features, row, tiles - 1, 0, T, C)
        broken = runs_out(rows, cache, unit, C) or misses_page(rows, cache, unit, C)
        for base in range(0, tiles, C.SCAN):
            # From the last to the first: later queries see more keys, and the longest work should not begin last.
            nth = base + tl.arange(0, C.SCAN)
            at = units + HEADER + (before + nth) * FIELDS
            here = nth < tiles
            tl.store(at, row, mask=here)
            tl.store(at + 1, tiles - 1 - nth, mask=here)
            tl.store(at + 2, start, mask=here)
            tl.store(at + 3, q_len, mask=here)
            tl.store(at + 4, kv_len, mask=here)
            tl.store(at + 5, broken.to(tl.int32), mask=here)
