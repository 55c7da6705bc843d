"""A consumer: computes half of the query rows of every unit, from the first score to the stored output.

While the matrix unit accumulates the values of one tile of keys, the consumer computes the softmax of the next.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from quire.kernels.gluon.ring_buffer import acquire_full, is_missing, key_tiles_of, load_unit, next_item, release, unit_of_rows
from quire.kernels.triton.device.features import has_left_edge, is_visible, per_row, position_of, transform_scores
from quire.kernels.triton.device.tiles import headroom
from quire.kernels.triton.device.units import finish, store

SWIZZLED = 64
"""Elements of 16 bits in the rows of the swizzled layout of shared memory: parts begin at multiples of it."""
WIDEST = 256
"""The most elements of a part. Four warp groups do not have the registers for it."""


@gluon.jit
def consume(out, units, query, cache, batch, features, buffers, count, PART: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    HALF: gl.constexpr = T.ROWS // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.KEYS, 16])
    index = gl.arange(0, HALF, gl.SliceLayout(1, SCORES)) + PART * HALF
    key_in_tile = gl.arange(0, T.KEYS, gl.SliceLayout(0, SCORES))
    nth = 0
    tile = 0
    item = next_item(buffers, nth, T)
    while item < count:
        head, seq, q_tile, start, q_len, kv_len, flags = load_unit(units, item, count, T)
        where = (head, seq, q_tile, start, q_len, kv_len)
        unit = unit_of_rows(units, batch, features, item, count, where, index, T, C)
        invalid = is_missing(flags, C)
        begin, end, tiles = key_tiles_of(unit, invalid, T)
        scale = scale_of(query, cache, features, unit, C)
        queries = buffers.q.slots.index(nth % T.QUEUE * 2 + PART)
        key = begin + key_in_tile
        # Tiles [some, every) are visible to every query and need no mask. The first tile is computed before the loops.
        some = gl.maximum(gl.minimum((unit.all_from - begin + T.KEYS - 1) // T.KEYS, tiles), 1)
        every = gl.maximum(gl.minimum((gl.minimum(unit.all_to, end) - begin) // T.KEYS, tiles), some)

        score = warpgroup_mma_wait(0, deps=(start_scores(queries, buffers.k, tile, SCORES, T, C),))
        release(buffers.k, tile, T.STAGES)
        row_max = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        weight, row_max, row_sum, _ = softmax_tile(score, row_max, row_sum, scale, unit, batch, features, key, True, C)
        acc = ()
        for part in gl.static_range(parts(C.V_DIM, C.V_WIDTH, C.BYTES)):
            acc += (zeros(part, T, C),)  # type: ignore[assignment]
        acquire_full(buffers.v, tile, T.STAGES)

        state = (weight, acc, row_max, row_sum)
        if has_left_edge(C):
            state = attend_tiles(state, queries, buffers, tile, key, 1, some, scale, unit, batch, features, True, T, C)
        state = attend_tiles(state, queries, buffers, tile, key, some, every, scale, unit, batch, features, False, T, C)
        weight, acc, row_max, row_sum = attend_tiles(
            state, queries, buffers, tile, key, every, tiles, scale, unit, batch, features, True, T, C
        )
        release(buffers.q, nth, T.QUEUE)
        tile += tiles
        acc = wait_for_all(start_accumulate(weight, acc, buffers.v, tile - 1, queries.dtype, T, C))
        release(buffers.v, tile - 1, T.STAGES)

        for part in gl.static_range(parts(C.V_DIM, C.V_WIDTH, C.BYTES)):
            at = gl.arange(0, HALF, gl.SliceLayout(1, layout_of_part(C.V_DIM, C.V_WIDTH, part, C.BYTES))) + PART * HALF
            mine = unit_of_rows(units, batch, features, item, count, where, at, T, C)
            store_part(acc[part], row_max, row_sum, out, mine, features, cache, invalid, part, C)
        nth += 1
        item = next_item(buffers, nth, T)


@gluon.jit
def store_part(acc, row_max, row_sum, out, unit, features, cache, invalid, PART: gl.constexpr, C: gl.constexpr):
    """Stores the output of some elements of every head."""
    LAYOUT: gl.constexpr = acc.type.layout
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, LAYOUT))
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, LAYOUT))
    result, lse = finish(acc, row_max, row_sum, unit.head, unit.live, features, cache, unit.kv_head, C)
    dim = begin_of_part(C.V_DIM, C.V_WIDTH, PART, C.BYTES) + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    store(out, unit.token, unit.head, unit.live, result, lse, invalid != 0, dim, C)


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
    state, queries, buffers, tile, key, begin, end, scale, unit, batch, features,
    MASKED: gl.constexpr, T: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Key tiles [begin, end) of a unit, begin is at least 1: computes the scores of a tile, and accumulates the tile before it,
    whose weights are in the state."""
    weight, acc, row_max, row_sum = state
    SCORES: gl.constexpr = weight.type.layout
    for i in range(begin, end):
        now = tile + i
        scores = start_scores(queries, buffers.k, now, SCORES, T, C)
        accumulation = start_accumulate(weight, acc, buffers.v, now - 1, queries.dtype, T, C)
        score = warpgroup_mma_wait(parts(C.V_DIM, C.V_WIDTH, C.BYTES), deps=(scores,))
        release(buffers.k, now, T.STAGES)
        weight, row_max, row_sum, rescale = softmax_tile(
            score, row_max, row_sum, scale, unit, batch, features, key + i * T.KEYS, MASKED, C
        )
        # These values are needed in the next iteration. The assembler does not move instructions across this wait, as it does
        # across the following one: so the softmax is computed while the matrix unit accumulates.
        acquire_full(buffers.v, now, T.STAGES)
        done = wait_for_all(accumulation)
        release(buffers.v, now - 1, T.STAGES)
        acc = ()
        for part in gl.static_range(parts(C.V_DIM, C.V_WIDTH, C.BYTES)):
            acc += (done[part] * gl.convert_layout(rescale, gl.SliceLayout(1, done[part].type.layout))[:, None],)
    return weight, acc, row_max, row_sum


@gluon.jit
def zeros(PART: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    LAYOUT: gl.constexpr = layout_of_part(C.V_DIM, C.V_WIDTH, PART, C.BYTES)
    return gl.full([T.ROWS // 2, width_of_part(C.V_DIM, C.V_WIDTH, PART, C.BYTES)], 0.0, gl.float32, LAYOUT)


@gluon.jit
def start_scores(queries, k, tile, SCORES: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Starts the product of queries and the keys of a tile, once they are in shared memory."""
    acquire_full(k, tile, T.STAGES)
    keys = k.slots.index(tile % T.STAGES)
    score = gl.full([T.ROWS // 2, T.KEYS], 0.0, gl.float32, SCORES)
    for part in gl.static_range(parts(C.HEAD_DIM, C.K_WIDTH, C.BYTES)):
        score = start_part_of_scores(queries, keys, score, part, C)
    return score


@gluon.jit
def start_part_of_scores(queries, keys, score, PART: gl.constexpr, C: gl.constexpr):
    BEGIN: gl.constexpr = begin_of_part(C.HEAD_DIM, C.K_WIDTH, PART, C.BYTES)
    WIDTH: gl.constexpr = width_of_part(C.HEAD_DIM, C.K_WIDTH, PART, C.BYTES)
    keys = keys.slice(BEGIN, WIDTH, dim=1).permute([1, 0])
    return warpgroup_mma(queries.slice(BEGIN, WIDTH, dim=1), keys, score, use_acc=PART > 0, is_async=True)


@gluon.jit
def start_accumulate(weight, acc, v, tile, DTYPE: gl.constexpr, T: gl.constexpr, C: gl.constexpr):
    """Starts the product of weights and the values of a tile, which are in shared memory."""
    values = v.slots.index(tile % T.STAGES)
    sums = ()
    for part in gl.static_range(parts(C.V_DIM, C.V_WIDTH, C.BYTES)):
        factors = gl.convert_layout(weight.to(DTYPE), gl.DotOperandLayout(0, acc[part].type.layout, 2))
        values_of_part = values.slice(
            begin_of_part(C.V_DIM, C.V_WIDTH, part, C.BYTES), width_of_part(C.V_DIM, C.V_WIDTH, part, C.BYTES), dim=1
        )
        sums += (warpgroup_mma(factors, values_of_part, acc[part], is_async=True),)  # type: ignore[assignment]
    return sums


@gluon.jit
def wait_for_all(sums):
    """Waits for all products that have been started. Returns a tuple of their sums."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=(sums[0],)),)
    else:
        return warpgroup_mma_wait(0, deps=(sums[0], sums[1]))


# Shapes are powers of two. A head of 96 elements is not computed as one of 128 but in two parts, of 64 and 32.


@gluon.constexpr_function
def width_of_part(dim, width, part, halved):
    """The elements of the first part of `dim` elements, or of the second, 0 if there is none. `width` are those in shared memory;
    the widest heads are `halved` if registers are few."""
    first = width // 2
    rest = max(16, triton.next_power_of_2(dim - first)) if first < dim else width
    if first < SWIZZLED or (first + rest >= width and (width < WIDEST or not halved)):
        first, rest = width, 0
    return rest if part else first


@gluon.constexpr_function
def begin_of_part(dim, width, part, halved):
    return width_of_part(dim, width, 0, halved) if part else 0


@gluon.constexpr_function
def parts(dim, width, halved):
    return 2 if width_of_part(dim, width, 1, halved) else 1


@gluon.constexpr_function
def layout_of_part(dim, width, part, halved):
    """The layout of sums of values."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width_of_part(dim, width, part, halved), 16])


@gluon.jit
def softmax_tile(score, row_max, row_sum, scale, unit, batch, features, key, MASKED: gl.constexpr, C: gl.constexpr):
    """The weights of a tile relative to the new row maxima, the softmax state, and the factor that rescales earlier sums."""
    if C.NEGATE:
        score = -score
    k_position = position_of(batch, key)
    score, factor = transform_scores(score, scale, unit, features, key, k_position, C)
    if MASKED:
        score = gl.where(is_visible(unit, features, key, k_position, key >= 0, C), score, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(score, 1) * factor - headroom(C))
    base = gl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weight = gl.exp2(score * per_row(factor) - base[:, None])
    rescale = gl.exp2(row_max - base)
    return weight, new_max, row_sum * rescale + gl.sum(weight, 1), rescale
