"""Short rows on Hopper: warps that only load, and warps that only compute.

A program takes an even share of the key tiles of all short rows, as Triton's kernel does. Its two groups of four warps:

    the loader      goes through the share tile by tile, unit after unit, and is never more than its rings ahead
    the computer    scores, weighs and folds; stores what it has all of, and leaves what others share

To the loader the end of a unit is like any other tile: while the computer stores one unit, keys of the next are on their way.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.computer import compute
from quire.kernels.gluon.loader import load_shares
from quire.kernels.gluon.rings import rings_of
from quire.kernels.triton.attend import zero_padding


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
        [4],
        [T.LOADER],
    )
    if C.ZERO_PADDING or out.lse is not None:
        dim = gl.arange(0, C.V_WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
        zero_padding(out, rows, gl.program_id(0), room.programs, dim, C)
