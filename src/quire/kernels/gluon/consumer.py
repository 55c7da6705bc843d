"""A consumer: computes half of the query rows of every unit, from the first score to the stored output.

While the matrix unit accumulates the values of one tile of keys, the consumer computes the softmax of the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from quire.kernels.gluon.ring_buffer import acquire_full, key_tiles_of, load_unit, release
from quire.kernels.triton.device.features import has_left_edge, is_visible, per_row, transform_scores
from quire.kernels.triton.device.tiles import headroom
from quire.kernels.triton.device.units import finish, make_unit, store


@gluon.jit
def consume(out, units, query, cache, batch, features, buffers, count, PART: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    HALF: gl.constexpr = T.ROWS // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.V_WIDTH, 16])
    index = gl.arange(0, HALF, gl.SliceLayout(1, SCORES)) + PART * HALF
    key_in_tile = gl.arange(0, T.KEYS, gl.SliceLayout(0, SCORES))
    nth = 0
    tile = 0
    item = next_item(buffers, nth, T)
    while item < count:
        head, seq, q_tile, start, q_len, kv_len, invalid = load_unit(units, item, count, T)
        unit = make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, index, T, C)
        begin, end, tiles = key_tiles_of(unit, invalid, T)
        scale = scale_of(query, cache, features, unit, C)
        queries = buffers.q.slots.index(nth % T.QUEUE * 2 + PART)
        key = begin + key_in_tile
        # Tiles [some, every) are visible to every query and need no mask. The first tile is computed before the loops.
        some = gl.maximum(gl.minimum((unit.all_from - begin + T.KEYS - 1) // T.KEYS, tiles), 1)
        every = gl.maximum(gl.minimum((gl.minimum(unit.all_to, end) - begin) // T.KEYS, tiles), some)

        score = warpgroup_mma_wait(0, deps=(start_scores(queries, buffers.k, tile, SCORES, T),))
        release(buffers.k, tile, T.STAGES)
        row_max = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        weight, row_max, row_sum, _ = softmax_tile(score, row_max, row_sum, scale, unit, features, key, True, C)
        acc = gl.full([HALF, C.V_WIDTH], 0.0, gl.float32, VALUES)
        acquire_full(buffers.v, tile, T.STAGES)

        state = (weight, acc, row_max, row_sum)
        if has_left_edge(C):
            state = attend_tiles(state, queries, buffers, tile, key, 1, some, scale, unit, features, True, T, C)
        state = attend_tiles(state, queries, buffers, tile, key, some, every, scale, unit, features, False, T, C)
        weight, acc, row_max, row_sum = attend_tiles(
            state, queries, buffers, tile, key, every, tiles, scale, unit, features, True, T, C
        )
        release(buffers.q, nth, T.QUEUE)
        tile += tiles
        acc = warpgroup_mma_wait(0, deps=(start_accumulate(weight, acc, buffers.v, tile - 1, queries.dtype, T),))
        release(buffers.v, tile - 1, T.STAGES)

        at = gl.arange(0, HALF, gl.SliceLayout(1, VALUES)) + PART * HALF
        mine = make_unit(batch, features, seq, start, q_len, kv_len, q_tile, head, at, T, C)
        row_max = gl.convert_layout(row_max, gl.SliceLayout(1, VALUES))
        row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, VALUES))
        result, lse = finish(acc, row_max, row_sum, mine.head, mine.live, features, cache, mine.kv_head, C)
        dim = gl.arange(0, C.V_WIDTH, gl.SliceLayout(0, VALUES))
        store(out, mine.token, mine.head, mine.live, result, lse, invalid != 0, dim, C)
        nth += 1
        item = next_item(buffers, nth, T)


@gluon.jit
def next_item(buffers, nth, T: gl.constexpr):
    """The next work item, whose queries are in shared memory."""
    acquire_full(buffers.q, nth, T.QUEUE)
    return gl.max(buffers.items.index(nth % T.QUEUE).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def scale_of(query, cache, features, unit, C: gl.constexpr):
    """The scale of a unit's scores, in units of log 2; one per row if queries were balanced."""
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
def attend_tiles(
    state, queries, buffers, tile, key, begin, end, scale, unit, features, MASKED: gl.constexpr, T: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Key tiles [begin, end) of a unit, begin is at least 1: computes the scores of a tile, and accumulates the tile before it,
    whose weights are in the state."""
    weight, acc, row_max, row_sum = state
    SCORES: gl.constexpr = weight.type.layout
    VALUES: gl.constexpr = acc.type.layout
    for i in range(begin, end):
        now = tile + i
        scores = start_scores(queries, buffers.k, now, SCORES, T)
        accumulation = start_accumulate(weight, acc, buffers.v, now - 1, queries.dtype, T)
        score = warpgroup_mma_wait(1, deps=(scores,))
        release(buffers.k, now, T.STAGES)
        weight, row_max, row_sum, rescale = softmax_tile(
            score, row_max, row_sum, scale, unit, features, key + i * T.KEYS, MASKED, C
        )
        # These values are needed in the next iteration. The assembler does not move instructions across this wait, as it does
        # across the following one: so the softmax is computed while the matrix unit accumulates.
        acquire_full(buffers.v, now, T.STAGES)
        acc = warpgroup_mma_wait(0, deps=(accumulation,))
        release(buffers.v, now - 1, T.STAGES)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))[:, None]
    return weight, acc, row_max, row_sum


@gluon.jit
def start_scores(queries, k, tile, SCORES: gl.constexpr, T: gl.constexpr):
    """Starts the product of queries and the keys of a tile, once they are in shared memory."""
    acquire_full(k, tile, T.STAGES)
    score = gl.full([T.ROWS // 2, T.KEYS], 0.0, gl.float32, SCORES)
    return warpgroup_mma(queries, k.slots.index(tile % T.STAGES).permute([1, 0]), score, use_acc=False, is_async=True)


@gluon.jit
def start_accumulate(weight, acc, v, tile, DTYPE: gl.constexpr, T: gl.constexpr):
    """Starts the product of weights and the values of a tile, which are in shared memory."""
    factors = gl.convert_layout(weight.to(DTYPE), gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(factors, v.slots.index(tile % T.STAGES), acc, is_async=True)


@gluon.jit
def softmax_tile(score, row_max, row_sum, scale, unit, features, key, MASKED: gl.constexpr, C: gl.constexpr):
    """The weights of a tile relative to the new row maxima, the softmax state, and the factor that rescales earlier sums."""
    if C.NEGATE:
        score = -score
    # There is no shard: keys are positions.
    score, factor = transform_scores(score, scale, unit, features, key, key, C)
    if MASKED:
        score = gl.where(is_visible(unit, features, key, key, key >= 0, C), score, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(score, 1) * factor - headroom(C))
    base = gl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weight = gl.exp2(score * per_row(factor) - base[:, None])
    rescale = gl.exp2(row_max - base)
    return weight, new_max, row_sum * rescale + gl.sum(weight, 1), rescale
