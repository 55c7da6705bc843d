"""Attention over pages. One kernel; a program is either one of the first `room.programs`, or a tile of long queries.

    the first programs   take a share each of the key tiles of all short rows, whatever units these belong to. What they gathered
                         of a unit that others have a share in waits in `room`, and `combine` adds it up.
    the others           take one unit of a long row each, from its first key to its last, the longest first

Both kinds run side by side on the card. Without LONG every row is short, and there are no others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.schedule import (
    find_row,
    key_tiles,
    lengths,
    share_at,
    share_begin,
    share_of,
    shares_of,
    short_totals,
    short_work,
    total_work,
    uniform,
)
from quire.kernels.triton.tiles import existing, look_up, meet, nth_key
from quire.kernels.triton.units import finish, load_queries, locate, nothing_yet, parts_of, store


@triton.jit
def attend_kernel(out, room, query, cache, rows, new, features, SHORT: tl.constexpr, LONG: tl.constexpr, C: tl.constexpr):
    program = tl.program_id(0)
    if C.EARLY:
        if room.beside != 0:
            tl.extra.cuda.gdc_launch_dependents()
    if program < room.programs:
        zero_padding(out, rows, program, room.programs, C)
        short_rows(out, room, query, cache, rows, new, features, program, SHORT, C)
        if C.EARLY:
            if room.beside == 0:
                tl.extra.cuda.gdc_launch_dependents()
            elif program == 0:
                tl.extra.cuda.gdc_wait()
    elif LONG is not None:
        long_row(out, query, cache, rows, new, features, program - room.programs, LONG, C)


@triton.jit
def short_rows(out, room, query, cache, rows, new, features, program, T: tl.constexpr, C: tl.constexpr):
    """One program's share of the short rows."""
    one_head, units = short_totals(rows, T, C)
    total = one_head * T.HEADS
    shares = shares_of(rows, total, units, room, T, C)
    share = share_of(program, shares, T, C)
    at = share_begin(share, shares, T, C)
    end = share_begin(share + 1, shares, T, C)
    begin = at
    head_begin = at // tl.maximum(one_head, 1) * one_head
    row, row_begin = find_row(rows, at - head_begin, False, T, C)
    row_begin += head_begin
    note(room, share, 0, 0, 0, 0, 0, T, C)
    while at < end:
        start, q_len, kv_len = lengths(rows, row, True)
        work = short_work(rows, q_len, kv_len, T, C)
        if work > 0:
            first, tiles = key_tiles(rows, q_len, kv_len, T, C)
            pieces = tl.where(C.INVARIANT, 1, tiles + C.OPENING)
            q_tile = ((at - row_begin) // pieces).to(tl.int32)
            piece = (at - row_begin - q_tile * pieces).to(tl.int32)
            count = tl.minimum(pieces - piece, end - at).to(tl.int32)
            q_tiles = (q_len + T.TOKENS - 1) // T.TOKENS
            head = (at // one_head).to(tl.int32)
            unit = locate(rows, features, row, q_tile, head, T, C)
            if C.INVARIANT:
                lowest = unit.low // T.STEP * T.STEP
                highest = unit.high
            else:
                lowest = tl.maximum((first + tl.maximum(piece - C.OPENING, 0)) * T.STEP, unit.low // T.STEP * T.STEP)
                highest = tl.minimum((first + tl.maximum(piece + count - C.OPENING, 0)) * T.STEP, unit.high)
            broken = runs_out(rows, cache, unit, C)
            if q_tiles > 1:
                broken |= misses_page(rows, cache, unit, C)
            if broken:
                highest = lowest
            # Pages first, then queries: the keys wait for their pages, and nobody for the queries but the first product.
            page = look_up(rows, unit, lowest + nth_key(T), highest, C)
            q, scale = load_queries(query, cache, features, unit, T, C)
            SOURCE: tl.constexpr = "both" if C.NEW else "pages"
            state = nothing_yet(T, C)
            state = meet(state, q, scale, page, None, unit, rows, cache, new, features, lowest, highest, True, SOURCE, True, T, C)
            if T.TOGETHER > 1:
                state = apart(state, q, scale, page, unit, rows, cache, new, features, lowest, highest, SOURCE, T, C)
            weighted, top, weights, missing = state
            broken |= tl.max(missing.to(tl.int32)) > 0
            if count == pieces:
                kv_head = unit.kv_head if T.TOGETHER == 1 else unit.kv_head + unit.member
                result, lse = finish(weighted, top, weights, unit.head, unit.live, features, cache, kv_head, C)
                store(out, unit.token, unit.head, unit.live, result, lse, broken, tl.arange(0, C.V_WIDTH), C)
            else:
                leave(room, share, at != begin, weighted, top, weights, broken, T, C)
                if piece == 0:
                    last = share_at(at + pieces - 1, shares, T, C)
                    nth = q_tile * T.TOKENS
                    note(room, share, last - share + 1, (at != begin).to(tl.int32), start + nth, q_len - nth, head, T, C)
            at += count
        if at == row_begin + work:
            row_begin = at
            row = tl.where(row + 1 == rows.seqs, 0, row + 1)


@triton.jit
def apart(
    state, q, scale, page, unit, rows, cache, new, features, lowest, highest,
    SOURCE: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Meets the keys once more, one head after the other, if something became NaN. A value that is infinite or NaN is its own
    head's, but a weight of 0 does not keep it away from the heads that are together with it."""
    weighted, top, weights, missing = state
    spoiled = uniform(tl.max(tl.max((weighted != weighted).to(tl.int32), 1), 0), C)
    for only in range(spoiled * T.TOGETHER):
        again = nothing_yet(T, C)
        again = meet(again, q, scale, page, only, unit, rows, cache, new, features, lowest, highest, True, SOURCE, True, T, C)
        weighted = tl.where((unit.member == only)[:, None], again[0], weighted)
    return weighted, top, weights, missing


@triton.jit
def leave(room, share, second, weighted, top, weights, broken, T: tl.constexpr, C: tl.constexpr):
    """Leaves what was gathered of a unit that several shares have. At most two of a share are such: its first and its last."""
    index = tl.arange(0, T.ROWS)
    dim = tl.arange(0, C.V_WIDTH)
    place = index * (2 * room.programs) + (share * 2 + second.to(tl.int32))
    tops, totals, _ = parts_of(room, T.ROWS, C)
    tl.store(room.at + place[:, None] * C.V_WIDTH + dim[None, :], weighted)
    tl.store(tops + place, top)
    tl.store(totals + place, tl.where(broken, float("nan"), weights))


@triton.jit
def note(room, share, parts, second, token, tokens, head, T: tl.constexpr, C: tl.constexpr):
    """Notes of which unit a share has the first part of several: how many they are, in which place its own is, where the unit's
    queries are. 0 parts: none."""
    _, _, notes = parts_of(room, T.ROWS, C)
    tl.store(notes + share * 5, parts)
    tl.store(notes + share * 5 + 1, second)
    tl.store(notes + share * 5 + 2, token)
    tl.store(notes + share * 5 + 3, tokens)
    tl.store(notes + share * 5 + 4, head)


@triton.jit
def long_row(out, query, cache, rows, new, features, program, T: tl.constexpr, C: tl.constexpr):
    """One unit of a long row."""
    total = total_work(rows, True, T, C)
    nth = program // T.HEADS
    if nth < total:
        # From the last to the first: later queries see more keys, and the longest work should not begin last.
        at = total - 1 - nth
        row, row_begin = find_row(rows, at, True, T, C)
        unit = locate(rows, features, row, (at - row_begin).to(tl.int32), program % T.HEADS, T, C)
        q, scale = load_queries(query, cache, features, unit, T, C)
        begin = unit.low // T.KEYS * T.KEYS
        end = unit.high
        broken = runs_out(rows, cache, unit, C) or misses_page(rows, cache, unit, C)
        if broken:
            end = begin
        weighted, top, weights, missing = meet_all(nothing_yet(T, C), q, scale, unit, rows, cache, new, features, begin, end, T, C)
        if C.TREE:
            broken |= tl.max(missing.to(tl.int32)) > 0
        result, lse = finish(weighted, top, weights, unit.head, unit.live, features, cache, unit.kv_head, C)
        store(out, unit.token, unit.head, unit.live, result, lse, broken, tl.arange(0, C.V_WIDTH), C)


@triton.jit
def meet_all(state, q, scale, unit, rows, cache, new, features, begin, end, T: tl.constexpr, C: tl.constexpr):
    """Keys [begin, end) of a unit in order; begin is a multiple of a tile. Where every query sees every key, nothing is hidden.
    The pages exist, except a tree's: nobody has asked for those."""
    SOURCE: tl.constexpr = "both" if C.NEW else "pages"
    if C.TREE:
        state = meet(state, q, scale, None, None, unit, rows, cache, new, features, begin, end, True, SOURCE, True, T, C)
    else:
        if C.LEFT is not None:
            middle = tl.minimum((unit.all_from + T.KEYS - 1) // T.KEYS * T.KEYS, (end + T.KEYS - 1) // T.KEYS * T.KEYS)
            middle = tl.maximum(middle, begin)
            stop = tl.minimum(middle, end)
            state = meet(state, q, scale, None, None, unit, rows, cache, new, features, begin, stop, True, SOURCE, False, T, C)
            begin = middle
        middle = tl.minimum(tl.minimum(unit.all_to, unit.cached), end) // T.KEYS * T.KEYS
        middle = tl.maximum(middle, begin)
        state = meet(state, q, scale, None, None, unit, rows, cache, new, features, begin, middle, False, "pages", False, T, C)
        if C.NEW:
            # The tile in which the context ends, then tiles of new tokens alone.
            begin = tl.maximum((unit.cached + T.KEYS - 1) // T.KEYS * T.KEYS, middle)
            stop = tl.minimum(begin, end)
            state = meet(state, q, scale, None, None, unit, rows, cache, new, features, middle, stop, True, "both", False, T, C)
            middle = tl.maximum(tl.minimum(unit.all_to, end) // T.KEYS * T.KEYS, begin)
            state = meet(state, q, scale, None, None, unit, rows, cache, new, features, begin, middle, False, "new", False, T, C)
        # Behind the context all keys are new, if all long rows take theirs from there.
        LAST: tl.constexpr = "new" if C.NEW and C.CONTEXT_FROM <= C.SHORT + 1 else SOURCE
        state = meet(state, q, scale, None, None, unit, rows, cache, new, features, middle, end, True, LAST, False, T, C)
    return state


@triton.jit
def needed_from(unit, C: tl.constexpr):
    """The first key that a row needs. If it is not below `unit.cached`, the row needs no page. A tree may need any key."""
    if C.LEFT is not None and not C.TREE:
        return tl.maximum(unit.context - C.LEFT, 0)
    else:
        return unit.context * 0


@triton.jit
def runs_out(rows, cache, unit, C: tl.constexpr):
    """Whether the table is too short for the row, or there is no page at all, and the row needs a page."""
    too_short = (unit.cached - 1) // C.PAGE_SIZE >= rows.table_width
    needed = unit.cached > needed_from(unit, C)
    if C.TREE and C.LEFT is not None:
        needed &= tl.max((unit.live & (unit.at - C.LEFT < unit.cached)).to(tl.int32)) > 0
    return (too_short | (cache.pages < 1)) & needed


@triton.jit
def misses_page(rows, cache, unit, C: tl.constexpr):
    """Whether a page that a row needs does not exist: it is NaN as a whole, whichever of its queries see that page. A tree is
    asked key by key instead: it may need only some of them."""
    missing = tl.full([], 0, tl.int32)
    if not C.TREE:
        begin = needed_from(unit, C)
        end = tl.where(begin < unit.cached, tl.minimum((unit.cached + C.PAGE_SIZE - 1) // C.PAGE_SIZE, rows.table_width), 0)
        for first in range(begin // C.PAGE_SIZE, end, C.SCAN):
            column = first + tl.arange(0, C.SCAN)
            needed = column < end
            page = tl.load(
                rows.page_table + unit.row.to(tl.int64) * rows.table_row + column * rows.table_step, mask=needed, other=0
            )
            _, exists = existing(page, cache.pages)
            missing += tl.sum((needed & ~exists).to(tl.int32))
    return uniform(missing, C) > 0


@triton.jit
def zero_padding(out, rows, program, programs, C: tl.constexpr):
    """Zeros for rows of the LSE, and of an output that is new, which belong to no sequence."""
    WIDTH: tl.constexpr = C.V_WIDTH
    HEADS: tl.constexpr = C.KV_HEADS * C.GROUP
    dim = tl.arange(0, WIDTH)
    if (out.zero_padding != 0) | (out.lse is not None):
        used = tl.load(rows.q_starts + rows.seqs * rows.q_starts_step).to(tl.int32)
        # One loop over tokens and heads: the compiler would unroll one over heads alone.
        for nth in range(program, tl.maximum(rows.tokens - used, 0).to(tl.int64) * HEADS, programs):
            token = used + nth // HEADS
            head = nth % HEADS
            if out.zero_padding != 0:
                at = token * out.token + head * out.head + dim * out.dim
                tl.store(out.at + at, tl.zeros([WIDTH], out.at.dtype.element_ty), mask=dim < C.V_DIM)
            if out.lse is not None:
                tl.store(out.lse + token * out.lse_token + head * out.lse_head, 0.0)
