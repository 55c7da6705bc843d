"""Who does what, worked out on the card: the host never learns a length.

A *unit* is a tile of query rows of one sequence and one key head (or a part of a large group). Short rows are cut into units, and
the key tiles of all units, in order, are shared out evenly: each program takes one run of them, wherever units begin and end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def lengths(rows, row, inside):
    """Where a row's new tokens start, how many there are, and all of its tokens; zeros outside."""
    start = tl.load(rows.q_starts + row * rows.q_starts_step, mask=inside, other=0).to(tl.int32)
    stop = tl.load(rows.q_starts + (row + 1) * rows.q_starts_step, mask=inside, other=0).to(tl.int32)
    kv_len = tl.load(rows.kv_lens + row * rows.kv_lens_step, mask=inside, other=0).to(tl.int32)
    return start, stop - start, tl.maximum(kv_len, 0)


@triton.jit
def key_tiles(q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The first key tile that a row needs, and how many. A row without keys still counts one: its output is written there."""
    first = q_len * 0
    if C.LEFT is not None and not C.TREE:
        first = tl.maximum(kv_len - q_len - C.LEFT, 0) // T.KEYS
    return first, tl.maximum((kv_len + T.KEYS - 1) // T.KEYS - first, 1)


@triton.jit
def is_wanted(q_len, C: tl.constexpr):
    return (q_len >= C.FEWEST) & (q_len <= C.MOST)


@triton.jit
def counted(x, C: tl.constexpr):
    """Counts of work, wide enough for the batch."""
    return x.to(tl.int64) if C.WIDE else x.to(tl.int32)


@triton.jit
def uniform(x, C: tl.constexpr):
    """A number that all threads agree on, in a form that tells the compiler so: what depends on it then takes no vector registers.
    NVIDIA's compiler does not see it in the result of a reduction, unless the warp reduces it once more."""
    if C.UNIFORM and not C.WIDE:
        return tl.inline_asm_elementwise(
            "redux.sync.min.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return x


@triton.jit
def short_work(q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The pieces of all units of a row, 0 if it is not a short one: key tiles, and what it costs to open a unit."""
    _, tiles = key_tiles(q_len, kv_len, T, C)
    units = ((q_len + T.TOKENS - 1) // T.TOKENS) * T.HEADS
    tiles = tiles * 0 + 1 if C.INVARIANT else tiles + C.OPENING
    wanted = is_wanted(q_len, C) & (q_len > 0) & (q_len <= C.SHORT)
    return tl.where(wanted, counted(units, C) * tiles, 0)


@triton.jit
def long_work(q_len, T: tl.constexpr, C: tl.constexpr):
    """Query tiles of a row, 0 if it is not a long one."""
    wanted = is_wanted(q_len, C) & (q_len > C.SHORT)
    return tl.where(wanted, counted((q_len + T.TOKENS - 1) // T.TOKENS, C), 0)


@triton.jit
def work_of(rows, row, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The work of some rows; 0 beyond the last."""
    _, q_len, kv_len = lengths(rows, row, row < rows.seqs)
    return long_work(q_len, T, C) if LONG else short_work(q_len, kv_len, T, C)


@triton.jit
def total_work(rows, index, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The work of all rows. `index` counts those that are looked at at once, laid out as the caller's threads like it."""
    total = tl.sum(work_of(rows, index, LONG, T, C))
    if C.MANY:
        for base in range(C.SCAN, rows.seqs, C.SCAN):
            total += tl.sum(work_of(rows, base + index, LONG, T, C))
    return uniform(total, C)


@triton.jit
def find_row(rows, index, at, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The row whose work contains the piece `at`, and where its work begins."""
    work = work_of(rows, index, LONG, T, C)
    passed = (tl.cumsum(work) <= at) & (index < rows.seqs)
    found = tl.sum(passed.to(tl.int32))
    begin = tl.sum(tl.where(passed, work, 0))
    if C.MANY:
        before = tl.sum(work)
        for base in range(C.SCAN, rows.seqs, C.SCAN):
            row = base + index
            work = work_of(rows, row, LONG, T, C)
            passed = (before + tl.cumsum(work) <= at) & (row < rows.seqs)
            found += tl.sum(passed.to(tl.int32))
            begin += tl.sum(tl.where(passed, work, 0))
            before += tl.sum(work)
    return uniform(found, C), uniform(begin, C)


class Shares(NamedTuple):
    """The work of all short rows, as runs of pieces that follow each other: large ones, then small ones for whoever is done."""

    total: Any
    larges: Any
    large_to: Any
    """Where the large ones end."""
    smalls: Any


@triton.jit
def share_out(rows, index, programs, T: tl.constexpr, C: tl.constexpr):
    """Cuts the work. A large share for each program, or for nearly as many if units of one length then need not be cut, or not at
    unequal places; and none for less work than is worth it.

    The card does not serve all programs alike: of equal shares some take a twentieth longer. So where small shares cost little,
    large ones are whole units or leave a little, and what is left is taken in small ones by programs that are done. Who computes
    what then depends on time. How it is cut does not, and so no bit of the result."""
    total = total_work(rows, index, False, T, C)
    units = total_units(rows, index, T, C)
    in_parts = units * (programs // tl.maximum(units, 1))
    each = (units + programs - 1) // programs
    uncut = (units + each - 1) // tl.maximum(each, 1)
    even = tl.where(units <= programs, in_parts, uncut)
    larges = tl.where(even * 16 >= programs * 15, even, programs)
    larges = tl.minimum(larges, tl.maximum(total // C.LEAST, 1)).to(tl.int32)
    large_to = total
    smalls = larges * 0
    if C.SMALL > 0:
        whole = units // programs
        whole = tl.maximum(whole - ((units - whole * programs) * C.REST < units).to(whole.dtype), 0)
        wide = total.to(tl.int64)
        left = tl.where(units >= programs, wide - whole * programs * wide // tl.maximum(units, 1), wide // C.REST).to(total.dtype)
        few = tl.minimum(left // C.LEAST, programs * C.SMALL).to(tl.int32)
        pays = few * 2 >= programs
        larges = tl.where(pays, programs, larges)
        large_to = tl.where(pays, total - left, total)
        smalls = tl.where(pays, few, 0)
    return Shares(total, larges, large_to, smalls)


@triton.jit
def total_units(rows, index, T: tl.constexpr, C: tl.constexpr):
    """The units of all short rows."""
    units = tl.sum(short_units(rows, index, T, C))
    if C.MANY:
        for base in range(C.SCAN, rows.seqs, C.SCAN):
            units += tl.sum(short_units(rows, base + index, T, C))
    return uniform(units, C)


@triton.jit
def short_units(rows, row, T: tl.constexpr, C: tl.constexpr):
    _, q_len, _ = lengths(rows, row, row < rows.seqs)
    wanted = is_wanted(q_len, C) & (q_len > 0) & (q_len <= C.SHORT)
    return tl.where(wanted, counted((q_len + T.TOKENS - 1) // T.TOKENS * T.HEADS, C), 0)


@triton.jit
def share_begin(share, shares):
    """Where a share begins; the end of all, if there are fewer."""
    large = tl.minimum(share, shares.larges).to(tl.int64) * shares.large_to // shares.larges
    small = tl.minimum(tl.maximum(share - shares.larges, 0), shares.smalls).to(tl.int64)
    return (large + small * (shares.total - shares.large_to) // tl.maximum(shares.smalls, 1)).to(shares.total.dtype)


@triton.jit
def share_of(at, shares):
    """The share that a piece is in: the last that begins at it or before."""
    wide = at.to(tl.int64) + 1
    large = (wide * shares.larges - 1) // tl.maximum(shares.large_to, 1)
    small = ((wide - shares.large_to) * shares.smalls - 1) // tl.maximum(shares.total - shares.large_to, 1)
    return tl.where(at < shares.large_to, large, shares.larges + small).to(tl.int32)


@triton.jit
def run_of(at, end, row_begin, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The run of pieces from `at` on that belong to one unit and end before `end`: the unit's head, its query tile of so many, the
    run's first piece, how many it has, and how many the whole unit has."""
    _, tiles = key_tiles(q_len, kv_len, T, C)
    pieces = tl.where(C.INVARIANT, 1, tiles + C.OPENING)
    index = ((at - row_begin) // pieces).to(tl.int32)
    piece = (at - row_begin - index * pieces).to(tl.int32)
    count = tl.minimum(pieces - piece, end - at).to(tl.int32)
    q_tiles = (q_len + T.TOKENS - 1) // T.TOKENS
    return index // q_tiles, index % q_tiles, q_tiles, piece, count, pieces


@triton.jit
def keys_of(unit, q_len, kv_len, piece, count, T: tl.constexpr, C: tl.constexpr):
    """The keys of such a run, from a multiple of a tile on: the first pieces of a unit stand for opening it, and have none."""
    lowest = unit.low // T.KEYS * T.KEYS
    highest = unit.high
    if not C.INVARIANT:
        first, _ = key_tiles(q_len, kv_len, T, C)
        lowest = tl.maximum((first + tl.maximum(piece - C.OPENING, 0)) * T.KEYS, lowest)
        highest = tl.minimum((first + tl.maximum(piece + count - C.OPENING, 0)) * T.KEYS, highest)
    return lowest, highest
