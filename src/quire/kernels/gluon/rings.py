"""Rings of places in shared memory, through which one group of warps feeds others; and the units of work, read from memory.

A place is *full* when what was copied there has landed, and *free* when both computers are done with it. Whoever waits names the
turn of the ring that it waits for: the n-th filling of a place is an even or an odd one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from quire.kernels.gluon.names import barrier
from quire.kernels.gluon.units import FIELDS, HEADER

COMPUTERS = gl.constexpr(2)
THREADS = gl.constexpr(128)
"""Of a group of four warps: what the matrix unit takes at once."""
QUEUE = gl.constexpr(2)
"""Units whose queries are in shared memory: one is computed, the next is fetched."""


class Ring(NamedTuple):
    """Places, and two barriers for each."""

    places: Any
    full: Any
    free: Any


class Rings(NamedTuple):
    """What the loader shares with the computers."""

    items: Any
    """Which item the queries belong to."""
    q: Any
    k: Any
    v: Any


@gluon.jit
def ring_of(
    DTYPE: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr, FILLERS: gl.constexpr
):
    """A ring of tiles, each in some parts. A tile is full when so many have said so."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    places = gl.allocate_shared_memory(DTYPE, [PLACES * PARTS, ROWS, WIDTH], layout)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=FILLERS)
        mbarrier.init(free.index(i), count=COMPUTERS)
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
    barrier()
    mbarrier.arrive(ring.full.index(turn % PLACES), count=1)


@gluon.jit
def say_free(ring, turn, PLACES: gl.constexpr):
    barrier()
    mbarrier.arrive(ring.free.index(turn % PLACES), count=1)


@gluon.jit
def unit_of(units, item, count, T: gl.constexpr):
    """A head, a row, which of its query tiles, where it starts, its lengths, and whether it misses a page. One head after the
    other: what runs at a time then reads the same keys, and the second level of cache holds them."""
    in_head = count // T.HEADS
    at = units + HEADER + item % in_head * FIELDS
    return item // in_head, gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)


@gluon.jit
def tiles_of(unit, broken, T: gl.constexpr):
    """Where a unit's first key tile begins, where its keys end, and how many tiles that is: one at least, were it empty."""
    begin = unit.low // T.KEYS * T.KEYS
    end = gl.where(broken != 0, begin, unit.high)
    return begin, end, gl.maximum((end - begin + T.KEYS - 1) // T.KEYS, 1)
