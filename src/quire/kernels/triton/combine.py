"""Adds up the units that several shares have parts of. Program (s, r): row r, and every so many further, of the unit whose first
part share s of `attend` had, if others have more of it."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.units import finish, parts_of, store

PARTS = tl.constexpr(32)
"""Parts that are added at a time."""


@triton.jit
def combine_kernel(out, room, cache, features, T: tl.constexpr, C: tl.constexpr):
    share = tl.program_id(0)
    if C.EARLY:
        tl.extra.cuda.gdc_wait()
    tops, totals, notes = parts_of(room, T, C)
    parts = tl.load(notes + share * 5)
    second = tl.load(notes + share * 5 + 1)
    token = tl.load(notes + share * 5 + 2)
    tokens = tl.load(notes + share * 5 + 3)
    head = tl.load(notes + share * 5 + 4)
    if parts > 0:
        for index in range(tl.program_id(1), T.ROWS, tl.num_programs(1)):
            if C.GROUP < T.ROWS:
                MEMBER: tl.constexpr = T.TOKENS * C.GROUP
                q_head = (head * T.TOGETHER + index // MEMBER) * C.GROUP + index % C.GROUP
                nth = index % MEMBER // C.GROUP
                live = (index < MEMBER * T.TOGETHER) & (nth < tokens)
            else:
                PARTS_OF_GROUP: tl.constexpr = T.HEADS // C.KV_HEADS
                of_group = (head % PARTS_OF_GROUP) * T.ROWS + index
                q_head = head // PARTS_OF_GROUP * C.GROUP + of_group
                nth = index * 0
                live = of_group < C.GROUP
            if live:
                add_up(out, room, tops, totals, cache, features, share, index, parts, second, token + nth, q_head, T, C)


@triton.jit
def add_up(
    out, room, tops, totals, cache, features, share, index, parts, second, token, q_head,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One row of a unit, from its parts in the order of their shares. All but the first share begin in this unit: their part is in
    their first place."""
    WIDTH: tl.constexpr = C.V_WIDTH
    dim = tl.arange(0, WIDTH)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1, WIDTH], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mine = part < parts
        place = ((share + part) * 2 + tl.where(part == 0, second, 0)) * T.ROWS + index
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
