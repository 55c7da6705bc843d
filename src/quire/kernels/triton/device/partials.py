"""Partial results: softmax states of some keys of a unit, in registers and in the workspace."""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = tl.constexpr(6)
"""Numbers of a header."""


@triton.jit
def empty_softmax(T: tl.constexpr, C: tl.constexpr):
    """The accumulator, row maxima and row sums of no keys."""
    ROWS: tl.constexpr = T.ROWS
    WIDTH: tl.constexpr = C.V_WIDTH
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def merge_softmax(acc, row_max, row_sum, next_acc, next_max, next_sum):
    """The softmax state of some keys and of the next ones. The order of roundings is fixed by `fma`: a compiler could otherwise
    contract either product with the sum, another one in another kernel. Merging the state of no keys changes no bit."""
    new_max = tl.maximum(row_max, next_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - base)
    fraction = tl.exp2(next_max - base)
    row_sum = tl.fma(row_sum, rescale, next_sum * fraction)
    acc = tl.fma(acc, rescale[:, None], next_acc * fraction[:, None])
    return acc, new_max, row_sum


@triton.jit
def store_partial(workspace, first, step, rows, acc, row_max, row_sum, T: tl.constexpr, C: tl.constexpr):
    """Stores a partial result: its row i at place first + i * step, `rows` rows."""
    index = tl.arange(0, T.ROWS)
    dim = tl.arange(0, C.V_WIDTH)
    place = index * step + first
    row_maxima, row_sums, _ = workspace_views(workspace, T.ROWS, C)
    here = index < rows
    tl.store(workspace.at + place[:, None] * C.V_WIDTH + dim[None, :], acc, mask=here[:, None])
    tl.store(row_maxima + place, row_max, mask=here)
    tl.store(row_sums + place, row_sum, mask=here)


@triton.jit
def store_header(workspace, split, parts, first, token, tokens, head, rows, T: tl.constexpr, C: tl.constexpr):
    """Stores the header of a split: of the unit whose first part this split has computed, the number of parts, which of the split's
    two places has its own part, and where its queries are. 0 parts: there is no such unit. In a batch-invariant call, the place of
    the first row of the first part, and the rows of a part."""
    _, _, headers = workspace_views(workspace, T.ROWS, C)
    tl.store(headers + split * HEADER, parts)
    tl.store(headers + split * HEADER + 1, first)
    tl.store(headers + split * HEADER + 2, token)
    tl.store(headers + split * HEADER + 3, tokens)
    tl.store(headers + split * HEADER + 4, head)
    tl.store(headers + split * HEADER + 5, rows)


@triton.jit
def workspace_views(workspace, rows, C: tl.constexpr):
    """Pointers to the row maxima, row sums and headers of a workspace for tiles of `rows` rows."""
    places = workspace.rows if C.INVARIANT else workspace.programs * 2 * rows
    row_maxima = workspace.at + places * C.V_WIDTH
    return row_maxima, row_maxima + places, (row_maxima + 2 * places).to(tl.pointer_type(tl.int32), bitcast=True)
