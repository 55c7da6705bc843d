"""The producer: takes work items, and loads their queries, keys and values into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from quire.kernels.gluon.compat import async_load
from quire.kernels.gluon.ring_buffer import QUEUE, acquire_free, key_tiles_of, load_unit, publish, publish_when_copied
from quire.kernels.triton.device.formats import decode
from quire.kernels.triton.device.tiles import key_at, to_dot_type, value_at, within_table
from quire.kernels.triton.device.units import make_unit


@gluon.jit
def produce(units, query, cache, batch, new, features, buffers, count, T: gl.constexpr, C: gl.constexpr):
    # Sixteen bytes per thread, and eight threads per cache line.
    VECTOR: gl.constexpr = 16 if C.BYTES else 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [4, 1], [1, 0])
    k_dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    v_dim = gl.arange(0, C.V_WIDTH, gl.SliceLayout(0, LAYOUT))
    key_in_tile = gl.arange(0, T.KEYS, gl.SliceLayout(1, LAYOUT))
    nth = 0
    tile = 0
    item = count
    if count > 0:
        item = gl.atomic_add(units, 1)
    while item < count:
        head, seq, q_tile, start, q_len, kv_len, invalid = load_unit(units, item, count, T)
        unit = make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, key_in_tile, T, C)
        begin, end, tiles = key_tiles_of(unit, invalid, T)
        stop = within_table(batch, gl.minimum(end, unit.cached), C)
        key = begin + key_in_tile
        page = load_page_ids(batch, seq, key, stop, C)
        after = load_page_ids(batch, seq, key + T.KEYS, stop, C)
        load_keys(cache, new, buffers.k, unit, page, key, end, tile, k_dim, T, C)
        load_queries(query, batch, features, buffers, seq, start, q_len, kv_len, q_tile, head, item, nth, T, C)
        for _ in range(1, tiles):
            # The keys of a tile are needed before the values of the tile before it.
            before = page
            page = after
            after = load_page_ids(batch, seq, key + 2 * T.KEYS, stop, C)
            load_keys(cache, new, buffers.k, unit, page, key + T.KEYS, end, tile + 1, k_dim, T, C)
            load_values(cache, new, buffers.v, unit, before, key, end, tile, v_dim, T, C)
            key += T.KEYS
            tile += 1
        load_values(cache, new, buffers.v, unit, page, key, end, tile, v_dim, T, C)
        tile += 1
        nth += 1
        item = gl.atomic_add(units, 1)
    publish_end(buffers, item, nth)
    async_copy.wait_group(0)


@gluon.jit
def load_page_ids(batch, seq, key, end, C: gl.constexpr):
    """The page of each key below `end`. It exists: `units_kernel` has checked it."""
    column = seq.to(gl.int64) * batch.table_row + key // C.PAGE_SIZE * batch.table_step
    return gl.load(batch.page_table + column, mask=key < end, other=0)


@gluon.jit
def load_keys(cache, new, ring, unit, page, key, end, tile, dim, T: gl.constexpr, C: gl.constexpr):
    """Loads one tile of keys; zeros where no query sees the key."""
    page = page.to(gl.int64) if C.FAR else page.to(gl.int32)
    at = cache.k + key_at(page, unit.kv_head, key, 0, C)
    step: gl.constexpr = C.K_STEPS[5]
    if C.NEW:
        token = (unit.start + key - unit.context).to(gl.int64)
        at = gl.where(key >= unit.cached, new.k + (token * new.k_token + unit.kv_head * new.k_head), at)
        if T.ASYNC_COPIES:
            # The launcher has checked it. Since Triton 3.8 the compiler does not derive the alignment of a select of two addresses.
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
        if T.ASYNC_COPIES:
            at = gl.multiple_of(at, 16)
        if step != new.v_dim:
            step = gl.where(key >= unit.cached, new.v_dim, step)[:, None]
    fill(ring, at, step, (key >= unit.low) & (key < end), dim, C.V_DIM, tile, T, C)


@gluon.jit
def fill(ring, at, step, inside, dim, LENGTH: gl.constexpr, tile, T: gl.constexpr, C: gl.constexpr):
    """Copies a tile into its slot: for each key that is inside, the elements from `at` on with stride `step`, else zeros. 8-bit
    elements and memory that is not aligned pass through registers, where elements are converted."""
    mask = inside[:, None] if LENGTH == dim.shape[0] else inside[:, None] & (dim < LENGTH)[None, :]
    at = at[:, None] + dim[None, :] * step
    if T.ASYNC_COPIES:
        acquire_free(ring, tile, T.STAGES)
        async_load(ring.slots.index(tile % T.STAGES), at, mask=mask)
        publish_when_copied(ring, tile, T.STAGES)
    else:
        x = gl.load(at, mask=mask, other=0)
        acquire_free(ring, tile, T.STAGES)
        x = decode(x, gl.constexpr(C.K_FORMAT), C.HARDWARE, gl.constexpr(C.DOT))
        ring.slots.index(tile % T.STAGES).store(to_dot_type(x, C))
        fence_async_shared()
        publish(ring, tile, T.STAGES)


@gluon.jit
def load_queries(
    query, batch, features, buffers, seq, start, q_len, kv_len, q_tile, head, item, nth, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Loads a unit's queries, half for each consumer, and publishes the work item they belong to."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = T.ROWS // 2
    dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    acquire_free(buffers.q, nth, QUEUE)
    for half in gl.static_range(2):
        index = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)) + half * HALF
        mine = make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, index, T, C)
        at = mine.token.to(gl.int64)[:, None] * query.token + mine.head[:, None] * query.head + dim[None, :] * query.dim
        mask = mine.live[:, None] & (dim < C.HEAD_DIM)[None, :]
        queries = buffers.q.slots.index(nth % QUEUE * 2 + half)
        if T.ASYNC_COPIES:
            async_load(queries, query.at + at, mask=mask)
        else:
            queries.store(gl.load(query.at + at, mask=mask, other=0))
            fence_async_shared()
    publish_item(buffers, item, nth)


@gluon.jit
def publish_end(buffers, item, nth):
    """Publishes the item that ends the work: it has no queries."""
    acquire_free(buffers.q, nth, QUEUE)
    publish_item(buffers, item, nth)


@gluon.jit
def publish_item(buffers, item, nth):
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buffers.items.index(nth % QUEUE).store(gl.full([1], 0, gl.int32, ALONE) + item)
    publish_when_copied(buffers.q, nth, QUEUE)
    publish(buffers.q, nth, QUEUE)
