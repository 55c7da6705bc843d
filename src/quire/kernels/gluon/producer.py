"""The producer: takes work items, and loads their queries, keys and values into shared memory.

One thread looks up the page of each key, a tile ahead, and passes it to the others through shared memory. A tile is loaded in
chunks of `T.CHUNK` keys: registers hold the addresses of one chunk, and all other registers are the consumers'. Bytes are first
copied as they are, one tile of keys and one of values ahead, and converted on their way to the ring buffers, so that no thread
waits for memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from quire.kernels.gluon.compat import async_load, box_load
from quire.kernels.gluon.ring_buffer import (
    THREADS,
    acquire_free,
    acquire_full,
    key_tiles_of,
    load_unit,
    publish,
    publish_when_copied,
)
from quire.kernels.triton.device.formats import decode
from quire.kernels.triton.device.tiles import key_at, to_dot_type, value_at, within_table
from quire.kernels.triton.device.units import make_unit

ROWS = gl.constexpr(32)
"""Queries that are loaded at a time."""
BOXES_AT_A_TIME = gl.constexpr(4)
"""Page ids that are looked up at once: registers are few."""
KEYS = gl.constexpr(0)
VALUES = gl.constexpr(1)


class Boxes(NamedTuple):
    """Descriptors of K and V for copies of boxes."""

    k: Any
    v: Any


@gluon.jit
def make_box(storage, pages, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """A box has `T.BOX` keys of one page and head. What it has beyond the elements of a head is loaded as zeros."""
    WIDTH: gl.constexpr = C.V_WIDTH if OF == VALUES else C.K_WIDTH
    LENGTH: gl.constexpr = C.V_DIM if OF == VALUES else C.HEAD_DIM
    STEPS: gl.constexpr = C.V_STEPS if OF == VALUES else C.K_STEPS
    BLOCK: gl.constexpr = [1, 1, T.BOX, WIDTH]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, storage.dtype.element_ty)
    shape = [pages, C.KV_HEADS, C.PAGE_SIZE, LENGTH]
    return tma.make_tensor_descriptor(storage, shape, [STEPS[0], STEPS[1], STEPS[3], 1], BLOCK, layout)


@gluon.jit
def produce(units, query, cache, batch, new, features, buffers, boxes, count, T: gl.constexpr, C: gl.constexpr):
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    STAGED: gl.constexpr = C.BYTES and T.ASYNC_COPIES
    nth = 0
    tile = 0
    item = count
    if count > 0:
        item = gl.atomic_add(units, 1)
    while item < count:
        head, seq, q_tile, start, q_len, kv_len, invalid = load_unit(units, item, count, T)
        # Only what all rows have in common is used of this unit.
        row = gl.arange(0, T.ROWS, ROW)
        unit = make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, row, T, C)
        first, end, tiles = key_tiles_of(unit, invalid, T)
        stop = within_table(batch, gl.minimum(end, unit.cached), C)
        store_page_ids(buffers, tile, load_page_ids(batch, seq, first, stop, T, C), T)
        ids = load_page_ids(batch, seq, first + T.KEYS, stop, T, C)
        if STAGED:
            copy(cache, new, batch, unit, end, stop, buffers.pages, boxes.k, buffers.raw_k, first, tile, KEYS, T, C)
            convert(buffers.raw_k, buffers.k, tile, KEYS, T, C)
            store_page_ids(buffers, tile + 1, ids, T)
            ids = load_page_ids(batch, seq, first + 2 * T.KEYS, stop, T, C)
            if tiles > 1:
                copy(
                    cache, new, batch, unit, end, stop, buffers.pages, boxes.k, buffers.raw_k, first + T.KEYS, tile + 1, KEYS, T, C
                )
            copy(cache, new, batch, unit, end, stop, buffers.pages, boxes.v, buffers.raw_v, first, tile, VALUES, T, C)
        else:
            load(cache, new, batch, unit, end, stop, buffers.pages, boxes.k, buffers.k, first, tile, KEYS, T, C)
        load_queries(query, batch, features, buffers, seq, start, q_len, kv_len, q_tile, head, item, nth, T, C)
        for i in range(1, tiles):
            # The keys of a tile are needed before the values of the tile before it.
            if STAGED:
                convert(buffers.raw_k, buffers.k, tile + 1, KEYS, T, C)
                store_page_ids(buffers, tile + 2, ids, T)
                ids = load_page_ids(batch, seq, first + 3 * T.KEYS, stop, T, C)
                if i + 1 < tiles:
                    copy(
                        cache,
                        new,
                        batch,
                        unit,
                        end,
                        stop,
                        buffers.pages,
                        boxes.k,
                        buffers.raw_k,
                        first + 2 * T.KEYS,
                        tile + 2,
                        KEYS,
                        T,
                        C,
                    )
                convert(buffers.raw_v, buffers.v, tile, VALUES, T, C)
                copy(
                    cache,
                    new,
                    batch,
                    unit,
                    end,
                    stop,
                    buffers.pages,
                    boxes.v,
                    buffers.raw_v,
                    first + T.KEYS,
                    tile + 1,
                    VALUES,
                    T,
                    C,
                )
            else:
                store_page_ids(buffers, tile + 1, ids, T)
                ids = load_page_ids(batch, seq, first + 2 * T.KEYS, stop, T, C)
                load(cache, new, batch, unit, end, stop, buffers.pages, boxes.k, buffers.k, first + T.KEYS, tile + 1, KEYS, T, C)
                load(cache, new, batch, unit, end, stop, buffers.pages, boxes.v, buffers.v, first, tile, VALUES, T, C)
            first += T.KEYS
            tile += 1
        if STAGED:
            convert(buffers.raw_v, buffers.v, tile, VALUES, T, C)
        else:
            load(cache, new, batch, unit, end, stop, buffers.pages, boxes.v, buffers.v, first, tile, VALUES, T, C)
        tile += 1
        nth += 1
        item = gl.atomic_add(units, 1)
    publish_end(buffers, item, nth, T)
    async_copy.wait_group(0)


@gluon.jit
def load_page_ids(batch, seq, first, stop, T: gl.constexpr, C: gl.constexpr):
    """The page of each key of a tile, one per thread. It exists: `units_kernel` has checked it. Boxes look up their own."""
    if T.BOX == 0:
        key = first + gl.arange(0, T.KEYS, gl.BlockedLayout([1], [32], [4], [0]))
        return page_ids(batch, seq, key, stop, C)
    else:
        return first


@gluon.jit
def page_ids(batch, seq, key, stop, C: gl.constexpr):
    column = seq.to(gl.int64) * batch.table_row + key // C.PAGE_SIZE * batch.table_step
    return gl.load(batch.page_table + column, mask=key < stop, other=0).to(gl.int32)


@gluon.jit
def store_page_ids(buffers, tile, ids, T: gl.constexpr):
    if T.BOX == 0:
        buffers.pages.index(tile % 2).store(ids)


@gluon.jit
def load(cache, new, batch, unit, end, stop, pages, boxes, ring, first, tile, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Loads one tile of keys or values into its slot. What cannot be copied asynchronously passes through registers."""
    if T.ASYNC_COPIES:
        copy(cache, new, batch, unit, end, stop, pages, boxes, ring, first, tile, OF, T, C)
    else:
        slot = ring.slots.index(tile % T.STAGES)
        for i in gl.static_range(T.KEYS // T.CHUNK):
            at, mask = addresses(cache, new, batch, unit, end, stop, pages, first, tile, i, OF, T, C)
            if i == 0:
                # The first addresses are computed while the slot is still in use.
                acquire_free(ring, tile, T.STAGES)
            store_chunk(slot, i, gl.load(at, mask=mask, other=0), T, C)
        fence_async_shared()
        publish(ring, tile, T.STAGES)


@gluon.jit
def copy(cache, new, batch, unit, end, stop, pages, boxes, ring, first, tile, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Starts to copy one tile of keys or values as they are: in boxes if all of its keys are in pages and in sight, otherwise row
    by row, with zeros where no query sees the key."""
    # Bytes are copied to memory of the producer, which has converted them when it copies the next ones.
    SLOTS: gl.constexpr = 1 if C.BYTES else T.STAGES
    if T.BOX > 0:
        if (first >= unit.low) & (first + T.KEYS <= stop):
            copy_boxes(batch, unit, boxes, ring, first, tile, SLOTS, OF, T, C)
        else:
            copy_rows(cache, new, batch, unit, end, stop, pages, ring, first, tile, SLOTS, OF, T, C)
    else:
        copy_rows(cache, new, batch, unit, end, stop, pages, ring, first, tile, SLOTS, OF, T, C)


@gluon.jit
def copy_boxes(
    batch, unit, boxes, ring, first, tile, SLOTS: gl.constexpr, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Boxes of `T.BOX` keys of one page. One thread starts the copies, and arrives for all threads."""
    WIDTH: gl.constexpr = C.V_WIDTH if OF == VALUES else C.K_WIDTH
    slot = ring.slots.index(tile % SLOTS).reshape([1, 1, T.KEYS, WIDTH])
    full = ring.full.index(tile % SLOTS)
    row = batch.page_table + unit.seq.to(gl.int64) * batch.table_row
    BOXES: gl.constexpr = T.KEYS // T.BOX
    FEW: gl.constexpr = min(BOXES, BOXES_AT_A_TIME)
    for i in gl.static_range(0, BOXES, FEW):
        pages = ()
        for j in gl.static_range(FEW):
            pages = pages + (gl.load(row + (first + (i + j) * T.BOX) // C.PAGE_SIZE * batch.table_step).to(gl.int32),)
        if i == 0:
            if not C.BYTES:
                acquire_free(ring, tile, SLOTS)
            mbarrier.expect(full, T.KEYS * WIDTH * (boxes.dtype.primitive_bitwidth // 8))
        for j in gl.static_range(FEW):
            at = [pages[j], unit.kv_head, (first + (i + j) * T.BOX) % C.PAGE_SIZE, 0]
            box_load(boxes, at, full, slot.slice((i + j) * T.BOX, T.BOX, dim=2))
    mbarrier.arrive(full, count=THREADS - 1)


@gluon.jit
def copy_rows(
    cache,
    new,
    batch,
    unit,
    end,
    stop,
    pages,
    ring,
    first,
    tile,
    SLOTS: gl.constexpr,
    OF: gl.constexpr,
    T: gl.constexpr,
    C: gl.constexpr,
):
    """Chunks of `T.CHUNK` keys. Every thread arrives when its copies have completed."""
    slot = ring.slots.index(tile % SLOTS)
    for i in gl.static_range(T.KEYS // T.CHUNK):
        at, mask = addresses(cache, new, batch, unit, end, stop, pages, first, tile, i, OF, T, C)
        if i == 0 and not C.BYTES:
            acquire_free(ring, tile, SLOTS)
        async_load(slot.slice(i * T.CHUNK, T.CHUNK), at, mask=mask)
    publish_when_copied(ring.full.index(tile % SLOTS))


@gluon.jit
def convert(raw, ring, tile, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Converts a tile of bytes on its way to its slot."""
    acquire_full(raw, tile, 1)
    acquire_free(ring, tile, T.STAGES)
    slot = ring.slots.index(tile % T.STAGES)
    for i in gl.static_range(T.KEYS // T.CHUNK):
        store_chunk(slot, i, raw.slots.index(0).slice(i * T.CHUNK, T.CHUNK).load(chunk_layout(OF, C)), T, C)
    fence_async_shared()
    publish(ring, tile, T.STAGES)


@gluon.jit
def store_chunk(slot, PART: gl.constexpr, x, T: gl.constexpr, C: gl.constexpr):
    x = to_dot_type(decode(x, gl.constexpr(C.K_FORMAT), C.HARDWARE, gl.constexpr(C.DOT)), C)
    slot.slice(PART * T.CHUNK, T.CHUNK).store(x)


@gluon.constexpr_function
def chunk_layout(of, c):
    """Sixteen bytes per thread, and up to eight threads per cache line."""
    vector, width = 16 if c.BYTES else 8, c.V_WIDTH if of == VALUES else c.K_WIDTH
    lanes = min(8, width // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def addresses(
    cache, new, batch, unit, end, stop, pages, first, tile, PART: gl.constexpr, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr
):
    """The addresses of the keys or values of a chunk `[CHUNK, width]`, and which exist and are seen by some query."""
    LAYOUT: gl.constexpr = chunk_layout(OF, C)
    WIDTH: gl.constexpr = C.V_WIDTH if OF == VALUES else C.K_WIDTH
    LENGTH: gl.constexpr = C.V_DIM if OF == VALUES else C.HEAD_DIM
    BEGIN: gl.constexpr = PART * T.CHUNK
    key = first + BEGIN + gl.arange(0, T.CHUNK, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if T.BOX > 0:
        page = page_ids(batch, unit.seq, key, stop, C)
    else:
        page = pages.index(tile % 2).slice(BEGIN, T.CHUNK).load(gl.SliceLayout(1, LAYOUT))
    if C.FAR:
        page = page.to(gl.int64)
    step: gl.constexpr = C.V_STEPS[5] if OF == VALUES else C.K_STEPS[5]
    if OF == VALUES:
        at = cache.v + value_at(page, unit.kv_head, key, 0, C)
    else:
        at = cache.k + key_at(page, unit.kv_head, key, 0, C)
    if C.NEW:
        token = (unit.start + key - unit.context).to(gl.int64)
        if OF == VALUES:
            row = new.v + (token * new.v_token + unit.kv_head * new.v_head)
            if step != new.v_dim:
                step = gl.where(key >= unit.cached, new.v_dim, step)[:, None]
        else:
            row = new.k + (token * new.k_token + unit.kv_head * new.k_head)
            if step != new.k_dim:
                step = gl.where(key >= unit.cached, new.k_dim, step)[:, None]
        at = gl.where(key >= unit.cached, row, at)
        if T.ASYNC_COPIES:
            # The launcher has checked it. Since Triton 3.8 the compiler does not derive the alignment of a select of two addresses.
            at = gl.multiple_of(at, 16)
    inside = (key >= unit.low) & (key < end)
    mask = inside[:, None] if LENGTH == WIDTH else inside[:, None] & (dim < LENGTH)[None, :]
    return at[:, None] + dim[None, :] * step, mask


@gluon.jit
def load_queries(
    query, batch, features, buffers, seq, start, q_len, kv_len, q_tile, head, item, nth, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Loads a unit's queries, half for each consumer, and publishes the work item they belong to."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = T.ROWS // 2
    dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    acquire_free(buffers.q, nth, T.QUEUE)
    for half in gl.static_range(2):
        queries = buffers.q.slots.index(nth % T.QUEUE * 2 + half)
        for i in gl.static_range(HALF // ROWS):
            index = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) + (half * HALF + i * ROWS)
            mine = make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, index, T, C)
            at = mine.token.to(gl.int64)[:, None] * query.token + mine.head[:, None] * query.head + dim[None, :] * query.dim
            mask = mine.live[:, None] & (dim < C.HEAD_DIM)[None, :]
            part = queries.slice(i * ROWS, ROWS)
            if T.ASYNC_COPIES:
                async_load(part, query.at + at, mask=mask)
            else:
                part.store(gl.load(query.at + at, mask=mask, other=0))
    if not T.ASYNC_COPIES:
        fence_async_shared()
    publish_item(buffers, item, nth, T)


@gluon.jit
def publish_end(buffers, item, nth, T: gl.constexpr):
    """Publishes the item that ends the work: it has no queries."""
    acquire_free(buffers.q, nth, T.QUEUE)
    publish_item(buffers, item, nth, T)


@gluon.jit
def publish_item(buffers, item, nth, T: gl.constexpr):
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buffers.items.index(nth % T.QUEUE).store(gl.full([1], 0, gl.int32, ALONE) + item)
    publish_when_copied(buffers.q.full.index(nth % T.QUEUE))
    publish(buffers.q, nth, T.QUEUE)
