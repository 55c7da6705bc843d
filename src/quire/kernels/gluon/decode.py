"""Short rows on Hopper: warps that only load, and warps that only compute.

A program takes a large share of the key tiles of all short rows, and then small ones while there are any. Its two groups of warps:

    the loader      goes through its shares tile by tile, unit after unit, as far ahead as its rings reach
    the computer    scores, weighs and folds; stores what it has all of, and leaves what others have parts of

To the loader the end of a unit or a share is like any other tile: while the computer stores one, keys of the next are on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.computer import compute
from quire.kernels.gluon.loader import load_shares
from quire.kernels.gluon.rings import rings_of
from quire.kernels.triton.attend import zero_padding


@triton.jit
def queue_kernel(queue, C: tl.constexpr):
    """Nobody has taken a small share yet. The next launch need not wait for this until it takes the first."""
    if C.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(queue + 1, 0)


@gluon.jit
def decode_kernel(out, room, query, cache, rows, new, features, T: gl.constexpr, C: gl.constexpr):
    if C.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    rings = rings_of(query.at.dtype.element_ty, T, C)
    gl.warp_specialize(
        [
            (compute, (out, room, query, cache, rows, features, rings, 0, T, C)),
            (load_shares, (room, query, cache, rows, new, features, rings, T, C)),
        ],
        [T.LOADERS],
        [T.LOADER],
    )
    if C.ZERO_PADDING or out.lse is not None:
        dim = gl.arange(0, C.V_WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
        zero_padding(out, rows, gl.program_id(0), gl.num_programs(0), dim, C)
