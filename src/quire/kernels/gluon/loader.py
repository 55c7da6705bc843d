"""The loader: takes items, and fetches their queries, keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from quire.kernels.gluon.names import async_load
from quire.kernels.gluon.rings import QUEUE, await_free, landing, say_full, tiles_of, unit_of
from quire.kernels.triton.formats import decode
from quire.kernels.triton.tiles import as_factor, key_at, value_at, within_table
from quire.kernels.triton.units import place


@gluon.jit
def load(units, query, cache, rows, new, features, rings, count, T: gl.constexpr, C: gl.constexpr):
    # Sixteen bytes a thread, and eight threads to what the cache fetches at once.
    VECTOR: gl.constexpr = 16 if C.BYTES else 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [4, 1], [1, 0])
    k_dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    v_dim = gl.arange(0, C.V_WIDTH, gl.SliceLayout(0, LAYOUT))
    nth_key = gl.arange(0, T.KEYS, gl.SliceLayout(1, LAYOUT))
    nth = 0
    tile = 0
    item = count
    if count > 0:
        item = gl.atomic_add(units, 1)
    while item < count:
        head, row, q_tile, start, q_len, kv_len, broken = unit_of(units, item, count, T)
        unit = place(rows, features, row, start, q_len, kv_len, q_tile, head, nth_key, T, C)
        begin, end, tiles = tiles_of(unit, broken, T)
        stop = within_table(rows, gl.minimum(end, unit.cached), C)
        key = begin + nth_key
        page = look_up(rows, row, key, stop, C)
        after = look_up(rows, row, key + T.KEYS, stop, C)
        load_keys(cache, new, rings.k, unit, page, key, end, tile, k_dim, T, C)
        load_queries(query, rows, features, rings, row, start, q_len, kv_len, q_tile, head, item, nth, T, C)
        for _ in range(1, tiles):
            # The keys of a tile are needed before the values of the one before it.
            before = page
            page = after
            after = look_up(rows, row, key + 2 * T.KEYS, stop, C)
            load_keys(cache, new, rings.k, unit, page, key + T.KEYS, end, tile + 1, k_dim, T, C)
            load_values(cache, new, rings.v, unit, before, key, end, tile, v_dim, T, C)
            key += T.KEYS
            tile += 1
        load_values(cache, new, rings.v, unit, page, key, end, tile, v_dim, T, C)
        tile += 1
        nth += 1
        item = gl.atomic_add(units, 1)
    announce(rings, item, nth)
    async_copy.wait_group(0)


@gluon.jit
def look_up(rows, row, key, end, C: gl.constexpr):
    """The page of each key below `end`: there is one, `units` has looked."""
    column = row.to(gl.int64) * rows.table_row + key // C.PAGE_SIZE * rows.table_step
    return gl.load(rows.page_table + column, mask=key < end, other=0)


@gluon.jit
def load_keys(cache, new, ring, unit, page, key, end, tile, dim, T: gl.constexpr, C: gl.constexpr):
    """One tile of keys; zeros where nobody looks."""
    page = page.to(gl.int64) if C.FAR else page.to(gl.int32)
    at = cache.k + key_at(page, unit.kv_head, key, 0, C)
    step: gl.constexpr = C.K_STEPS[5]
    if C.NEW:
        token = (unit.start + key - unit.context).to(gl.int64)
        at = gl.where(key >= unit.cached, new.k + (token * new.k_token + unit.kv_head * new.k_head), at)
        if T.COPIES:
            # The launcher has checked it. From 3.8 on the compiler no longer derives the alignment of a choice of two addresses.
            at = gl.multiple_of(at, 16)
        if step != new.k_dim:
            step = gl.where(key >= unit.cached, new.k_dim, step)[:, None]
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
        if T.COPIES:
            at = gl.multiple_of(at, 16)
        if step != new.v_dim:
            step = gl.where(key >= unit.cached, new.v_dim, step)[:, None]
    fill(ring, at, step, (key >= unit.low) & (key < end), dim, C.V_DIM, tile, T, C)


@gluon.jit
def fill(ring, at, step, inside, dim, LENGTH: gl.constexpr, tile, T: gl.constexpr, C: gl.constexpr):
    """Brings a tile into its place: of each row that is inside what begins at `at`, by steps, else zeros. Bytes become numbers on
    the way, and what is not aligned for copies takes it too."""
    mask = inside[:, None] if LENGTH == dim.shape[0] else inside[:, None] & (dim < LENGTH)[None, :]
    at = at[:, None] + dim[None, :] * step
    if T.COPIES:
        await_free(ring, tile, T.STAGES)
        async_load(ring.places.index(tile % T.STAGES), at, mask=mask)
        landing(ring, tile, T.STAGES)
    else:
        x = gl.load(at, mask=mask, other=0)
        await_free(ring, tile, T.STAGES)
        ring.places.index(tile % T.STAGES).store(as_factor(decode(x, gl.constexpr(C.FORMAT), C.HARDWARE), C))
        fence_async_shared()
        say_full(ring, tile, T.STAGES)


@gluon.jit
def load_queries(
    query, rows, features, rings, row, start, q_len, kv_len, q_tile, head, item, nth, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """A unit's queries, half for each computer; and the item that they belong to."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = T.ROWS // 2
    dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    await_free(rings.q, nth, QUEUE)
    for half in gl.static_range(2):
        index = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)) + half * HALF
        mine = place(rows, features, row, start, q_len, kv_len, q_tile, head, index, T, C)
        at = mine.token.to(gl.int64)[:, None] * query.token + mine.head[:, None] * query.head + dim[None, :] * query.dim
        mask = mine.live[:, None] & (dim < C.HEAD_DIM)[None, :]
        queries = rings.q.places.index(nth % QUEUE * 2 + half)
        if T.COPIES:
            async_load(queries, query.at + at, mask=mask)
        else:
            queries.store(gl.load(query.at + at, mask=mask, other=0))
            fence_async_shared()
    put_item(rings, item, nth)


@gluon.jit
def announce(rings, item, nth):
    """An item without queries: the last."""
    await_free(rings.q, nth, QUEUE)
    put_item(rings, item, nth)


@gluon.jit
def put_item(rings, item, nth):
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rings.items.index(nth % QUEUE).store(gl.full([1], 0, gl.int32, ALONE) + item)
    landing(rings.q, nth, QUEUE)
    say_full(rings.q, nth, QUEUE)
