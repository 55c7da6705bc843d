"""The loader: finds work, and fetches its queries, keys and values."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from quire.kernels.gluon.rings import QUEUE, WORDS, Item, await_free, landing, put_word, say_full, tiles_between
from quire.kernels.gluon.units import unit_of
from quire.kernels.triton.attend import misses_page, note, runs_out
from quire.kernels.triton.formats import decode
from quire.kernels.triton.schedule import (
    find_row,
    keys_of,
    lengths,
    run_of,
    share_begin,
    share_of,
    share_out,
    short_work,
)
from quire.kernels.triton.tiles import as_factor, existing, key_at, value_at
from quire.kernels.triton.units import place

BROKEN = gl.constexpr(WORDS.value - 1)


@gluon.jit
def load_units(units, query, cache, rows, new, features, rings, count, T: gl.constexpr, C: gl.constexpr):
    """Takes units of long rows, the next that nobody has taken, until none is left."""
    nth = 0
    tile = 0
    at = count
    if count > 0:
        at = gl.atomic_add(units, 1)
    while at < count:
        head, row, q_tile, start, q_len, kv_len, broken = unit_of(units, at, count, T)
        unit = place(rows, features, row, start, q_len, kv_len, q_tile, head, at, T, C)
        begin = unit.low // T.KEYS * T.KEYS
        end = gl.where(broken != 0, begin, unit.high)
        item = Item(row, head, q_tile, start, q_len, kv_len, begin, end, -1, broken)
        tile = fetch(query, cache, rows, new, features, rings, item, nth, tile, False, T, C)
        nth += 1
        at = gl.atomic_add(units, 1)
    end_of_work(rings, nth, T)


@gluon.jit
def load_shares(room, query, cache, rows, new, features, rings, T: gl.constexpr, C: gl.constexpr):
    """Takes this program's large share of the short rows' keys, then small ones that nobody has taken, until none is left."""
    scanned = gl.arange(0, C.SCAN, gl.BlockedLayout([1], [32], [T.LOADERS], [0]))
    programs = gl.num_programs(0)
    share = gl.program_id(0)
    shares = share_out(rows, scanned, programs, T, C)
    if room.queue is not None and share == 0:
        gl.store(room.queue, shares.larges + shares.smalls)
    nth = 0
    tile = 0
    while share < shares.larges + shares.smalls:
        nth, tile = load_share(room, query, cache, rows, new, features, rings, share, shares, scanned, nth, tile, T, C)
        share = shares.larges + shares.smalls
        if room.queue is not None:
            if C.EARLY:
                tl.extra.cuda.gdc_wait()
            if shares.smalls > 0:
                share = programs + gl.atomic_add(room.queue + 1, 1)
    end_of_work(rings, nth, T)


@gluon.jit
def load_share(
    room, query, cache, rows, new, features, rings, share, shares, scanned, nth, tile, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """One share, unit by unit, each whole or in part; gives how many items and tiles there have been."""
    at = share_begin(share, shares)
    end = share_begin(share + 1, shares)
    begin = at
    row, row_begin = find_row(rows, scanned, at, False, T, C)
    note(room, share, 0, 0, 0, 0, 0, T, C)
    while at < end:
        start, q_len, kv_len = lengths(rows, row, row >= 0)
        work = short_work(q_len, kv_len, T, C)
        if work == 0:
            row += 1
        else:
            head, q_tile, q_tiles, piece, count, pieces = run_of(at, end, row_begin, q_len, kv_len, T, C)
            unit = place(rows, features, row, start, q_len, kv_len, q_tile, head, at, T, C)
            lowest, highest = keys_of(unit, q_len, kv_len, piece, count, T, C)
            broken = runs_out(rows, cache, unit, C)
            if q_tiles > 1:
                broken |= misses_page(rows, cache, unit, scanned, C)
            highest = gl.where(broken, lowest, highest)
            second = (at != begin).to(gl.int32)
            part = gl.where(count == pieces, -1, share * 2 + second)
            item = Item(row, head, q_tile, start, q_len, kv_len, lowest, highest, part, broken.to(gl.int32))
            tile = fetch(query, cache, rows, new, features, rings, item, nth, tile, True, T, C)
            if (piece == 0) & (count != pieces):
                last = share_of(at + pieces - 1, shares)
                first = q_tile * T.TOKENS
                note(room, share, last - share + 1, second, start + first, q_len - first, head, T, C)
            nth += 1
            at += count
            if at == row_begin + work:
                row_begin = at
                row += 1
    return nth, tile


@gluon.jit
def fetch(query, cache, rows, new, features, rings, item, nth, tile, ASK: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """One item; gives the tile that comes next. ASK: nobody has looked yet whether its pages exist."""
    # Sixteen bytes a thread, and eight threads to what the cache fetches at once.
    VECTOR: gl.constexpr = 16 if C.BYTES else 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [T.LOADERS, 1], [1, 0])
    k_dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    v_dim = gl.arange(0, C.V_WIDTH, gl.SliceLayout(0, LAYOUT))
    nth_key = gl.arange(0, T.KEYS, gl.SliceLayout(1, LAYOUT))
    unit = place(
        rows, features, item.row, item.start, item.q_len, item.kv_len, item.q_tile, item.head, nth_key, T, C
    )  # fmt: skip
    stop = gl.minimum(item.end, unit.cached)
    key = item.begin + nth_key
    missing = key < 0
    page, missing = look_up(cache, rows, item.row, key, unit.low, stop, missing, ASK, C)
    after, missing = look_up(cache, rows, item.row, key + T.KEYS, unit.low, stop, missing, ASK, C)
    load_keys(cache, new, rings.k, unit, page, key, item.end, tile, k_dim, T, C)
    load_queries(query, rows, features, rings, item, nth, T, C)
    for _ in range(1, tiles_between(item.begin, item.end, T)):
        # The keys of a tile are needed before the values of the one before it.
        before = page
        page = after
        after, missing = look_up(cache, rows, item.row, key + 2 * T.KEYS, unit.low, stop, missing, ASK, C)
        load_keys(cache, new, rings.k, unit, page, key + T.KEYS, item.end, tile + 1, k_dim, T, C)
        load_values(cache, new, rings.v, unit, before, key, item.end, tile, v_dim, T, C)
        key += T.KEYS
        tile += 1
    if ASK:
        put_word(rings, nth, BROKEN, item.broken | gl.max(missing.to(gl.int32), 0), T)
    load_values(cache, new, rings.v, unit, page, key, item.end, tile, v_dim, T, C)
    return tile + 1


@gluon.jit
def look_up(cache, rows, row, key, low, end, missing, ASK: gl.constexpr, C: gl.constexpr):
    """The page of each key below `end`; if nobody has asked, the last one's in place of those that do not exist, and which keys
    that has happened to."""
    column = row.to(gl.int64) * rows.table_row + key // C.PAGE_SIZE * C.TABLE_STEP
    page = gl.load(rows.page_table + column, mask=key < end, other=0)
    if ASK:
        page, exists = existing(page, cache.pages)
        missing |= (key >= low) & (key < end) & (exists == 0)
    return page, missing


@gluon.jit
def load_keys(cache, new, ring, unit, page, key, end, tile, dim, T: gl.constexpr, C: gl.constexpr):
    """One tile of keys; zeros where nobody looks."""
    page = page.to(gl.int64) if C.FAR else page.to(gl.int32)
    at = cache.k + key_at(page, unit.kv_head, key, 0, C)
    step: gl.constexpr = C.K_STEPS[5]
    if C.NEW:
        token = (unit.start + key - unit.context).to(gl.int64)
        at = gl.where(key >= unit.cached, new.k + (token * new.k_token + unit.kv_head * new.k_head), at)
        if step != C.NEW_K_DIM:
            step = gl.where(key >= unit.cached, C.NEW_K_DIM, step)[:, None]
    fill(ring, at, step, (key >= unit.low) & (key < end), dim, C.HEAD_DIM, tile, T, C)


@gluon.jit
def load_values(cache, new, ring, unit, page, key, end, tile, dim, T: gl.constexpr, C: gl.constexpr):
    """The same for values."""
    page = page.to(gl.int64) if C.FAR else page.to(gl.int32)
    at = cache.v + value_at(page, unit.kv_head, key, 0, C)
    step: gl.constexpr = C.V_STEPS[5]
    if C.NEW:
        token = (unit.start + key - unit.context).to(gl.int64)
        at = gl.where(key >= unit.cached, new.v + (token * new.v_token + unit.kv_head * new.v_head), at)
        if step != C.NEW_V_DIM:
            step = gl.where(key >= unit.cached, C.NEW_V_DIM, step)[:, None]
    fill(ring, at, step, (key >= unit.low) & (key < end), dim, C.V_DIM, tile, T, C)


@gluon.jit
def fill(ring, at, step, inside, dim, LENGTH: gl.constexpr, tile, T: gl.constexpr, C: gl.constexpr):
    """Brings a tile into its place: of each row that is inside what begins at `at`, by steps, else zeros. Bytes become numbers on
    the way, and what is not aligned for copies takes it too."""
    mask = inside[:, None] if LENGTH == dim.shape[0] else inside[:, None] & (dim < LENGTH)[None, :]
    at = at[:, None] + dim[None, :] * step
    if T.COPIES:
        await_free(ring, tile, T.STAGES)
        async_copy.async_copy_global_to_shared(ring.places.index(tile % T.STAGES), at, mask=mask)
        landing(ring, tile, T.STAGES)
    else:
        x = gl.load(at, mask=mask, other=0)
        await_free(ring, tile, T.STAGES)
        ring.places.index(tile % T.STAGES).store(as_factor(decode(x, gl.constexpr(C.FORMAT), C.HARDWARE), C))
        fence_async_shared()
        say_full(ring, tile, T.STAGES)


@gluon.jit
def load_queries(query, rows, features, rings, item, nth, T: gl.constexpr, C: gl.constexpr):
    """An item's queries, a part for each computer; and the item itself."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [T.LOADERS, 1], [1, 0])
    COMPUTERS: gl.constexpr = T.COMPUTERS
    EACH: gl.constexpr = T.ROWS // COMPUTERS
    dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    await_free(rings.q, nth, QUEUE)
    for part in gl.static_range(COMPUTERS):
        index = gl.arange(0, EACH, gl.SliceLayout(1, LAYOUT)) + part * EACH
        mine = place(
            rows, features, item.row, item.start, item.q_len, item.kv_len, item.q_tile, item.head, index, T, C
        )  # fmt: skip
        at = mine.token.to(gl.int64)[:, None] * query.token + mine.head[:, None] * query.head + dim[None, :] * C.Q_DIM
        mask = mine.live[:, None] & (dim < C.HEAD_DIM)[None, :]
        queries = rings.q.places.index(nth % QUEUE * COMPUTERS + part)
        if T.COPIES:
            async_copy.async_copy_global_to_shared(queries, query.at + at, mask=mask)
        else:
            queries.store(gl.load(query.at + at, mask=mask, other=0))
            fence_async_shared()
    for member in gl.static_range(WORDS):
        put_word(rings, nth, member, item[member], T)
    landing(rings.q, nth, QUEUE)
    say_full(rings.q, nth, QUEUE)


@gluon.jit
def end_of_work(rings, nth, T: gl.constexpr):
    """An item without queries: the last."""
    await_free(rings.q, nth, QUEUE)
    put_word(rings, nth, 0, -1, T)
    landing(rings.q, nth, QUEUE)
    say_full(rings.q, nth, QUEUE)
    async_copy.wait_group(0)
