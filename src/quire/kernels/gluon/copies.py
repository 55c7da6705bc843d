"""Copies of tiles of keys and values to shared memory: in boxes by the tensor memory accelerator, row by row asynchronously, or
through registers.

A box is some keys of one page. One instruction of one thread copies it, so that a producer needs few registers, and all others are
the consumers'. Rows are copied in chunks of `T.CHUNK` keys, whose addresses are in registers: the first and the last tile of a
sequence, new keys in context form, and pages that have no box of eight keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from quire.kernels.gluon.compat import async_load, box_load
from quire.kernels.gluon.ring_buffer import THREADS, acquire_free, acquire_full, publish, publish_when_copied
from quire.kernels.triton.device.features import load_span, position_of
from quire.kernels.triton.device.formats import decode
from quire.kernels.triton.device.tiles import key_at, to_dot_type, value_at

KEYS = gl.constexpr(0)
VALUES = gl.constexpr(1)
BOXES_AT_A_TIME = gl.constexpr(4)
"""Page ids that are looked up at once: registers are few."""


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
    SHAPE: gl.constexpr = [1, 1, T.BOX, WIDTH]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, storage.dtype.element_ty)
    shape = [pages, C.KV_HEADS, C.PAGE_SIZE, LENGTH]
    return tma.make_tensor_descriptor(storage, shape, [STEPS[0], STEPS[1], STEPS[3], 1], SHAPE, layout)


@gluon.jit
def load(cache, new, batch, unit, limits, pages, boxes, ring, first, tile, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Loads one tile of keys or values into its slot. What cannot be copied asynchronously passes through registers. `limits` are
    the ends of the keys that are in sight, and of those of them that are in pages; with spans also the tokens [first, stop) whose
    spans leave out keys, if they do, and the tokens of the sequence. `pages` has the page of each key of two tiles; if it is None,
    they are looked up here."""
    if T.ASYNC_COPIES:
        copy(cache, new, batch, unit, limits, pages, boxes, ring, first, tile, OF, T, C)
    else:
        slot = ring.slots.index(tile % T.STAGES)
        for i in gl.static_range(T.KEYS // T.CHUNK):
            at, mask = addresses(cache, new, batch, unit, limits, pages, first, tile, i, OF, T, C)
            if i == 0:
                # The first addresses are computed while the slot is still in use.
                acquire_free(ring, tile, T.STAGES)
            store_chunk(slot, i, gl.load(at, mask=mask, other=0), T, C)
        fence_async_shared()
        publish(ring, tile, T.STAGES)


@gluon.jit
def copy(cache, new, batch, unit, limits, pages, boxes, ring, first, tile, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Starts to copy one tile of keys or values as they are: in boxes if all of its keys are in pages and in sight, otherwise row
    by row, with zeros where no query sees the key."""
    if T.BOX > 0:
        in_boxes = (first >= unit.low) & (first + T.KEYS <= limits[1])
        if C.SPANS:
            in_boxes &= limits[2] == limits[3]
        if in_boxes:
            copy_boxes(batch, unit, boxes, ring, first, tile, OF, T, C)
        else:
            copy_rows(cache, new, batch, unit, limits, pages, ring, first, tile, OF, T, C)
    else:
        copy_rows(cache, new, batch, unit, limits, pages, ring, first, tile, OF, T, C)


@gluon.jit
def is_in_a_span(batch, key, first, stop, kv_len):
    """Which keys some of the tokens [first, stop) see."""
    seen = key < 0
    for token in range(first, stop):
        begin, end = load_span(batch, token, kv_len, True)
        seen |= (key >= begin) & (key < end)
    return seen


@gluon.constexpr_function
def slots_of_copies(t, c):
    """Bytes are copied to one slot, which their producer has converted before it copies the next ones."""
    return 1 if c.BYTES else t.STAGES


@gluon.jit
def copy_boxes(batch, unit, boxes, ring, first, tile, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Copies boxes of `T.BOX` keys of one page. One thread starts the copies, and arrives for all threads."""
    WIDTH: gl.constexpr = C.V_WIDTH if OF == VALUES else C.K_WIDTH
    SLOTS: gl.constexpr = slots_of_copies(T, C)
    slot = ring.slots.index(tile % SLOTS).reshape([1, 1, T.KEYS, WIDTH])
    full = ring.full.index(tile % SLOTS)
    row = batch.page_table + unit.seq.to(gl.int64) * batch.table_row
    BOXES: gl.constexpr = T.KEYS // T.BOX
    FEW: gl.constexpr = min(BOXES, BOXES_AT_A_TIME)
    for i in gl.static_range(0, BOXES, FEW):
        ids = ()
        for j in gl.static_range(FEW):
            ids += (gl.load(row + (first + (i + j) * T.BOX) // C.PAGE_SIZE * batch.table_step).to(gl.int32),)  # type: ignore[assignment]
        if i == 0:
            if not C.BYTES:
                acquire_free(ring, tile, SLOTS)
            mbarrier.expect(full, T.KEYS * WIDTH * (boxes.dtype.primitive_bitwidth // 8))
        for j in gl.static_range(FEW):
            at = [ids[j], unit.kv_head, (first + (i + j) * T.BOX) % C.PAGE_SIZE, 0]
            box_load(boxes, at, full, slot.slice((i + j) * T.BOX, T.BOX, dim=2))
    mbarrier.arrive(full, count=THREADS - 1)


@gluon.jit
def copy_rows(
    cache, new, batch, unit, limits, pages, ring, first, tile, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Copies chunks of `T.CHUNK` keys. Every thread arrives when its copies have completed."""
    SLOTS: gl.constexpr = slots_of_copies(T, C)
    slot = ring.slots.index(tile % SLOTS)
    for i in gl.static_range(T.KEYS // T.CHUNK):
        at, mask = addresses(cache, new, batch, unit, limits, pages, first, tile, i, OF, T, C)
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


@gluon.jit
def page_ids(batch, seq, key, limits, C: gl.constexpr):
    """The page of each key. It exists: `units_kernel` has checked it."""
    column = seq.to(gl.int64) * batch.table_row + key // C.PAGE_SIZE * batch.table_step
    return gl.load(batch.page_table + column, mask=key < limits[1], other=0).to(gl.int32)


@gluon.constexpr_function
def chunk_layout(of, c):
    """Sixteen bytes per thread, and up to eight threads per cache line."""
    vector, width = 16 if c.BYTES else 8, c.V_WIDTH if of == VALUES else c.K_WIDTH
    lanes = min(8, width // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def addresses(
    cache, new, batch, unit, limits, pages, first, tile, PART: gl.constexpr, OF: gl.constexpr, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """The addresses of the keys or values of a chunk `[CHUNK, width]`, and which exist and are seen by some query."""
    LAYOUT: gl.constexpr = chunk_layout(OF, C)
    WIDTH: gl.constexpr = C.V_WIDTH if OF == VALUES else C.K_WIDTH
    LENGTH: gl.constexpr = C.V_DIM if OF == VALUES else C.HEAD_DIM
    BEGIN: gl.constexpr = PART * T.CHUNK
    key = first + BEGIN + gl.arange(0, T.CHUNK, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if pages is None:
        page = page_ids(batch, unit.seq, key, limits, C)
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
        token = (unit.start + position_of(batch, key) - unit.context).to(gl.int64)
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
    inside = (key >= unit.low) & (key < limits[0])
    if C.SPANS:
        if limits[2] < limits[3]:
            inside &= is_in_a_span(batch, key, limits[2], limits[3], limits[4])
    mask = inside[:, None] if LENGTH == WIDTH else inside[:, None] & (dim < LENGTH)[None, :]
    return at[:, None] + dim[None, :] * step, mask
