"""Attention over pages, in one kernel with two kinds of programs, which run concurrently:

    the first `workspace.programs`   compute one split each of the key tiles of all short sequences. The partial result of a unit
                                     that several splits share is stored in the workspace, and `combine_kernel` combines them.
    the others                       compute one unit of a long sequence each, over all of its keys, the longest first

Without LONG every sequence is short, and there are no other programs.

With shared prefixes the kernel is launched twice: first all programs read the keys of prefixes, in tiles of LONG, and then the
other keys of all sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.features import end_in_pages, first_needed_key, leaves_gaps, needs_pages
from quire.kernels.triton.device.partials import store_header, store_partial
from quire.kernels.triton.device.prefixes import add_shared, read_prefixes
from quire.kernels.triton.device.schedule import (
    find_sequence,
    key_pieces,
    lengths,
    number_of_piece,
    plan_splits,
    rows_of_partial,
    short_totals,
    short_work,
    split_begin,
    split_containing,
    split_of_program,
    total_work,
    uniform,
)
from quire.kernels.triton.device.tiles import attend_tiles, attend_unit, clamp_page_ids, load_tile_pages
from quire.kernels.triton.device.units import finish, initial_state, load_queries, locate_unit, merged, store


@triton.jit
def attend_kernel(out, workspace, query, cache, batch, new, features, SHORT: tl.constexpr, LONG: tl.constexpr, C: tl.constexpr):
    if C.SHARED:
        if batch.reads_prefixes != 0:
            read_prefixes(query, cache, batch, new, features, LONG, C)
        else:
            attend_sequences(out, workspace, query, cache, batch, new, features, SHORT, None, C)
    else:
        attend_sequences(out, workspace, query, cache, batch, new, features, SHORT, LONG, C)


@triton.jit
def attend_sequences(out, workspace, query, cache, batch, new, features, SHORT: tl.constexpr, LONG: tl.constexpr, C: tl.constexpr):
    """The keys of each sequence; without those of its shared prefixes."""
    program = tl.program_id(0)
    if C.PDL:
        if workspace.overlapped != 0:
            tl.extra.cuda.gdc_launch_dependents()
    if program < workspace.programs:
        zero_padding(out, batch, program, workspace.programs, C)
        if C.WIDE_ROWS is None:
            short_sequences(out, workspace, query, cache, batch, new, features, program, SHORT, C)
        elif batch.wide_rows != 0:
            WIDE_ROWS: tl.constexpr = C.WIDE_ROWS
            short_sequences(out, workspace, query, cache, batch, new, features, program, WIDE_ROWS, C)
        else:
            short_sequences(out, workspace, query, cache, batch, new, features, program, SHORT, C)
        if C.PDL:
            if workspace.overlapped == 0:
                tl.extra.cuda.gdc_launch_dependents()
            elif program == 0:
                tl.extra.cuda.gdc_wait()
    elif LONG is not None:
        long_sequence(out, query, cache, batch, new, features, program - workspace.programs, LONG, C)


@triton.jit
def short_sequences(out, workspace, query, cache, batch, new, features, program, T: tl.constexpr, C: tl.constexpr):
    """One split of the work of all short sequences."""
    one_head, units = short_totals(batch, T, C)
    total = one_head * T.HEADS
    splits = plan_splits(batch, total, units, workspace, T, C)
    split = split_of_program(program, splits, T, C)
    at = split_begin(split, splits, T, C)
    end = split_begin(split + 1, splits, T, C)
    begin = at
    head_begin = at // tl.maximum(one_head, 1) * one_head
    seq, seq_begin = find_sequence(batch, at - head_begin, False, T, C)
    seq_begin += head_begin
    store_header(workspace, split, 0, 0, 0, 0, 0, 0, T, C)
    if C.INVARIANT:
        rows = rows_of_partial(batch, T, C)
        divided = total.to(tl.int64) * rows <= workspace.rows
    while at < end:
        start, q_len, kv_len = lengths(batch, seq, True)
        work = short_work(batch, seq, start, q_len, kv_len, T, C)
        if work > 0:
            first, pieces = key_pieces(batch, seq, start, q_len, kv_len, T, C)
            pieces += C.UNIT_OVERHEAD
            q_tile = ((at - seq_begin) // pieces).to(tl.int32)
            piece = (at - seq_begin - q_tile * pieces).to(tl.int32)
            count = tl.minimum(pieces - piece, end - at).to(tl.int32)
            if C.INVARIANT:
                # Without memory for partial results the program that has a unit's first piece computes all of it.
                count = tl.where((piece == 0) & ~divided, pieces, count)
            q_tiles = (q_len + T.TOKENS - 1) // T.TOKENS
            head = (at // one_head).to(tl.int32)
            unit = locate_unit(batch, features, seq, q_tile, head, T, C)
            invalid = table_too_short(batch, cache, unit, C)
            if C.SHARED:
                # It would share new tokens, or tokens that it does not have.
                invalid |= (unit.low > 0) & (unit.low > unit.context)
            if q_tiles > 1:
                invalid |= has_missing_page(batch, cache, unit, C)
            nth = q_tile * T.TOKENS
            if C.INVARIANT:
                if (count == pieces) | divided:
                    attend_pieces(
                        out, workspace, query, cache, batch, new, features, unit, invalid, q_len, kv_len,
                        first + piece, count, count == pieces, at.to(tl.int32) * rows, rows,
                        piece == 0 if C.SHARED else None, T, C,
                    )  # fmt: skip
                    if (piece == 0) & (count < pieces):
                        place = at.to(tl.int32) * rows
                        store_header(workspace, split, pieces, place, start + nth, q_len - nth, head, rows, T, C)
            else:
                lowest = number_of_piece(batch, q_len, kv_len, first + tl.maximum(piece - C.UNIT_OVERHEAD, 0), T, C) * T.PIECE
                lowest = tl.maximum(lowest, unit.low // T.STEP * T.STEP)
                highest = number_of_piece(batch, q_len, kv_len, first + tl.maximum(piece + count - C.UNIT_OVERHEAD, 0), T, C)
                highest = tl.minimum(highest * T.PIECE, unit.high)
                if invalid:
                    highest = lowest
                # Page ids are loaded before queries: keys depend on them, and queries are needed only by the first product.
                page = load_tile_pages(batch, unit, lowest, highest, T, C)
                q, scale = load_queries(query, cache, features, unit, T, C)
                SOURCE: tl.constexpr = "both" if C.NEW else "pages"
                state = initial_state(T, C)
                state = attend_tiles(
                    state, q, scale, page, None, unit, batch, cache, new, features, lowest, highest, True, SOURCE, True, T, C
                )
                if T.HEADS_PER_TILE > 1:
                    state = recompute_per_head(
                        state, q, scale, page, unit, batch, cache, new, features, lowest, highest, SOURCE, T, C
                    )
                acc, row_max, row_sum, missing = state
                invalid |= tl.max(missing.to(tl.int32)) > 0
                if C.SHARED:
                    # Exactly one program has the first piece of a unit.
                    if piece == 0:
                        acc, row_max, row_sum = add_shared(
                            acc, row_max, row_sum, batch, seq, q_len, unit.token, unit.head, unit.live, C
                        )
                if count == pieces:
                    kv_head = unit.kv_head if T.HEADS_PER_TILE == 1 else unit.kv_head + unit.member
                    result, lse = finish(acc, row_max, row_sum, unit.head, unit.live, features, cache, kv_head, C)
                    store(out, unit.token, unit.head, unit.live, result, lse, invalid, tl.arange(0, C.V_WIDTH), C)
                else:
                    # A split has at most two units that it shares: its first and its last.
                    second = (at != begin).to(tl.int32)
                    row_sum = tl.where(invalid, float("nan"), row_sum)
                    store_partial(workspace, split * 2 + second, 2 * workspace.programs, T.ROWS, acc, row_max, row_sum, T, C)
                    if piece == 0:
                        last = split_containing(at + pieces - 1, splits, T, C)
                        store_header(workspace, split, last - split + 1, second, start + nth, q_len - nth, head, 0, T, C)
            at += count
        if at == seq_begin + work:
            seq_begin = at
            seq = tl.where(seq + 1 == batch.seqs, 0, seq + 1)


@triton.jit
def attend_pieces(
    out, workspace, query, cache, batch, new, features, unit, invalid, q_len, kv_len, first, count, whole, place, rows, adds_shared,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pieces [first, first + count) of a unit in a batch-invariant call. If that is all, they are merged and the output is stored.
    Otherwise each becomes a partial result, the first at `place`, with a number of rows. `adds_shared`: whether the first of them
    is that after the shared prefixes, whose pieces are merged before it."""
    q, scale = load_queries(query, cache, features, unit, T, C)
    SOURCE: tl.constexpr = "both" if C.NEW else "pages"
    for nth in range(tl.where(whole, 1, count)):
        lowest = number_of_piece(batch, q_len, kv_len, first + nth, T, C) * T.PIECE
        highest = tl.where(whole, unit.high, tl.minimum(lowest + T.PIECE, unit.high))
        lowest = tl.maximum(lowest, unit.low // T.STEP * T.STEP)
        if invalid:
            highest = lowest
        page = load_tile_pages(batch, unit, lowest, highest, T, C)
        state = initial_state(T, C)
        if C.SHARED:
            state = after_shared(state, unit, batch, q_len, adds_shared & (nth == 0), C)
        state = attend_tiles(
            state, q, scale, page, None, unit, batch, cache, new, features, lowest, highest, True, SOURCE, True, T, C
        )
        wrong = invalid | (tl.max(state[3].to(tl.int32)) > 0)
        if whole:
            acc, row_max, row_sum = merged(state, C)
            result, lse = finish(acc, row_max, row_sum, unit.head, unit.live, features, cache, unit.kv_head, C)
            store(out, unit.token, unit.head, unit.live, result, lse, wrong, tl.arange(0, C.V_WIDTH), C)
        else:
            part = merged(state, C) if C.SHARED else state
            row_sum = tl.where(wrong, float("nan"), part[2])
            store_partial(workspace, place + nth * rows, 1, rows, part[0], part[1], row_sum, T, C)


@triton.jit
def after_shared(state, unit, batch, q_len, adds, C: tl.constexpr):
    """The state of no keys of a batch-invariant call or, if `adds`, of those of the unit's shared prefixes."""
    acc, row_max, row_sum = state[4], state[5], state[6]
    if adds:
        acc, row_max, row_sum = add_shared(acc, row_max, row_sum, batch, unit.seq, q_len, unit.token, unit.head, unit.live, C)
    return state[0], state[1], state[2], state[3], acc, row_max, row_sum


@triton.jit
def recompute_per_head(
    state, q, scale, page, unit, batch, cache, new, features, lowest, highest,
    SOURCE: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes the unit again, one key head at a time, if the accumulator contains a NaN. An infinite or NaN value of one head
    reaches the other heads of the tile, since 0 * NaN is NaN."""
    acc, row_max, row_sum, missing = state
    has_nan = uniform(tl.max(tl.max((acc != acc).to(tl.int32), 1), 0), C)
    for only_head in range(has_nan * T.HEADS_PER_TILE):
        recomputed = initial_state(T, C)
        recomputed = attend_tiles(
            recomputed, q, scale, page, only_head, unit, batch, cache, new, features, lowest, highest, True, SOURCE, True, T, C
        )
        acc = tl.where((unit.member == only_head)[:, None], recomputed[0], acc)
    return acc, row_max, row_sum, missing


@triton.jit
def long_sequence(out, query, cache, batch, new, features, program, T: tl.constexpr, C: tl.constexpr):
    """One unit of a long sequence."""
    total = total_work(batch, True, T, C)
    nth = program // T.HEADS
    if nth < total:
        # In reverse order: later queries see more keys, and the longest work should start first.
        at = total - 1 - nth
        seq, seq_begin = find_sequence(batch, at, True, T, C)
        unit = locate_unit(batch, features, seq, (at - seq_begin).to(tl.int32), program % T.HEADS, T, C)
        q, scale = load_queries(query, cache, features, unit, T, C)
        begin = unit.low // T.KEYS * T.KEYS
        end = unit.high
        invalid = table_too_short(batch, cache, unit, C) or has_missing_page(batch, cache, unit, C)
        if invalid:
            end = begin
        state = attend_unit(initial_state(T, C), q, scale, unit, batch, cache, new, features, begin, end, T, C)
        if leaves_gaps(C):
            invalid |= tl.max(state[3].to(tl.int32)) > 0
        acc, row_max, row_sum = merged(state, C)
        result, lse = finish(acc, row_max, row_sum, unit.head, unit.live, features, cache, unit.kv_head, C)
        store(out, unit.token, unit.head, unit.live, result, lse, invalid, tl.arange(0, C.V_WIDTH), C)


@triton.jit
def table_too_short(batch, cache, unit, C: tl.constexpr):
    """Whether the sequence needs a page, and the table is too short for it or the cache has no page."""
    if C.SELECT is not None:
        return unit.high < 0  # pages are looked up entry by entry
    else:
        too_short = (end_in_pages(unit, C) - 1) // C.PAGE_SIZE >= batch.table_width
        needed = needs_pages(batch, unit, C)
        return (too_short | (cache.pages < 1)) & needed


@triton.jit
def has_missing_page(batch, cache, unit, C: tl.constexpr):
    """Whether a page that the sequence needs does not exist: then all of its output is NaN. If queries leave gaps, pages are
    checked when they are read."""
    missing = tl.full([], 0, tl.int32)
    if not leaves_gaps(C):
        begin = first_needed_key(batch, unit.context, C)
        end = tl.where(begin < unit.cached, tl.minimum((unit.cached + C.PAGE_SIZE - 1) // C.PAGE_SIZE, batch.table_width), 0)
        for first in range(begin // C.PAGE_SIZE, end, C.SCAN):
            column = first + tl.arange(0, C.SCAN)
            needed = column < end
            page = tl.load(
                batch.page_table + unit.seq.to(tl.int64) * batch.table_row + column * batch.table_step, mask=needed, other=0
            )
            _, exists = clamp_page_ids(page, cache.pages)
            missing += tl.sum((needed & ~exists).to(tl.int32))
    return uniform(missing, C) > 0


@triton.jit
def zero_padding(out, batch, program, programs, C: tl.constexpr):
    """Writes zeros to rows of the LSE, and of a newly allocated output, that belong to no sequence."""
    WIDTH: tl.constexpr = C.V_WIDTH
    HEADS: tl.constexpr = C.KV_HEADS * C.GROUP
    dim = tl.arange(0, WIDTH)
    if (out.zero_padding != 0) | (out.lse is not None):
        used = tl.load(batch.q_starts + batch.seqs * batch.q_starts_step).to(tl.int32)
        # One loop over tokens and heads: the compiler would unroll a loop over heads.
        for nth in range(program, tl.maximum(batch.tokens - used, 0).to(tl.int64) * HEADS, programs):
            token = used + nth // HEADS
            head = nth % HEADS
            if out.zero_padding != 0:
                at = token * out.token + head * out.head + dim * out.dim
                tl.store(out.at + at, tl.zeros([WIDTH], out.at.dtype.element_ty), mask=dim < C.V_DIM)
            if out.lse is not None:
                tl.store(out.lse + token * out.lse_token + head * out.lse_head, 0.0)
