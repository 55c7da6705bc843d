"""Who does what, worked out on the card: the host never learns a length.

A *unit* is a tile of query rows of one sequence and one key head (or a part of a large group, or some heads that are together).
Short rows are cut into units, and the key tiles of all units, in order, are shared out evenly: each program takes one run of them,
wherever units begin and end.

The order is all rows of the first head, then all of the second, and so on. Programs that work at the same time then work on
different heads of the same tokens, which lie side by side in most layouts: memory likes that better than heads far apart.
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
def key_tiles(rows, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The first key tile that a row needs, and how many. A row without keys still counts one: its output is written there. One that
    claims more keys than its table has room for counts no more than that: it is broken, and its neighbours shall not notice."""
    room = (tl.full([], 0, tl.int64) + rows.table_width) * C.PAGE_SIZE
    context = kv_len - q_len
    kv_len = tl.minimum(kv_len, room + q_len + 1).to(tl.int32)
    first = q_len * 0
    if C.LEFT is not None and not C.TREE:
        first = tl.maximum(kv_len - q_len - C.LEFT, 0) // T.STEP
    keys = kv_len - first * T.STEP
    if C.NEW and C.LEFT is not None:
        # A window may hide the whole context, and then the table need not have room for it: the row needs its new tokens alone.
        alone = (q_len >= C.CONTEXT_FROM) & (context > room)
        first = tl.where(alone, context // T.STEP, first)
        keys = tl.where(alone, context % T.STEP + q_len, keys)
    return first, tl.maximum((keys + T.STEP - 1) // T.STEP, 1)


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
def short_work(rows, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The pieces of a row's units of one head, 0 if it is not a short one: key tiles, and what it costs to open a unit."""
    _, tiles = key_tiles(rows, q_len, kv_len, T, C)
    units = (q_len + T.TOKENS - 1) // T.TOKENS
    tiles = tiles * 0 + 1 if C.INVARIANT else tiles + C.OPENING
    wanted = is_wanted(q_len, C) & (q_len > 0) & (q_len <= rows.short)
    return tl.where(wanted, counted(units, C) * tiles, 0)


@triton.jit
def long_work(rows, q_len, T: tl.constexpr, C: tl.constexpr):
    """Query tiles of a row, 0 if it is not a long one."""
    wanted = is_wanted(q_len, C) & (q_len > rows.short)
    return tl.where(wanted, counted((q_len + T.TOKENS - 1) // T.TOKENS, C), 0)


@triton.jit
def work_of(rows, row, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The work of some rows and one head; 0 beyond the last."""
    _, q_len, kv_len = lengths(rows, row, row < rows.seqs)
    return long_work(rows, q_len, T, C) if LONG else short_work(rows, q_len, kv_len, T, C)


@triton.jit
def total_work(rows, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The work of all rows and one head."""
    total = counted(rows.seqs * 0, C)
    for base in range(0, rows.seqs, C.SCAN):
        total += tl.sum(work_of(rows, base + tl.arange(0, C.SCAN), LONG, T, C))
    return uniform(total, C)


@triton.jit
def short_totals(rows, T: tl.constexpr, C: tl.constexpr):
    """The work of all short rows and one head, and their units of all heads."""
    total = counted(rows.seqs * 0, C)
    units = counted(rows.seqs * 0, C)
    for base in range(0, rows.seqs, C.SCAN):
        row = base + tl.arange(0, C.SCAN)
        _, q_len, kv_len = lengths(rows, row, row < rows.seqs)
        total += tl.sum(short_work(rows, q_len, kv_len, T, C))
        units += tl.sum(short_units(rows, q_len, T, C))
    return uniform(total, C), uniform(units, C)


@triton.jit
def find_row(rows, at, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The row whose work contains the piece `at`, and where its work begins."""
    found = rows.seqs * 0
    begin = counted(found, C)
    before = begin
    for base in range(0, rows.seqs, C.SCAN):
        row = base + tl.arange(0, C.SCAN)
        work = work_of(rows, row, LONG, T, C)
        passed = (before + tl.cumsum(work) <= at) & (row < rows.seqs)
        found += tl.sum(passed.to(tl.int32))
        begin += tl.sum(tl.where(passed, work, 0))
        before += tl.sum(work)
    return uniform(found, C), uniform(begin, C)


class Shares(NamedTuple):
    """How `total` pieces of work are shared out: into `parts` shares, all alike.

    Or, with many units a program, head by head: a head's work is `parts` units of average size, `mains` programs take `each` of
    them, and what is left are shares of one unit. Those begin wherever programs have ended: the halves of a card are not equally
    fast, and the faster one so gets more to do. Which program computes a share changes no bit of it."""

    total: Any
    parts: Any
    each: Any
    """0: all alike"""
    mains: Any


@triton.jit
def shares_of(rows, total, units, room, T: tl.constexpr, C: tl.constexpr):
    """Shares all alike are as many as there are programs, or nearly as many if units are of one length, and then need not be cut,
    or not at unequal places; and none for less work than is worth it."""
    _, q_len, kv_len = lengths(rows, 0, True)
    alike = short_work(rows, q_len, kv_len, T, C) * rows.seqs * T.HEADS == total
    at_once = room.programs - room.extras
    in_parts = units * (at_once // tl.maximum(units, 1))
    each = (units + at_once - 1) // at_once
    uncut = (units + each - 1) // tl.maximum(each, 1)
    even = tl.where(units <= at_once, in_parts, uncut)
    sharers = tl.where(alike & (even * 16 >= at_once * 15), even, at_once)
    sharers = tl.minimum(sharers, tl.maximum(total // C.LEAST, 1)).to(tl.int32)
    if not C.TAIL:
        return Shares(total, sharers, 0, 1)
    else:
        parts = (units // T.HEADS).to(tl.int32)
        mains = room.mains
        each = tl.maximum(parts * 15 // 16 // mains, (parts - room.extras // T.HEADS + mains - 1) // mains)
        many = (room.extras > 0) & (each >= room.many_units)
        return Shares(total, tl.where(many, parts, sharers), tl.where(many, each, 0), mains)


@triton.jit
def share_of(program, shares, T: tl.constexpr, C: tl.constexpr):
    """Which share a program takes. Shares are counted in the order of the work, programs in the order in which they begin."""
    if not C.TAIL:
        return program
    else:
        # No branches here and below: with them Triton 3.7 no longer pipelines the loop that follows.
        mains = shares.mains
        left = shares.parts - mains * shares.each
        nth = program - mains * T.HEADS
        main = program // mains * (mains + left) + program % mains
        small = nth // tl.maximum(left, 1) * (mains + left) + mains + nth % tl.maximum(left, 1)
        share = tl.where(nth < 0, main, small)
        return tl.where((shares.each > 0) & (nth < left * T.HEADS), share, program)


@triton.jit
def short_units(rows, q_len, T: tl.constexpr, C: tl.constexpr):
    """A row's units of all heads, 0 if it is not a short one."""
    wanted = is_wanted(q_len, C) & (q_len > 0) & (q_len <= rows.short)
    return tl.where(wanted, counted((q_len + T.TOKENS - 1) // T.TOKENS * T.HEADS, C), 0)


@triton.jit
def share_begin(share, shares, T: tl.constexpr, C: tl.constexpr):
    """Where a share of the work begins."""
    part = share
    parts = shares.parts
    if C.TAIL:
        mains = shares.mains
        # 1 at least: what is not used is computed all the same.
        width = tl.maximum(mains + parts - mains * shares.each, 1)
        nth = share % width
        in_head = tl.minimum(nth, mains) * shares.each + tl.maximum(nth - mains, 0)
        part = tl.where(shares.each > 0, share // width * parts + in_head, share)
        parts = tl.where(shares.each > 0, parts * T.HEADS, parts)
    return (tl.minimum(part, parts).to(tl.int64) * shares.total // parts).to(shares.total.dtype)


@triton.jit
def share_at(at, shares, T: tl.constexpr, C: tl.constexpr):
    """The share that a piece is in: the last that begins at it or before."""
    parts = shares.parts
    if C.TAIL:
        parts = tl.where(shares.each > 0, parts * T.HEADS, parts)
    part = (((at.to(tl.int64) + 1) * parts - 1) // shares.total).to(tl.int32)
    if not C.TAIL:
        return part
    else:
        mains = shares.mains
        nth = part % shares.parts
        in_mains = mains * shares.each
        place = tl.where(nth < in_mains, nth // tl.maximum(shares.each, 1), mains + nth - in_mains)
        width = mains + shares.parts - in_mains
        return tl.where(shares.each > 0, part // shares.parts * width + place, part)
