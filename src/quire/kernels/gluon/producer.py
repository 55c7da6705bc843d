"""The producers: they take work items, and load their queries, keys and values into shared memory, tile by tile.

Keys and values of 16 bits have one producer. Those of 8 bits have two, which convert them at the same time. They are first copied
as bytes, one tile ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from quire.kernels.gluon.compat import async_load
from quire.kernels.gluon.copies import KEYS, VALUES, convert, copy, load, page_ids
from quire.kernels.gluon.ring_buffer import (
    acquire_free,
    is_missing,
    key_tiles_of,
    load_unit,
    next_item,
    publish,
    publish_when_copied,
    release,
    tokens_around_gaps,
    unit_of_rows,
)
from quire.kernels.triton.device.tiles import within_table
from quire.kernels.triton.device.units import make_unit

ROWS = gl.constexpr(32)
"""Queries that are loaded at a time."""


@gluon.jit
def produce(units, query, cache, batch, new, features, buffers, boxes, count, T: gl.constexpr, C: gl.constexpr):
    """Loads queries, keys and values."""
    nth = 0
    tile = 0
    item = take_item(units, count)
    while item < count:
        unit, limits, first, tiles, where = locate(units, batch, features, item, count, T, C)
        store_page_ids(buffers, tile, load_page_ids(batch, unit, first, limits, T, C), T)
        ids = load_page_ids(batch, unit, first + T.KEYS, limits, T, C)
        load(cache, new, batch, unit, limits, buffers.pages, boxes.k, buffers.k, first, tile, KEYS, T, C)
        load_queries(query, batch, features, buffers, where, item, nth, T, C)
        for _ in range(1, tiles):
            # The keys of a tile are needed before the values of the tile before it.
            store_page_ids(buffers, tile + 1, ids, T)
            ids = load_page_ids(batch, unit, first + 2 * T.KEYS, limits, T, C)
            load(cache, new, batch, unit, limits, buffers.pages, boxes.k, buffers.k, first + T.KEYS, tile + 1, KEYS, T, C)
            load(cache, new, batch, unit, limits, buffers.pages, boxes.v, buffers.v, first, tile, VALUES, T, C)
            first += T.KEYS
            tile += 1
        load(cache, new, batch, unit, limits, buffers.pages, boxes.v, buffers.v, first, tile, VALUES, T, C)
        tile += 1
        nth += 1
        item = take_item(units, count)
    publish_end(buffers, item, nth, T)
    async_copy.wait_group(0)


@gluon.jit
def produce_keys(units, query, cache, batch, new, features, buffers, boxes, count, T: gl.constexpr, C: gl.constexpr):
    """Loads queries, and keys of 8 bits."""
    nth = 0
    tile = 0
    item = take_item(units, count)
    while item < count:
        unit, limits, first, tiles, where = locate(units, batch, features, item, count, T, C)
        copy(cache, new, batch, unit, limits, None, boxes.k, buffers.raw_k, first, tile, KEYS, T, C)
        load_queries(query, batch, features, buffers, where, item, nth, T, C)
        for i in range(tiles):
            convert(buffers.raw_k, buffers.k, tile, KEYS, T, C)
            first += T.KEYS
            tile += 1
            if i + 1 < tiles:
                copy(cache, new, batch, unit, limits, None, boxes.k, buffers.raw_k, first, tile, KEYS, T, C)
        nth += 1
        item = take_item(units, count)
    publish_end(buffers, item, nth, T)
    async_copy.wait_group(0)


@gluon.jit
def produce_values(units, cache, batch, new, features, buffers, boxes, count, T: gl.constexpr, C: gl.constexpr):
    """Loads values of 8 bits for the items that the other producer takes."""
    nth = 0
    tile = 0
    item = next_item(buffers, nth, T)
    while item < count:
        release(buffers.q, nth, T.QUEUE)
        unit, limits, first, tiles, _ = locate(units, batch, features, item, count, T, C)
        copy(cache, new, batch, unit, limits, None, boxes.v, buffers.raw_v, first, tile, VALUES, T, C)
        for i in range(tiles):
            convert(buffers.raw_v, buffers.v, tile, VALUES, T, C)
            first += T.KEYS
            tile += 1
            if i + 1 < tiles:
                copy(cache, new, batch, unit, limits, None, boxes.v, buffers.raw_v, first, tile, VALUES, T, C)
        nth += 1
        item = next_item(buffers, nth, T)
    async_copy.wait_group(0)


@gluon.jit
def take_item(units, count):
    """The number of the next work item. If there are none, the count of taken ones is left as it is."""
    item = count
    if count > 0:
        item = gl.atomic_add(units, 1)
    return item


@gluon.jit
def locate(units, batch, features, item, count, T: gl.constexpr, C: gl.constexpr):
    """The unit of a work item, of which only what all rows have in common is used; the limits of its keys, as in `load`; where its
    first tile of keys begins, and their number; and what locates its queries."""
    head, seq, q_tile, start, q_len, kv_len, flags = load_unit(units, item, count, T)
    where = (head, seq, q_tile, start, q_len, kv_len)
    row = gl.arange(0, T.ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    unit = unit_of_rows(units, batch, features, item, count, where, row, T, C)
    first, end, tiles = key_tiles_of(unit, is_missing(flags, C), T)
    limits = (end, within_table(batch, gl.minimum(end, unit.cached), C))
    if C.SPANS:
        token, stop = tokens_around_gaps(batch, flags, q_tile, start, q_len, T)
        limits += (token, stop, kv_len)  # type: ignore[assignment]
    return unit, limits, first, tiles, where


# The page of each key of a tile is looked up by one thread, a tile ahead, and passed to the others through shared memory. Pages of
# boxes and of bytes are looked up when these are copied.


@gluon.jit
def load_page_ids(batch, unit, first, limits, T: gl.constexpr, C: gl.constexpr):
    if T.BOX == 0:
        key = first + gl.arange(0, T.KEYS, gl.BlockedLayout([1], [32], [4], [0]))
        return page_ids(batch, unit.seq, key, limits, C)
    else:
        return first


@gluon.jit
def store_page_ids(buffers, tile, ids, T: gl.constexpr):
    if T.BOX == 0:
        buffers.pages.index(tile % 2).store(ids)


@gluon.jit
def load_queries(query, batch, features, buffers, where, item, nth, T: gl.constexpr, C: gl.constexpr):
    """Loads a unit's queries, half for each consumer, and publishes the work item they belong to."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = T.ROWS // 2
    dim = gl.arange(0, C.K_WIDTH, gl.SliceLayout(0, LAYOUT))
    acquire_free(buffers.q, nth, T.QUEUE)
    for half in gl.static_range(2):
        queries = buffers.q.slots.index(nth % T.QUEUE * 2 + half)
        for i in gl.static_range(HALF // ROWS):
            index = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) + (half * HALF + i * ROWS)
            head, seq, q_tile, start, q_len, kv_len = where
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
