"""Ring buffers in shared memory between the producer and the consumers; and the list of work units, read from memory.

A slot is *full* when the copies into it have completed, and *free* when both consumers have released it. Both sides count
iterations: iteration i uses slot i % SLOTS, and the parity of i // SLOTS is the phase of its barriers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from quire.kernels.gluon.compat import barrier
from quire.kernels.gluon.units import FIELDS, GAPS, HEADER, MISSING
from quire.kernels.triton.device.units import make_unit

CONSUMERS = gl.constexpr(2)
THREADS = gl.constexpr(128)
"""Threads of a warp group: four warps."""


class RingBuffer(NamedTuple):
    """Slots, and two barriers for each."""

    slots: Any
    full: Any
    free: Any


class SharedBuffers(NamedTuple):
    """The shared memory of the producer and the consumers."""

    items: Any
    """The work item of each slot of queries."""
    pages: Any
    """The page of each key of two tiles; None if boxes are copied."""
    q: Any
    k: Any
    v: Any
    raw_k: Any
    """A ring of one tile of keys as bytes, before they are converted; None if they are not staged."""
    raw_v: Any


@gluon.jit
def make_ring(
    DTYPE: gl.constexpr,
    SLOTS: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    PRODUCER_ARRIVALS: gl.constexpr,
    READERS: gl.constexpr = CONSUMERS,
):
    """A ring buffer of tiles, each in PARTS parts. A slot is full after PRODUCER_ARRIVALS arrivals at
    its barrier, and free after READERS arrivals."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    slots = gl.allocate_shared_memory(DTYPE, [SLOTS * PARTS, ROWS, WIDTH], layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=PRODUCER_ARRIVALS)
        mbarrier.init(free.index(i), count=READERS)
    return RingBuffer(slots, full, free)


@gluon.jit
def acquire_full(ring, iteration, SLOTS: gl.constexpr):
    mbarrier.wait(ring.full.index(iteration % SLOTS), iteration // SLOTS & 1)


@gluon.jit
def acquire_free(ring, iteration, SLOTS: gl.constexpr):
    """Waits until a slot is free. Every slot is free at first."""
    mbarrier.wait(ring.free.index(iteration % SLOTS), (iteration // SLOTS & 1) ^ 1)


@gluon.jit
def publish_when_copied(full):
    """Each thread arrives at a barrier when its asynchronous copies have completed."""
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def publish(ring, iteration, SLOTS: gl.constexpr):
    """One thread arrives for its warp group."""
    barrier()
    mbarrier.arrive(ring.full.index(iteration % SLOTS), count=1)


@gluon.jit
def release(ring, iteration, SLOTS: gl.constexpr):
    barrier()
    mbarrier.arrive(ring.free.index(iteration % SLOTS), count=1)


@gluon.jit
def next_item(buffers, nth, T: gl.constexpr):
    """The next work item, whose queries are in shared memory."""
    acquire_full(buffers.q, nth, T.QUEUE)
    return gl.max(buffers.items.index(nth % T.QUEUE).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def load_unit(units, item, count, T: gl.constexpr):
    """Head, sequence, query tile, first token, lengths, and whether the sequence is invalid. Items are ordered by head: concurrent
    programs then read the same keys, which stay in the L2 cache."""
    in_head = count // T.HEADS
    at = units + HEADER + item % in_head * FIELDS
    return item // in_head, gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)


@gluon.jit
def unit_of_rows(units, batch, features, item, count, where, index, T: gl.constexpr, C: gl.constexpr):
    """The unit of a work item, for the query rows `index`. `where` is what `load_unit` returned, without the flags."""
    head, seq, q_tile, start, q_len, kv_len = where
    if C.SPANS:
        at = units + HEADER + item % (count // T.HEADS) * FIELDS
        low, high = gl.load(at + 6), gl.load(at + 7)
        return make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, index, T, C, low, high)
    else:
        return make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, index, T, C)


@gluon.jit
def is_missing(flags, C: gl.constexpr):
    """Whether a page that a unit needs is missing."""
    return flags & MISSING if C.SPANS else flags


@gluon.jit
def tokens_around_gaps(batch, flags, q_tile, start, q_len, T: gl.constexpr):
    """The tokens of a unit whose spans leave out keys; none if they leave out none."""
    first = start + q_tile * T.TOKENS
    stop = start + gl.minimum(q_tile * T.TOKENS + T.TOKENS, q_len)
    return first, gl.where((flags & GAPS) != 0, stop, first)


@gluon.jit
def key_tiles_of(unit, invalid, T: gl.constexpr):
    """Where a unit's first key tile begins, where its keys end, and the number of tiles: at least one, even if it is empty."""
    begin = unit.low // T.KEYS * T.KEYS
    end = gl.where(invalid != 0, begin, unit.high)
    return begin, end, gl.maximum((end - begin + T.KEYS - 1) // T.KEYS, 1)
