"""Adds up the units that several shares have parts of. Program (s, r): row r, and every so many further, of the unit whose first
part share s of `attend` had, if others have more of it. It is compiled once for all tiles of short rows."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.units import finish, parts_of, store

PARTS = tl.constexpr(32)
"""Parts that are added at a time."""


@triton.jit
def combine_kernel(out, room, cache, features, tile, C: tl.constexpr):
    share = tl.program_id(0)
    if C.EARLY:
        tl.extra.cuda.gdc_wait()
    _, _, headers = parts_of(room, tile.rows, C)
    parts = tl.load(headers + share * 5)
    second = tl.load(headers + share * 5 + 1)
    token = tl.load(headers + share * 5 + 2)
    tokens = tl.load(headers + share * 5 + 3)
    head = tl.load(headers + share * 5 + 4)
    if parts > 0:
        for index in range(tl.program_id(1), tile.rows, tl.num_programs(1)):
            # The query of a row: see `place`. A group that fills a tile is cut into parts.
            in_member = tile.tokens * C.GROUP
            parts_of_group = tl.maximum(tile.heads // C.KV_HEADS, 1)
            whole = C.GROUP < tile.rows
            nth = tl.where(whole, index % in_member // C.GROUP, 0)
            of_group = tl.where(whole, index % C.GROUP, head % parts_of_group * tile.rows + index)
            kv_head = tl.where(whole, head * tile.together + index // in_member, head // parts_of_group)
            live = tl.where(whole, (index < in_member * tile.together) & (nth < tokens), of_group < C.GROUP)
            if live:
                q_head = kv_head * C.GROUP + of_group
                add_up(out, room, cache, features, share, index, parts, second, token + nth, q_head, tile.rows, C)


@triton.jit
def add_up(out, room, cache, features, share, index, parts, second, token, q_head, rows, C: tl.constexpr):
    """One row of a unit, from its parts in the order of their shares. All but the first share begin in this unit: their part is in
    their first place."""
    WIDTH: tl.constexpr = C.V_WIDTH
    dim = tl.arange(0, WIDTH)
    tops, totals, _ = parts_of(room, rows, C)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1, WIDTH], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mine = part < parts
        place = index * (2 * room.programs) + (share + part) * 2 + tl.where(part == 0, second, 0)
        part_top = tl.load(tops + place, mask=mine, other=float("-inf"))
        part_total = tl.load(totals + place, mask=mine, other=0.0)
        part_weighted = tl.load(room.at + place[:, None] * WIDTH + dim[None, :], mask=mine[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(part_top, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        fraction = tl.exp2(part_top - base)
        total = total * shrink + tl.sum(part_total * fraction, 0)
        weighted = weighted * shrink[:, None] + tl.sum(part_weighted * fraction[:, None], 0)[None, :]
        top = higher
    kv_head = q_head // C.GROUP
    q_head += tl.zeros([1], tl.int32)
    here = q_head >= 0
    result, lse = finish(weighted, top, total, q_head, here, features, cache, kv_head, C)
    broken = tl.max((total != total).to(tl.int32)) > 0
    store(out, token + tl.zeros([1], tl.int32), q_head, here, result, lse, broken, tl.arange(0, C.V_WIDTH), C)
