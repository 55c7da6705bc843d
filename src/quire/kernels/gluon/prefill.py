"""Long sequences on Hopper, with specialised warps. A persistent program takes the next work item until none is left. Its warp
groups synchronise only at the barriers of the ring buffers:

    one producer     loads queries, then keys and values tile by tile, page by page, into ring buffers in shared memory; of 8-bit
                     caches, a second one loads the values
    two consumers    compute half of the item's query rows each

The kernel is launched twice, before the short sequences and after them. If there are short sequences, some programs of the first
launch exit at once and leave their multiprocessors to them; programs of the second launch start when those have ended.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.consumer import consume
from quire.kernels.gluon.copies import KEYS, VALUES, Boxes, make_box
from quire.kernels.gluon.producer import produce, produce_keys, produce_values
from quire.kernels.gluon.ring_buffer import CONSUMERS, THREADS, SharedBuffers, make_ring

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
"""Which of the two launches it is."""


@gluon.jit
def prefill_kernel(
    out, units, query, cache, batch, new, features, launch, programs_kept, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    if C.PDL:
        if launch == FIRST:
            tl.extra.cuda.gdc_launch_dependents()
    DTYPE: gl.constexpr = query.at.dtype.element_ty
    COPIED: gl.constexpr = T.ASYNC_COPIES and not C.BYTES
    PRODUCER_ARRIVALS: gl.constexpr = THREADS if COPIED else 1
    STAGED: gl.constexpr = T.ASYNC_COPIES and C.BYTES
    PREFETCHED: gl.constexpr = T.BOX == 0 and not STAGED
    buffers = SharedBuffers(
        gl.allocate_shared_memory(gl.int32, [T.QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int32, [2, T.KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0])) if PREFETCHED else None,
        make_ring(DTYPE, T.QUEUE, T.ROWS // 2, C.K_WIDTH, 2, THREADS + 1, CONSUMERS + 1 if STAGED else CONSUMERS),
        make_ring(DTYPE, T.STAGES, T.KEYS, C.K_WIDTH, 1, PRODUCER_ARRIVALS),
        make_ring(DTYPE, T.STAGES, T.KEYS, C.V_WIDTH, 1, PRODUCER_ARRIVALS),
        make_ring(gl.uint8, 1, T.KEYS, C.K_WIDTH, 1, THREADS) if STAGED else None,
        make_ring(gl.uint8, 1, T.KEYS, C.V_WIDTH, 1, THREADS) if STAGED else None,
    )
    count = gl.load(units + 1) * T.HEADS
    yields_processor = (launch == FIRST) & (gl.program_id(0) >= programs_kept) & (gl.load(units + 2) > 0)
    if (gl.load(units) < count) & (yields_processor == 0):
        boxes = Boxes(
            make_box(cache.k, cache.pages, KEYS, T, C) if T.BOX > 0 else None,
            make_box(cache.v, cache.pages, VALUES, T, C) if T.BOX > 0 else None,
        )
        if STAGED:
            gl.warp_specialize(
                [
                    (consume, (out, units, query, cache, batch, features, buffers, count, 0, T, C)),
                    (consume, (out, units, query, cache, batch, features, buffers, count, 1, T, C)),
                    (produce_keys, (units, query, cache, batch, new, features, buffers, boxes, count, T, C)),
                    (produce_values, (units, cache, batch, new, features, buffers, boxes, count, T, C)),
                ],
                [4, 4, 4],
                [T.CONSUMER_REGISTERS, T.PRODUCER_REGISTERS, T.PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (consume, (out, units, query, cache, batch, features, buffers, count, 0, T, C)),
                    (consume, (out, units, query, cache, batch, features, buffers, count, 1, T, C)),
                    (produce, (units, query, cache, batch, new, features, buffers, boxes, count, T, C)),
                ],
                [4, 4],
                [T.CONSUMER_REGISTERS, T.PRODUCER_REGISTERS],
            )
    if C.PDL:
        if launch != FIRST:
            # The next kernel waits for this launch only: so this one waits for the one before it, and that one for the first.
            tl.extra.cuda.gdc_wait()
