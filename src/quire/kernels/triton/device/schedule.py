"""The scheduler. It runs on the GPU, so the host never reads a length.

A *work unit* is a tile of query rows of one sequence and one key head (or a part of a large group, or a few key heads). Short
sequences are divided into units. The key tiles of all units form one list, which is divided into *splits* of equal length: each
program takes one split, wherever units begin and end.

A *piece* of this work is one key tile. In a batch-invariant call it is a fixed number of keys, several tiles.

The order of the list is by head, then by sequence. Programs that run at the same time then work on different heads of the same
tokens, which are adjacent in most layouts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.device.features import (
    first_needed_key,
    has_left_edge,
    keys_before,
    load_span,
    selected_count,
    shared_keys,
)


@triton.jit
def lengths(batch, seq, inside):
    """The first new token of a sequence, the number of new tokens, and the number of all tokens; zeros outside."""
    start = tl.load(batch.q_starts + seq * batch.q_starts_step, mask=inside, other=0).to(tl.int32)
    stop = tl.load(batch.q_starts + (seq + 1) * batch.q_starts_step, mask=inside, other=0).to(tl.int32)
    kv_len = tl.load(batch.kv_lens + seq * batch.kv_lens_step, mask=inside, other=0).to(tl.int32)
    return start, stop - start, tl.maximum(kv_len, 0)


@triton.jit
def key_pieces(batch, seq, start, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The first piece of its keys that a sequence needs, and how many. A sequence without keys counts one, since its output is
    written. A sequence with more keys than its table has columns for is invalid; it counts no more than the table has, so that it
    does not delay others."""
    if C.SELECT is not None:
        # Every sequence counts as many pieces as a row has entries.
        return kv_len * 0, tl.maximum((selected_count(batch, C) + T.PIECE - 1) // T.PIECE, 1) + kv_len * 0
    elif C.SPANS:
        return pieces_of_spans(batch, start, q_len, kv_len, T, C)
    elif C.SHARED:
        # The keys before are those of prefixes. One piece of work if there are no others: the output is written.
        first = shared_keys(batch, seq, q_len, C) // T.PIECE
        capacity = (tl.full([], 0, tl.int64) + batch.table_width) * C.PAGE_SIZE
        end = tl.minimum(kv_len, capacity + q_len + 1).to(tl.int32)
        return first, tl.maximum((end + T.PIECE - 1) // T.PIECE - first, 1)
    else:
        return pieces_of_sequence(batch, q_len, kv_len, T, C)


@triton.jit
def pieces_of_sequence(batch, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The same without spans."""
    capacity = (tl.full([], 0, tl.int64) + batch.table_width) * C.PAGE_SIZE
    context = kv_len - q_len
    if batch.ranks is not None:
        first = first_needed_key(batch, context, C) // T.PIECE
        # From here on lengths count the keys of the shard.
        context = keys_before(batch, context)
        kv_len = keys_before(batch, kv_len)
        new_keys = kv_len - context
        kv_len = tl.minimum(kv_len, capacity + new_keys + 1).to(tl.int32)
    else:
        kv_len = tl.minimum(kv_len, capacity + q_len + 1).to(tl.int32)
        first = first_needed_key(batch, kv_len - q_len, C) // T.PIECE
        new_keys = q_len
    keys = kv_len - first * T.PIECE
    if C.NEW and has_left_edge(C):
        # If the window hides the whole context, the table may be shorter than it: only new tokens are needed.
        alone = (q_len >= C.CONTEXT_FROM) & (context > capacity)
        first = tl.where(alone, context // T.PIECE, first)
        keys = tl.where(alone, context % T.PIECE + new_keys, keys)
    return first, tl.maximum((keys + T.PIECE - 1) // T.PIECE, 1)


@triton.jit
def pieces_of_spans(batch, start, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The same with spans: a token alone needs the keys of its span, of several tokens any key may be needed."""
    alone = q_len == 1
    begin, end = load_span(batch, start, kv_len, alone)
    begin = tl.where(alone, begin, 0)
    end = tl.where(alone, end, keys_before(batch, kv_len))
    cut, gap = pieces_without_pages(batch, q_len, kv_len, T, C)
    first = begin // T.PIECE
    last = pieces_of(end, T)
    first = tl.where(first < cut, first, tl.maximum(first - gap, cut))
    last = tl.where(last < cut, last, tl.maximum(last - gap, cut))
    return first, tl.maximum(last - first, 1)


@triton.jit
def pieces_without_pages(batch, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """With spans: the first piece for which the table has no column, and how many there are before that of the first new token.
    No query sees their keys, or its output is NaN: they are no work."""
    capacity = (tl.full([], 0, tl.int64) + batch.table_width) * C.PAGE_SIZE
    keys = keys_before(batch, kv_len)
    cut = pieces_of(tl.minimum(capacity, keys).to(tl.int32), T)
    end = pieces_of(keys, T)
    if C.NEW:
        end = tl.where(q_len >= C.CONTEXT_FROM, keys_before(batch, kv_len - q_len) // T.PIECE, end)
    return cut, tl.maximum(end - cut, 0)


@triton.jit
def pieces_of(keys, T: tl.constexpr):
    """The pieces of a number of keys, which may be the largest of its type."""
    return tl.where(keys > 0, (keys - 1) // T.PIECE + 1, 0)


@triton.jit
def number_of_piece(batch, q_len, kv_len, piece, T: tl.constexpr, C: tl.constexpr):
    """Which keys a piece of a unit's work has, as a number of pieces before them: its number, unless spans leave out pieces."""
    if C.SPANS:
        cut, gap = pieces_without_pages(batch, q_len, kv_len, T, C)
        piece = tl.where(piece < cut, piece, piece + gap)
    return piece


@triton.jit
def is_selected(q_len, C: tl.constexpr):
    return (q_len >= C.MIN_Q_LEN) & (q_len <= C.MAX_Q_LEN)


@triton.jit
def as_count(x, C: tl.constexpr):
    """Counts of work, wide enough for the batch."""
    return x.to(tl.int64) if C.WIDE else x.to(tl.int32)


@triton.jit
def uniform(x, C: tl.constexpr):
    """Marks a number as equal in all threads, so that values derived from it are kept in uniform registers. NVIDIA's compiler does
    not derive this from a reduction of Triton's; one more reduction over the warp tells it."""
    if not C.UNIFORM:
        return x
    elif x.dtype == tl.int64:
        low = uniform((x & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), C)
        high = uniform((x >> 32).to(tl.int32), C)
        return (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        return tl.inline_asm_elementwise(
            "redux.sync.min.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def short_work(batch, seq, start, q_len, kv_len, T: tl.constexpr, C: tl.constexpr):
    """The work of a short sequence and one head, 0 for others: the pieces of its units, plus the overhead of each unit."""
    _, pieces = key_pieces(batch, seq, start, q_len, kv_len, T, C)
    units = (q_len + T.TOKENS - 1) // T.TOKENS
    wanted = is_selected(q_len, C) & (q_len > 0) & (q_len <= batch.short)
    return tl.where(wanted, as_count(units, C) * (pieces + C.UNIT_OVERHEAD), 0)


@triton.jit
def long_work(batch, q_len, T: tl.constexpr, C: tl.constexpr):
    """Query tiles of a long sequence, 0 for others."""
    wanted = is_selected(q_len, C) & (q_len > batch.short)
    return tl.where(wanted, as_count((q_len + T.TOKENS - 1) // T.TOKENS, C), 0)


@triton.jit
def work_of(batch, seq, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The work of some sequences and one head; 0 beyond the last."""
    start, q_len, kv_len = lengths(batch, seq, seq < batch.seqs)
    return long_work(batch, q_len, T, C) if LONG else short_work(batch, seq, start, q_len, kv_len, T, C)


@triton.jit
def total_work(batch, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The work of all sequences and one head."""
    total = as_count(batch.seqs * 0, C)
    for base in range(0, batch.seqs, C.SCAN):
        total += tl.sum(work_of(batch, base + tl.arange(0, C.SCAN), LONG, T, C))
    return uniform(total, C)


@triton.jit
def short_totals(batch, T: tl.constexpr, C: tl.constexpr):
    """The work of all short sequences and one head, and the number of their units of all heads."""
    total = as_count(batch.seqs * 0, C)
    units = as_count(batch.seqs * 0, C)
    for base in range(0, batch.seqs, C.SCAN):
        seq = base + tl.arange(0, C.SCAN)
        start, q_len, kv_len = lengths(batch, seq, seq < batch.seqs)
        total += tl.sum(short_work(batch, seq, start, q_len, kv_len, T, C))
        units += tl.sum(short_units(batch, q_len, T, C))
    return uniform(total, C), uniform(units, C)


@triton.jit
def find_sequence(batch, at, LONG: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The sequence whose work contains the piece `at`, and where its work begins."""
    found = batch.seqs * 0
    begin = as_count(found, C)
    before = begin
    for base in range(0, batch.seqs, C.SCAN):
        seq = base + tl.arange(0, C.SCAN)
        work = work_of(batch, seq, LONG, T, C)
        passed = (before + tl.cumsum(work) <= at) & (seq < batch.seqs)
        found += tl.sum(passed.to(tl.int32))
        begin += tl.sum(tl.where(passed, work, 0))
        before += tl.sum(work)
    return uniform(found, C), uniform(begin, C)


class Splits(NamedTuple):
    """How `total` pieces of work are divided: into `parts` splits of equal size.

    Or, with many units a program, head by head: a head's work is `parts` units of average size, `main_programs` take `each` of
    them, and the tail is splits of one unit, which are scheduled dynamically: a program of the tail starts where another has
    ended. Not all multiprocessors are equally fast, and this balances them. Which program computes a split changes no bit."""

    total: Any
    parts: Any
    each: Any
    """0: all splits are equal."""
    main_programs: Any


@triton.jit
def plan_splits(batch, total, units, workspace, T: tl.constexpr, C: tl.constexpr):
    """There are as many equal splits as programs; slightly fewer if all units have the same length and then are not split, or are
    split evenly; and fewer if a split would have less work than C.MIN_WORK."""
    start, q_len, kv_len = lengths(batch, 0, True)
    same_length = short_work(batch, batch.seqs * 0, start, q_len, kv_len, T, C) * batch.seqs * T.HEADS == total
    at_once = workspace.programs - workspace.tail_programs
    in_parts = units * (at_once // tl.maximum(units, 1))
    each = (units + at_once - 1) // at_once
    uncut = (units + each - 1) // tl.maximum(each, 1)
    even = tl.where(units <= at_once, in_parts, uncut)
    count = tl.where(same_length & (even * 16 >= at_once * 15), even, at_once)
    count = tl.minimum(count, tl.maximum(total // C.MIN_WORK, 1)).to(tl.int32)
    if not C.TAIL:
        return Splits(total, count, 0, 1)
    else:
        parts = (units // T.HEADS).to(tl.int32)
        main_programs = workspace.main_programs
        each = tl.maximum(
            parts * 15 // 16 // main_programs, (parts - workspace.tail_programs // T.HEADS + main_programs - 1) // main_programs
        )
        many = (workspace.tail_programs > 0) & (each >= workspace.tail_units)
        return Splits(total, tl.where(many, parts, count), tl.where(many, each, 0), main_programs)


@triton.jit
def split_of_program(program, splits, T: tl.constexpr, C: tl.constexpr):
    """Which split a program takes. Splits are numbered in the order of the work, programs in the order in which they start."""
    if not C.TAIL:
        return program
    else:
        # No branches here and below: with them Triton 3.7 no longer pipelines the loop that follows.
        main_programs = splits.main_programs
        left = splits.parts - main_programs * splits.each
        nth = program - main_programs * T.HEADS
        main = program // main_programs * (main_programs + left) + program % main_programs
        small = nth // tl.maximum(left, 1) * (main_programs + left) + main_programs + nth % tl.maximum(left, 1)
        split = tl.where(nth < 0, main, small)
        return tl.where((splits.each > 0) & (nth < left * T.HEADS), split, program)


@triton.jit
def short_units(batch, q_len, T: tl.constexpr, C: tl.constexpr):
    """The units of a short sequence and all heads, 0 for others."""
    wanted = is_selected(q_len, C) & (q_len > 0) & (q_len <= batch.short)
    return tl.where(wanted, as_count((q_len + T.TOKENS - 1) // T.TOKENS * T.HEADS, C), 0)


@triton.jit
def rows_of_partial(batch, T: tl.constexpr, C: tl.constexpr):
    """The most rows of a tile that hold queries of a short sequence."""
    longest = batch.seqs * 0
    for base in range(0, batch.seqs, C.SCAN):
        seq = base + tl.arange(0, C.SCAN)
        _, q_len, _ = lengths(batch, seq, seq < batch.seqs)
        longest = tl.maximum(longest, tl.max(tl.where(is_selected(q_len, C) & (q_len <= batch.short), q_len, 0)))
    return uniform(tl.minimum(tl.minimum(longest, T.TOKENS) * C.GROUP, T.ROWS), C)


@triton.jit
def split_begin(split, splits, T: tl.constexpr, C: tl.constexpr):
    """Where the work of a split begins."""
    part = split
    parts = splits.parts
    if C.TAIL:
        main_programs = splits.main_programs
        # At least 1: the value is computed even where it is not used.
        width = tl.maximum(main_programs + parts - main_programs * splits.each, 1)
        nth = split % width
        in_head = tl.minimum(nth, main_programs) * splits.each + tl.maximum(nth - main_programs, 0)
        part = tl.where(splits.each > 0, split // width * parts + in_head, split)
        parts = tl.where(splits.each > 0, parts * T.HEADS, parts)
    return (tl.minimum(part, parts).to(tl.int64) * splits.total // parts).to(splits.total.dtype)


@triton.jit
def split_containing(at, splits, T: tl.constexpr, C: tl.constexpr):
    """The split that contains a piece: the last one that begins at the piece or before it."""
    parts = splits.parts
    if C.TAIL:
        parts = tl.where(splits.each > 0, parts * T.HEADS, parts)
    part = (((at.to(tl.int64) + 1) * parts - 1) // splits.total).to(tl.int32)
    if not C.TAIL:
        return part
    else:
        main_programs = splits.main_programs
        nth = part % splits.parts
        main_parts = main_programs * splits.each
        place = tl.where(nth < main_parts, nth // tl.maximum(splits.each, 1), main_programs + nth - main_parts)
        width = main_programs + splits.parts - main_parts
        return tl.where(splits.each > 0, part // splits.parts * width + place, part)
