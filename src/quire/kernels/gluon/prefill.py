"""Long rows on Hopper: warps that only load, and two groups of warps that only compute.

A program takes one item after the other, the next that nobody has taken, until none is left. Its three groups of four warps:

    the loader      fetches queries, then keys and values tile by tile, page by page, into rings in shared memory
    two computers   have half of the item's query rows each, score, weigh and fold

They meet only at the barriers of the rings. The kernel is launched twice, before the short rows and after them. If there are short
rows, some programs of the first launch leave their multiprocessors to them, and those of the second follow where they have ended.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.computer import compute
from quire.kernels.gluon.loader import load
from quire.kernels.gluon.rings import QUEUE, THREADS, Rings, ring_of

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
"""Which launch it is."""


@gluon.jit
def prefill_kernel(
    out, units, query, cache, rows, new, features, launch, programs_beside, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    if C.EARLY:
        if launch == FIRST:
            tl.extra.cuda.gdc_launch_dependents()
    DTYPE: gl.constexpr = query.at.dtype.element_ty
    FILLERS: gl.constexpr = THREADS if T.COPIES else 1
    rings = Rings(
        gl.allocate_shared_memory(gl.int32, [QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        ring_of(DTYPE, QUEUE, T.ROWS // 2, C.K_WIDTH, 2, THREADS + 1),
        ring_of(DTYPE, T.STAGES, T.KEYS, C.K_WIDTH, 1, FILLERS),
        ring_of(DTYPE, T.STAGES, T.KEYS, C.V_WIDTH, 1, FILLERS),
    )
    count = gl.load(units + 1) * T.HEADS
    makes_room = (launch == FIRST) & (gl.program_id(0) >= programs_beside) & (gl.load(units + 2) > 0)
    count = gl.where(makes_room, 0, count)
    gl.warp_specialize(
        [
            (compute, (out, units, query, cache, rows, features, rings, count, 0, T, C)),
            (compute, (out, units, query, cache, rows, features, rings, count, 1, T, C)),
            (load, (units, query, cache, rows, new, features, rings, count, T, C)),
        ],
        [4, 4],
        [T.COMPUTER, T.LOADER],
    )
    if C.EARLY:
        if launch != FIRST:
            # What comes next waits for this launch only: so this one waits for the one before it, and that one for the first.
            tl.extra.cuda.gdc_wait()
