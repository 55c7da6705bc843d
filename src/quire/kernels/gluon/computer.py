"""A computer: half of the query rows of every unit, from its first score to its stored output.

While the matrix unit folds the values of one tile of keys, the computer works out the weights of the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from quire.kernels.gluon.rings import QUEUE, await_full, say_free, tiles_of, unit_of
from quire.kernels.triton.tiles import logits, per_row, sees
from quire.kernels.triton.units import finish, place, store


@gluon.jit
def compute(out, units, query, cache, rows, features, rings, count, PART: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    HALF: gl.constexpr = T.ROWS // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.V_WIDTH, 16])
    index = gl.arange(0, HALF, gl.SliceLayout(1, SCORES)) + PART * HALF
    nth_key = gl.arange(0, T.KEYS, gl.SliceLayout(0, SCORES))
    nth = 0
    tile = 0
    item = next_item(rings, nth)
    while item < count:
        head, row, q_tile, start, q_len, kv_len, broken = unit_of(units, item, count, T)
        unit = place(rows, features, row, start, q_len, kv_len, q_tile, head, index, T, C)
        begin, end, tiles = tiles_of(unit, broken, T)
        scale = scale_of(query, cache, features, unit, C)
        queries = rings.q.places.index(nth % QUEUE * 2 + PART)
        key = begin + nth_key
        # Tiles [some, every) are seen whole by every query: nothing need be hidden there. The first is met alone.
        some = gl.maximum(gl.minimum((unit.all_from - begin + T.KEYS - 1) // T.KEYS, tiles), 1)
        every = gl.maximum(gl.minimum((gl.minimum(unit.all_to, end) - begin) // T.KEYS, tiles), some)

        score = warpgroup_mma_wait(0, deps=(start_scoring(queries, rings.k, tile, SCORES, T),))
        say_free(rings.k, tile, T.STAGES)
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        weight, top, total, _ = weigh(score, top, total, scale, unit, features, key, True, C)
        weighted = gl.full([HALF, C.V_WIDTH], 0.0, gl.float32, VALUES)
        await_full(rings.v, tile, T.STAGES)

        state = (weight, weighted, top, total)
        if C.LEFT is not None:
            state = meet(state, queries, rings, tile, key, 1, some, scale, unit, features, True, T, C)
        state = meet(state, queries, rings, tile, key, some, every, scale, unit, features, False, T, C)
        weight, weighted, top, total = meet(state, queries, rings, tile, key, every, tiles, scale, unit, features, True, T, C)
        say_free(rings.q, nth, QUEUE)
        tile += tiles
        weighted = warpgroup_mma_wait(0, deps=(start_folding(weight, weighted, rings.v, tile - 1, queries.dtype, T),))
        say_free(rings.v, tile - 1, T.STAGES)

        at = gl.arange(0, HALF, gl.SliceLayout(1, VALUES)) + PART * HALF
        mine = place(rows, features, row, start, q_len, kv_len, q_tile, head, at, T, C)
        top = gl.convert_layout(top, gl.SliceLayout(1, VALUES))
        total = gl.convert_layout(total, gl.SliceLayout(1, VALUES))
        result, lse = finish(weighted, top, total, mine.head, mine.live, features, cache, mine.kv_head, C)
        dim = gl.arange(0, C.V_WIDTH, gl.SliceLayout(0, VALUES))
        store(out, mine.token, mine.head, mine.live, result, lse, broken != 0, dim, C)
        nth += 1
        item = next_item(rings, nth)


@gluon.jit
def next_item(rings, nth):
    """The item whose queries come next."""
    await_full(rings.q, nth, QUEUE)
    return gl.max(rings.items.index(nth % QUEUE).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def scale_of(query, cache, features, unit, C: gl.constexpr):
    """The scale of a unit's scores, in units of log 2; one a row if queries were balanced."""
    scale = features.scale
    if features.q_scale is not None:
        scale *= gl.load(features.q_scale)
    if C.K_SCALE_STEPS is not None:
        scale *= gl.load(cache.k_scale + unit.kv_head * C.K_SCALE_STEPS[2])
    if C.BALANCE is not None:
        exponents = query.exponents + unit.token.to(gl.int64) * (C.KV_HEADS * C.GROUP) + unit.head
        scale = scale * gl.load(exponents, mask=unit.live, other=1.0)
    return scale


@gluon.jit
def meet(
    state, queries, rings, tile, key, begin, end, scale, unit, features, HIDE: gl.constexpr, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Key tiles [begin, end) of a unit, 1 at least: scores a tile, and folds the one before, whose weights are given."""
    weight, weighted, top, total = state
    SCORES: gl.constexpr = weight.type.layout
    VALUES: gl.constexpr = weighted.type.layout
    for i in range(begin, end):
        now = tile + i
        scoring = start_scoring(queries, rings.k, now, SCORES, T)
        folding = start_folding(weight, weighted, rings.v, now - 1, queries.dtype, T)
        score = warpgroup_mma_wait(1, deps=(scoring,))
        say_free(rings.k, now, T.STAGES)
        weight, top, total, shrink = weigh(score, top, total, scale, unit, features, key + i * T.KEYS, HIDE, C)
        # These values are for the next turn. But the assembler does not move work past a wait of this kind, as it does past the
        # following one: so the weights are worked out while the matrix unit folds.
        await_full(rings.v, now, T.STAGES)
        weighted = warpgroup_mma_wait(0, deps=(folding,))
        say_free(rings.v, now - 1, T.STAGES)
        weighted = weighted * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES))[:, None]
    return weight, weighted, top, total


@gluon.jit
def start_scoring(queries, k, tile, SCORES: gl.constexpr, T: gl.constexpr):
    """Queries times the keys of a tile, when they are there."""
    await_full(k, tile, T.STAGES)
    score = gl.full([T.ROWS // 2, T.KEYS], 0.0, gl.float32, SCORES)
    return warpgroup_mma(queries, k.places.index(tile % T.STAGES).permute([1, 0]), score, use_acc=False, is_async=True)


@gluon.jit
def start_folding(weight, weighted, v, tile, DTYPE: gl.constexpr, T: gl.constexpr):
    """Adds the values of a tile that is there, each times its weight."""
    factors = gl.convert_layout(weight.to(DTYPE), gl.DotOperandLayout(0, weighted.type.layout, 2))
    return warpgroup_mma(factors, v.places.index(tile % T.STAGES), weighted, is_async=True)


@gluon.jit
def weigh(score, top, total, scale, unit, features, key, HIDE: gl.constexpr, C: gl.constexpr):
    """Scores as weights, relative to the largest logit so far; and what earlier weights shrink by."""
    if C.NEGATE:
        score = -score
    score, factor = logits(score, scale, unit, features, key, C)
    if HIDE:
        score = gl.where(sees(unit, features, key, key >= 0, C), score, float("-inf"))
    higher = gl.maximum(top, gl.max(score, 1) * factor)
    base = gl.where(higher == float("-inf"), 0.0, higher) if HIDE else higher
    weight = gl.exp2(score * per_row(factor) - base[:, None])
    shrink = gl.exp2(top - base)
    return weight, higher, total * shrink + gl.sum(weight, 1), shrink
