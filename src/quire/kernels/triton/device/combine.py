"""Combines the partial results of units that several splits have computed. Program (s, r) takes row r, and every
`num_programs(1)`-th row after it, of the unit whose first part split s of `attend_kernel` has computed. The kernel is compiled once
for all tiles of short sequences."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.units import finish, store, workspace_views

PARTS = tl.constexpr(32)
"""Partial results that are combined at a time."""


@triton.jit
def combine_kernel(out, workspace, cache, features, tile, C: tl.constexpr):
    split = tl.program_id(0)
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    _, _, headers = workspace_views(workspace, tile.rows, C)
    parts = tl.load(headers + split * 5)
    second = tl.load(headers + split * 5 + 1)
    token = tl.load(headers + split * 5 + 2)
    tokens = tl.load(headers + split * 5 + 3)
    head = tl.load(headers + split * 5 + 4)
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
                combine_row(out, workspace, cache, features, split, index, parts, second, token + nth, q_head, tile.rows, C)


@triton.jit
def combine_row(out, workspace, cache, features, split, index, parts, second, token, q_head, rows, C: tl.constexpr):
    """One row of a unit, from its partial results in the order of their splits. All splits but the first begin within this unit:
    their part is in their first place."""
    WIDTH: tl.constexpr = C.V_WIDTH
    dim = tl.arange(0, WIDTH)
    row_maxima, row_sums, _ = workspace_views(workspace, rows, C)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mine = part < parts
        place = index * (2 * workspace.programs) + (split + part) * 2 + tl.where(part == 0, second, 0)
        part_max = tl.load(row_maxima + place, mask=mine, other=float("-inf"))
        part_sum = tl.load(row_sums + place, mask=mine, other=0.0)
        part_acc = tl.load(workspace.at + place[:, None] * WIDTH + dim[None, :], mask=mine[:, None], other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        fraction = tl.exp2(part_max - base)
        row_sum = row_sum * rescale + tl.sum(part_sum * fraction, 0)
        acc = acc * rescale[:, None] + tl.sum(part_acc * fraction[:, None], 0)[None, :]
        row_max = new_max
    kv_head = q_head // C.GROUP
    q_head += tl.zeros([1], tl.int32)
    here = q_head >= 0
    result, lse = finish(acc, row_max, row_sum, q_head, here, features, cache, kv_head, C)
    invalid = tl.max((row_sum != row_sum).to(tl.int32)) > 0
    store(out, token + tl.zeros([1], tl.int32), q_head, here, result, lse, invalid, tl.arange(0, C.V_WIDTH), C)
