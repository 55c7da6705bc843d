"""Combines the partial results of units that several splits have computed. Program (s, r) takes row r, and every
`num_programs(1)`-th row after it, of the unit whose first part split s of `attend_kernel` has computed. The kernel is compiled once
for all tiles of short sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.device.partials import HEADER, merge_softmax, workspace_views
from quire.kernels.triton.device.units import finish, store

PARTS = tl.constexpr(32)
"""Partial results that are combined at a time."""
AT_ONCE = tl.constexpr(8)
"""The same in a batch-invariant call: they are merged one by one."""


@triton.jit
def combine_kernel(out, workspace, cache, features, tile, C: tl.constexpr):
    split = tl.program_id(0)
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    row_maxima, row_sums, headers = workspace_views(workspace, tile.rows, C)
    parts = tl.load(headers + split * HEADER)
    place = tl.load(headers + split * HEADER + 1)
    token = tl.load(headers + split * HEADER + 2)
    tokens = tl.load(headers + split * HEADER + 3)
    head = tl.load(headers + split * HEADER + 4)
    rows = tl.load(headers + split * HEADER + 5)
    if parts > 0:
        for index in range(tl.program_id(1), tile.rows, tl.num_programs(1)):
            # The query of a row, as in `make_unit`. A group that is larger than a tile is divided.
            in_member = tile.tokens * C.GROUP
            parts_of_group = tl.maximum(tile.heads // C.KV_HEADS, 1)
            whole = C.GROUP < tile.rows
            nth = tl.where(whole, index % in_member // C.GROUP, 0)
            of_group = tl.where(whole, index % C.GROUP, head % parts_of_group * tile.rows + index)
            kv_head = tl.where(whole, head * tile.heads_per_tile + index // in_member, head // parts_of_group)
            live = tl.where(whole, (index < in_member * tile.heads_per_tile) & (nth < tokens), of_group < C.GROUP)
            if live:
                q_head = kv_head * C.GROUP + of_group
                found = Parts(workspace.at, row_maxima, row_sums, parts)
                if C.INVARIANT:
                    acc, row_max, row_sum = merge_in_order(found, place + index, rows, C)
                else:
                    acc, row_max, row_sum = combine_row(found, index * (2 * workspace.programs) + split * 2, place, C)
                finish_row(out, cache, features, acc, row_max, row_sum, token + nth, q_head, C)


class Parts(NamedTuple):
    """The partial results of a workspace, and how many a unit has."""

    acc: Any
    row_maxima: Any
    row_sums: Any
    count: Any


@triton.jit
def combine_row(parts, place, second, C: tl.constexpr):
    """The softmax state of one row of a unit, from its partial results in the order of their splits. All splits but the first begin
    within this unit: their part is in their first place."""
    WIDTH: tl.constexpr = C.V_WIDTH
    dim = tl.arange(0, WIDTH)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    for first in range(0, parts.count, PARTS):
        part = first + tl.arange(0, PARTS)
        mine = part < parts.count
        at = place + part * 2 + tl.where(part == 0, second, 0)
        part_max = tl.load(parts.row_maxima + at, mask=mine, other=float("-inf"))
        part_sum = tl.load(parts.row_sums + at, mask=mine, other=0.0)
        part_acc = tl.load(parts.acc + at[:, None] * WIDTH + dim[None, :], mask=mine[:, None], other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        fraction = tl.exp2(part_max - base)
        row_sum = row_sum * rescale + tl.sum(part_sum * fraction, 0)
        acc = acc * rescale[:, None] + tl.sum(part_acc * fraction[:, None], 0)[None, :]
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def merge_in_order(parts, place, step, C: tl.constexpr):
    """The softmax state of one row of a unit of a batch-invariant call, merged as `attend_tiles` merges its pieces. Several are
    loaded at a time, so that their latencies overlap."""
    WIDTH: tl.constexpr = C.V_WIDTH
    dim = tl.arange(0, WIDTH)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    one = tl.arange(0, 1)
    for first in range(0, parts.count, AT_ONCE):
        for nth in tl.static_range(AT_ONCE):
            here = one + first + nth < parts.count
            at = one + place + (first + nth) * step
            part_max = tl.load(parts.row_maxima + at, mask=here, other=float("-inf"))
            part_sum = tl.load(parts.row_sums + at, mask=here, other=0.0)
            part_acc = tl.load(parts.acc + at[:, None] * WIDTH + dim[None, :], mask=here[:, None], other=0.0)
            acc, row_max, row_sum = merge_softmax(acc, row_max, row_sum, part_acc, part_max, part_sum)
    return acc, row_max, row_sum


@triton.jit
def finish_row(out, cache, features, acc, row_max, row_sum, token, q_head, C: tl.constexpr):
    """Stores the output of one row."""
    kv_head = q_head // C.GROUP
    q_head += tl.zeros([1], tl.int32)
    here = q_head >= 0
    result, lse = finish(acc, row_max, row_sum, q_head, here, features, cache, kv_head, C)
    invalid = tl.max((row_sum != row_sum).to(tl.int32)) > 0
    store(out, token + tl.zeros([1], tl.int32), q_head, here, result, lse, invalid, tl.arange(0, C.V_WIDTH), C)
