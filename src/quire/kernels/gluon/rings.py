"""Rings of places in shared memory, through which one group of warps feeds others.

A place is *full* when what was copied there has landed, and *free* when all computers are done with it. Whoever waits names the
turn of the ring that it waits for: the n-th filling of a place is an even or an odd one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

threads_meet: Any = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""All threads of a group. Triton 3.7 calls it otherwise than 3.6."""
QUEUE = gl.constexpr(2)
"""Units whose queries are in shared memory: one is computed, the next is fetched."""


class Ring(NamedTuple):
    """Places, and two barriers for each."""

    places: Any
    full: Any
    free: Any


class Item(NamedTuple):
    """What the loader tells the computers of the work whose queries come next."""

    row: Any
    """-1: there is no more."""
    head: Any
    q_tile: Any
    start: Any
    q_len: Any
    kv_len: Any
    begin: Any
    """Its keys, from a multiple of a tile on."""
    end: Any
    part: Any
    """Where what is gathered waits for the parts of others; -1 if this is all of a unit."""
    broken: Any
    """Whether a page is missing. It may be said as late as with the last values."""


WORDS = gl.constexpr(len(Item._fields))


class Rings(NamedTuple):
    """What the loader shares with the computers."""

    words: Any
    """The members of items, one after the other."""
    q: Any
    k: Any
    v: Any


@gluon.jit
def rings_of(DTYPE: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """All rings, empty. Each thread of the loader says when its copies have landed; or one for all, where nothing is copied."""
    THREADS: gl.constexpr = 32 * T.LOADERS
    FILLERS: gl.constexpr = THREADS if T.COPIES else 1
    return Rings(
        gl.allocate_shared_memory(gl.int32, [QUEUE * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        ring_of(DTYPE, QUEUE, T.ROWS // T.COMPUTERS, C.K_WIDTH, T.COMPUTERS, THREADS + 1, T.COMPUTERS),
        ring_of(DTYPE, T.STAGES, T.KEYS, C.K_WIDTH, 1, FILLERS, T.COMPUTERS),
        ring_of(DTYPE, T.STAGES, T.KEYS, C.V_WIDTH, 1, FILLERS, T.COMPUTERS),
    )


@gluon.jit
def ring_of(
    DTYPE: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr,
    FILLERS: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """A ring of tiles, each in some parts. A tile is full when so many have said so, and free likewise."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    places = gl.allocate_shared_memory(DTYPE, [PLACES * PARTS, ROWS, WIDTH], layout)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=FILLERS)
        mbarrier.init(free.index(i), count=READERS)
    return Ring(places, full, free)


@gluon.jit
def await_full(ring, turn, PLACES: gl.constexpr):
    mbarrier.wait(ring.full.index(turn % PLACES), turn // PLACES & 1)


@gluon.jit
def await_free(ring, turn, PLACES: gl.constexpr):
    """A place is free before its first filling."""
    mbarrier.wait(ring.free.index(turn % PLACES), (turn // PLACES & 1) ^ 1)


@gluon.jit
def landing(ring, turn, PLACES: gl.constexpr):
    """Each thread says so when its copies have landed."""
    async_copy.mbarrier_arrive(ring.full.index(turn % PLACES), increment_count=False)


@gluon.jit
def say_full(ring, turn, PLACES: gl.constexpr):
    """One thread says so for all of its group."""
    threads_meet()
    mbarrier.arrive(ring.full.index(turn % PLACES), count=1)


@gluon.jit
def say_free(ring, turn, PLACES: gl.constexpr):
    threads_meet()
    mbarrier.arrive(ring.free.index(turn % PLACES), count=1)


@gluon.jit
def put_word(rings, nth, member: gl.constexpr, value, T: gl.constexpr):
    """Tells one member of the n-th item."""
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [T.LOADERS], [0])
    rings.words.index(nth % QUEUE * WORDS + member).store(gl.full([1], 0, gl.int32, ALONE) + value)


@gluon.jit
def word(rings, nth, member: gl.constexpr):
    return gl.max(rings.words.index(nth % QUEUE * WORDS + member).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def tiles_between(begin, end, T: gl.constexpr):
    """How many key tiles that is: one at least, were it empty."""
    return gl.maximum((end - begin + T.KEYS - 1) // T.KEYS, 1)
