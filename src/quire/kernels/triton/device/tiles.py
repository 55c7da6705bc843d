"""Attention of a tile of queries over tiles of keys: load keys, compute scores, mask, softmax, load values, accumulate."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.features import (
    decides_by_key,
    has_left_edge,
    is_visible,
    leaves_gaps,
    per_row,
    position_of,
    selected_keys,
    transform_scores,
)
from quire.kernels.triton.device.formats import (
    GROUPED_FACTOR,
    decode,
    decode_latent,
    has_zero_points,
    no_parts,
    parts_of,
    whole_of,
    without_zero,
    zero_of,
)
from quire.kernels.triton.device.groups import load_groups
from quire.kernels.triton.device.latent import is_latent, load_latent_rest, load_latent_scales
from quire.kernels.triton.device.partials import empty_softmax, merge_softmax

LEAST_PART = tl.constexpr(16)
"""The least elements of a row that a matrix instruction multiplies."""


@triton.constexpr_function
def is_in_one_page(T, C):
    """Whether all keys of a tile are in one page. For latent caches alone, whose threads have the fewest registers to spare."""
    return T.FEW_ROWS and C.V_IN_K and C.SELECT is None and C.PAGE_SIZE % T.STEP == 0


@triton.jit
def load_tile_pages(batch, unit, first, end, T: tl.constexpr, C: tl.constexpr):
    """The page id of each key of the tile that begins at `first`, or that of all of them."""
    if is_in_one_page(T, C):
        return load_page_ids(batch, unit, first, end, C)
    else:
        return load_page_ids(batch, unit, first + key_in_tile(T), end, C)


@triton.jit
def load_page_ids(batch, unit, key, end, C: tl.constexpr):
    """The page id of each key below `end`, unchecked; -1 where the table has no such column."""
    if C.SELECT is not None:
        position, _ = selected_keys(batch, unit, key, C)
        column = position // C.PAGE_SIZE
        here = (key < end) & (position >= 0) & (column < batch.table_width)
        row = unit.seq.to(tl.int64) * batch.table_row
        return tl.load(batch.page_table + row + column * batch.table_step, mask=here, other=-1)
    else:
        column = unit.seq.to(tl.int64) * batch.table_row + key // C.PAGE_SIZE * batch.table_step
        end = within_table(batch, tl.minimum(end, unit.cached), C)
        return tl.load(batch.page_table + column, mask=key < end, other=-1)


@triton.jit
def within_table(batch, end, C: tl.constexpr):
    """`end`, or the number of keys that the table has columns for if that is less. A tile may begin before the first visible key. A
    table without columns for those keys is valid and must not be read there."""
    return tl.where((end - 1) // C.PAGE_SIZE < batch.table_width, end, batch.table_width * C.PAGE_SIZE)


@triton.jit
def clamp_page_ids(page, pages):
    """Page ids, the last page in place of those that do not exist, and which exist. As an unsigned number, a negative id is too
    large."""
    if page.dtype == tl.int64:
        unsigned = page.to(tl.uint64, bitcast=True)
        last = tl.full([], 0, tl.uint64) + (pages - 1)
    else:
        unsigned = page.to(tl.uint32, bitcast=True)
        last = tl.full([], 0, tl.uint32) + (pages - 1)
    return tl.minimum(unsigned, last), unsigned <= last


@triton.jit
def key_at(page, head, key, dim, C: tl.constexpr):
    """The offset of an element of K's storage, as wide as `page` is; `page` and `key` broadcast against `dim`."""
    slot = key % C.PAGE_SIZE
    base = page * C.K_STEPS[0] + head * C.K_STEPS[1]
    in_slot = (slot // C.K_SLOTS) * C.K_STEPS[2] + (slot % C.K_SLOTS) * C.K_STEPS[3]
    in_dim = (dim // C.K_DIMS) * C.K_STEPS[4] + (dim % C.K_DIMS) * C.K_STEPS[5]
    return base + in_slot + in_dim


@triton.jit
def value_at(page, head, key, dim, C: tl.constexpr):
    """The same of V."""
    slot = key % C.PAGE_SIZE
    base = page * C.V_STEPS[0] + head * C.V_STEPS[1]
    in_slot = (slot // C.V_SLOTS) * C.V_STEPS[2] + (slot % C.V_SLOTS) * C.V_STEPS[3]
    in_dim = (dim // C.V_DIMS) * C.V_STEPS[4] + (dim % C.V_DIMS) * C.V_STEPS[5]
    return base + in_slot + in_dim


@triton.jit
def as_units(start, PACK: tl.constexpr):
    """A pointer to bytes as one to units of PACK elements of 4 bits; others stay."""
    if PACK == 8:
        start = start.to(tl.pointer_type(tl.uint32), bitcast=True)
    elif PACK == 4:
        start = start.to(tl.pointer_type(tl.uint16), bitcast=True)
    return start


@triton.jit
def to_dot_type(x, C: tl.constexpr):
    """Converts elements to the type of the products."""
    if C.DOT == "bf16":
        return x.to(tl.bfloat16)
    elif C.DOT == "fp16":
        return x.to(tl.float16)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, acc, C: tl.constexpr):
    """a b + acc in fp32; acc may be None. fp32 operands are multiplied as fp32, not as tf32."""
    if C.DOT == "fp32":
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def key_in_tile(T: tl.constexpr):
    """The key index within the tile, `[KEYS]`: entries of different key heads have the same index."""
    return tl.arange(0, T.KEYS) // T.HEADS_PER_TILE


@triton.jit
def head_in_tile(T: tl.constexpr):
    """Which of the tile's key heads each entry belongs to, `[KEYS]`."""
    return tl.arange(0, T.KEYS) % T.HEADS_PER_TILE


@triton.jit
def attend_tiles(
    state, q, scale, next_page, only_head, unit, batch, cache, new, features, begin, end,
    MASKED: tl.constexpr, SOURCE: tl.constexpr, CHECK_PAGES: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Attends to keys [begin, end), tile by tile, and returns the new softmax state; begin is a multiple of a tile. `next_page` has
    the page ids of the first tile if T.FEW_ROWS. `only_head` restricts the computation to one of the tile's key heads.

    MASKED: some queries may not see some of these keys. SOURCE: 'pages', 'new' or 'both'. CHECK_PAGES: page ids were not checked
    before. Keys of pages that do not exist are flagged in the state, and the last page is read in their place."""
    if C.INVARIANT:
        acc, row_max, row_sum, missing, merged_acc, merged_max, merged_sum = state
    else:
        acc, row_max, row_sum, missing = state
    K_PARTS: tl.constexpr = parts_of_tile(C.K_PACK, C.K_WIDTH, T, C)
    V_PARTS: tl.constexpr = parts_of_tile(C.V_PACK, C.V_WIDTH, T, C)
    queries = parts_of(q[0], K_PARTS)
    acc = parts_of(acc, V_PARTS)
    STEP: tl.constexpr = T.STEP
    # New tokens need no page id: the pipeline has one stage less. Reading from both sources takes twice the shared memory. With
    # 8-bit pages and new tokens in one loop there is no pipeline: Triton 3.6 made one that gave NaN on an H200, with a tree mask,
    # where the same kernel without a pipeline is right.
    STAGES: tl.constexpr = T.STAGES if SOURCE == "pages" else 1 if SOURCE == "both" and C.BYTES else max(T.STAGES - 1, 1)
    head = unit.kv_head if T.HEADS_PER_TILE == 1 else (unit.kv_head + head_in_tile(T))[:, None]
    EAGER: tl.constexpr = C.BYTES and not T.FEW_ROWS
    k_unit = tl.arange(0, C.K_WIDTH // C.K_PACK)
    K_UNITS: tl.constexpr = C.HEAD_DIM // C.K_PACK
    for first in tl.range(begin, end, STEP, num_stages=STAGES if only_head is None else 1):
        first = tl.multiple_of(first, STEP)
        if C.INVARIANT:
            if first % T.PIECE == 0:
                # A piece begins. What was not yet merged belongs to the one before.
                pieces = whole_of(acc, V_PARTS)
                merged_acc, merged_max, merged_sum = merge_softmax(merged_acc, merged_max, merged_sum, pieces, row_max, row_sum)
                pieces, row_max, row_sum = empty_softmax(T, C)
                acc = parts_of(pieces, V_PARTS)
        key = first + key_in_tile(T)
        # The number from which the slot in a page follows.
        place = key
        if C.SELECT is not None:
            k_position, wrong = selected_keys(batch, unit, key, C)
            missing |= wrong
            place = k_position
        else:
            k_position = position_of(batch, key)
        inside = (key >= unit.low) & (key < unit.high) if MASKED else key >= 0
        visible = is_visible(unit, features, key, k_position, inside, C) if MASKED else inside[None, :]
        if T.HEADS_PER_TILE > 1:
            visible &= unit.member[:, None] == head_in_tile(T)[None, :]
            if only_head is not None:
                inside &= head_in_tile(T) == only_head
        if decides_by_key(C) and MASKED:
            # A key may be hidden from every query: then its content must have no effect.
            inside = tl.max(visible.to(tl.int32), 0) > 0
        if C.SPANS and MASKED:
            inside &= tl.max(visible.to(tl.int32), 0) > 0
        from_pages = inside & (key < unit.cached) if SOURCE == "both" else inside

        # load keys
        page, token, is_new = None, None, None
        if SOURCE != "new":
            if T.FEW_ROWS:
                page = next_page
                next_key = first + STEP if is_in_one_page(T, C) else key + STEP
                next_page = load_page_ids(batch, unit, next_key, end, C)
            else:
                page = load_page_ids(batch, unit, key, end, C)
            if CHECK_PAGES:
                page, exists = clamp_page_ids(page, cache.pages)
                if C.SELECT is not None:
                    exists &= cache.pages > 0
                missing |= from_pages & ~exists
                if C.SELECT is not None:
                    from_pages &= exists
            page = page.to(tl.int64) if C.FAR else page.to(tl.int32)
            if is_in_one_page(T, C):
                page = tl.broadcast_to(page, [T.KEYS])
            at = key_at(page[:, None], head, place[:, None], k_unit[None, :], C)
            start = as_units(cache.k, C.K_PACK)
            if MASKED:
                k = tl.load(start + at, mask=from_pages[:, None] & (k_unit < K_UNITS)[None, :], other=0)
            elif C.K_WIDTH != C.HEAD_DIM:
                k = tl.load(start + at, mask=(k_unit < K_UNITS)[None, :], other=0)
            else:
                k = tl.load(start + at)
            groups = None
            if C.K_GROUPS is not None:
                at, inner = place[:, None] % C.PAGE_SIZE, from_pages[:, None]
                K_PLACES: tl.constexpr = C.K_GROUPS
                groups = load_groups(cache.k, page[:, None], head, at, inner, C.K_WIDTH, C.HEAD_DIM, MASKED, K_PLACES)
            if is_latent(C):
                rows = cache.k + key_at(page[:, None], head, place[:, None], 0, C)
                k = decode_latent(k, load_latent_scales(rows, from_pages, C.HEAD_DIM, MASKED), C.HARDWARE)
                k_rest = to_dot_type(load_latent_rest(rows, from_pages, C.HEAD_DIM, C.REST_DIM, MASKED), C)
            else:
                zero = None
                if has_zero_points(tl.constexpr(C.K_FORMAT)):
                    K_STEPS: tl.constexpr = C.K_SCALE_STEPS
                    zero = _zeros(cache.k_scale, page, head, place, from_pages, K_STEPS, C)
                k = decode(k, tl.constexpr(C.K_FORMAT), C.HARDWARE, tl.constexpr(C.DOT), groups, zero, tl.constexpr(C.NVIDIA))
                if C.K_PACK > 1 and K_PARTS == 1:
                    k = whole_of(k, C.K_PACK)
            k = _in_dot_type(k, K_PARTS, C)
            if C.REST_DIM is not None and not is_latent(C):
                k_rest = _rest_of_keys(cache, page, head, place, from_pages, MASKED, C)
        if SOURCE != "pages":
            token = (unit.start + k_position - unit.context).to(tl.int64)[:, None]
            is_new = (inside & (key >= unit.cached))[:, None]
            if SOURCE == "new":
                k = None
            row = token * new.k_token + head * new.k_head
            k = _with_new(k, new.k, row, new.k_dim, key < unit.cached, is_new, C.K_WIDTH, C.HEAD_DIM, MASKED, SOURCE, K_PARTS, C)
            if C.REST_DIM is not None:
                new_rest = _rest_of_new_keys(new, token, head, is_new, MASKED, C)
                if SOURCE == "both":
                    k_rest = tl.where((key < unit.cached)[:, None], k_rest, new_rest)
                else:
                    k_rest = new_rest

        # scores
        score = None
        for part in tl.static_range(K_PARTS):
            score = dot(queries[part], tl.trans(k[part]), score, C)
        if C.REST_DIM is not None:
            score = dot(q[1], tl.trans(k_rest), score, C)
        k_scale, v_scale = None, None
        if C.PER_KEY and SOURCE != "new":
            k_scale, v_scale = _scales(cache, page, unit.kv_head + head_in_tile(T), place, from_pages, C)
            if k_scale is not None:
                score *= k_scale[None, :]
        if C.V_IN_K:
            v = (_scaled_values(k[0], v_scale, C),)
        elif EAGER:
            # Converting 8-bit values takes time: it overlaps with the product of the scores.
            v = _values(cache, new, unit, head, page, token, key, place, from_pages, is_new, v_scale, MASKED, SOURCE, V_PARTS, C)
        score, factor = transform_scores(score, scale, unit, features, key, k_position, C)
        if MASKED:
            score = tl.where(visible, score, float("-inf"))

        # softmax
        new_max = tl.maximum(row_max, tl.max(score, 1) * factor - headroom(C))
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = tl.exp2(score * per_row(factor) - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        row_max = new_max

        # load values
        if not C.V_IN_K and not EAGER:
            v = _values(cache, new, unit, head, page, token, key, place, from_pages, is_new, v_scale, MASKED, SOURCE, V_PARTS, C)

        # accumulate
        if scales_weights(C) and v_scale is not None:
            weight *= v_scale[None, :]
        weight = to_dot_type(weight, C)
        sums = no_parts()
        for part in tl.static_range(V_PARTS):
            sums += (dot(weight, v[part], acc[part] * rescale[:, None], C),)
        acc = sums
    acc = whole_of(acc, V_PARTS)
    if C.INVARIANT:
        return acc, row_max, row_sum, missing, merged_acc, merged_max, merged_sum
    else:
        return acc, row_max, row_sum, missing


@triton.constexpr_function
def parts_of_tile(pack, width, T, C):
    """In how many parts keys or values are multiplied, if a unit of their storage has `pack` elements. The nth elements of all
    units are a part: they come out of their units together, and putting them in order would take more instructions than the
    products. Not if units are bytes, if V is a part of K, or in tiles of Hopper's asynchronous matrix instruction, which takes
    wider operands."""
    in_parts = pack > 2 and not C.V_IN_K and T.ROWS < 64 and width >= pack * LEAST_PART.value
    return pack if in_parts else 1


@triton.constexpr_function
def headroom(C):
    """How far below the maximum of a row, in units of log 2, its weights are relative to. fp16 has few exponents: weights are at
    most 2 ** 15, not 1, so that small ones are not lost."""
    return 15.0 if C.DOT == "fp16" else 0.0


@triton.jit
def attend_unit(state, q, scale, unit, batch, cache, new, features, begin, end, T: tl.constexpr, C: tl.constexpr):
    """Attends to keys [begin, end) of a unit; begin is a multiple of a tile. Tiles that every query sees are computed without a
    mask. Their pages were checked before, unless queries leave gaps."""
    CHECK: tl.constexpr = leaves_gaps(C)
    SOURCE: tl.constexpr = "both" if C.NEW else "pages"
    if decides_by_key(C):
        state = attend_tiles(state, q, scale, None, None, unit, batch, cache, new, features, begin, end, True, SOURCE, True, T, C)
    else:
        if has_left_edge(C):
            middle = tl.minimum((unit.all_from + T.KEYS - 1) // T.KEYS * T.KEYS, (end + T.KEYS - 1) // T.KEYS * T.KEYS)
            middle = tl.maximum(middle, begin)
            stop = tl.minimum(middle, end)
            state = attend_tiles(
                state, q, scale, None, None, unit, batch, cache, new, features, begin, stop, True, SOURCE, CHECK, T, C
            )
            begin = middle
        middle = tl.minimum(tl.minimum(unit.all_to, unit.cached), end) // T.KEYS * T.KEYS
        middle = tl.maximum(middle, begin)
        state = attend_tiles(
            state, q, scale, None, None, unit, batch, cache, new, features, begin, middle, False, "pages", CHECK, T, C
        )
        if C.NEW:
            # The tile in which the context ends, then tiles that have only new tokens.
            begin = tl.maximum((unit.cached + T.KEYS - 1) // T.KEYS * T.KEYS, middle)
            stop = tl.minimum(begin, end)
            state = attend_tiles(
                state, q, scale, None, None, unit, batch, cache, new, features, middle, stop, True, "both", CHECK, T, C
            )
            middle = tl.maximum(tl.minimum(unit.all_to, end) // T.KEYS * T.KEYS, begin)
            state = attend_tiles(
                state, q, scale, None, None, unit, batch, cache, new, features, begin, middle, False, "new", False, T, C
            )
        # After the context all keys are new if every long sequence takes its new keys from `New`.
        LAST: tl.constexpr = "new" if C.NEW and C.CONTEXT_FROM <= C.SHORT + 1 else SOURCE
        state = attend_tiles(state, q, scale, None, None, unit, batch, cache, new, features, middle, end, True, LAST, CHECK, T, C)
    return state


@triton.jit
def _in_dot_type(x, PARTS: tl.constexpr, C: tl.constexpr):
    """Decoded elements, one tensor or a tuple of parts, as a tuple of parts in the type of the product."""
    if PARTS == 1:
        return (to_dot_type(x, C),)
    else:
        parts = no_parts()
        for part in tl.static_range(PARTS):
            parts += (to_dot_type(x[part], C),)
        return parts


@triton.jit
def _with_new(
    old, start, row, step, cached, is_new, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, SOURCE: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """New keys or values as such a tuple; if SOURCE is 'both', `old` ones where they are cached."""
    parts = no_parts()
    for part in tl.static_range(PARTS):
        dim = tl.arange(0, WIDTH // PARTS) * PARTS + part
        at = row + dim[None, :] * step
        if MASKED or WIDTH != DIM:
            x = to_dot_type(tl.load(start + at, mask=is_new & (dim < DIM)[None, :], other=0.0), C)
        else:
            x = to_dot_type(tl.load(start + at), C)
        if SOURCE == "both":
            x = tl.where(cached[:, None], old[part], x)
        parts += (x,)
    return parts


@triton.jit
def _rest_of_keys(cache, page, head, place, from_pages, MASKED: tl.constexpr, C: tl.constexpr):
    """The elements of cached keys that are not their values `[KEYS, REST_WIDTH]`, in the type of the product."""
    unit = tl.arange(0, C.REST_WIDTH // C.K_PACK)
    UNITS: tl.constexpr = C.REST_DIM // C.K_PACK
    at = key_at(page[:, None], head, place[:, None], (C.HEAD_DIM // C.K_PACK + unit)[None, :], C)
    if MASKED:
        k = tl.load(cache.k + at, mask=from_pages[:, None] & (unit < UNITS)[None, :], other=0)
    elif C.REST_WIDTH != C.REST_DIM:
        k = tl.load(cache.k + at, mask=(unit < UNITS)[None, :], other=0)
    else:
        k = tl.load(cache.k + at)
    k = decode(k, tl.constexpr(C.K_FORMAT), C.HARDWARE, tl.constexpr(C.DOT))
    if C.K_PACK > 1:
        k = whole_of(k, C.K_PACK)
    return to_dot_type(k, C)


@triton.jit
def _rest_of_new_keys(new, token, head, is_new, MASKED: tl.constexpr, C: tl.constexpr):
    """The same of new keys."""
    dim = tl.arange(0, C.REST_WIDTH)
    at = token * new.k_token + head * new.k_head + (C.HEAD_DIM + dim)[None, :] * new.k_dim
    if MASKED or C.REST_WIDTH != C.REST_DIM:
        k = tl.load(new.k + at, mask=is_new & (dim < C.REST_DIM)[None, :], other=0.0)
    else:
        k = tl.load(new.k + at)
    return to_dot_type(k, C)


@triton.jit
def _scaled_values(k, v_scale, C: tl.constexpr):
    """The values of a tile whose keys begin with them."""
    if v_scale is not None and not scales_weights(C):
        k = to_dot_type(k.to(tl.float32) * v_scale[:, None], C)
    return k


@triton.jit
def _values(
    cache,
    new,
    unit,
    head,
    page,
    token,
    key,
    place,
    from_pages,
    is_new,
    v_scale,
    MASKED: tl.constexpr,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
):
    """The values of a tile in the type of the product, as a tuple of parts `[KEYS, V_WIDTH / PARTS]`; zeros where no query
    sees the key."""
    if SOURCE != "new":
        unit_of_dim = tl.arange(0, C.V_WIDTH // C.V_PACK)
        UNITS: tl.constexpr = C.V_DIM // C.V_PACK
        at = value_at(page[:, None], head, place[:, None], unit_of_dim[None, :], C)
        start = as_units(cache.v, C.V_PACK)
        if MASKED:
            v = tl.load(start + at, mask=from_pages[:, None] & (unit_of_dim < UNITS)[None, :], other=0)
        elif C.V_WIDTH != C.V_DIM:
            v = tl.load(start + at, mask=(unit_of_dim < UNITS)[None, :], other=0)
        else:
            v = tl.load(start + at)
        groups = None
        if C.V_GROUPS is not None:
            at, inner = place[:, None] % C.PAGE_SIZE, from_pages[:, None]
            V_PLACES: tl.constexpr = C.V_GROUPS
            groups = load_groups(cache.v, page[:, None], head, at, inner, C.V_WIDTH, C.V_DIM, MASKED, V_PLACES)
        zero = None
        if has_zero_points(tl.constexpr(C.V_FORMAT)):
            V_STEPS: tl.constexpr = C.V_SCALE_STEPS
            zero = _zeros(cache.v_scale, page, head, place, from_pages, V_STEPS, C)
        v = decode(v, tl.constexpr(C.V_FORMAT), C.HARDWARE, tl.constexpr(C.DOT), groups, zero, tl.constexpr(C.NVIDIA))
        if C.V_PACK > 1 and PARTS == 1:
            v = whole_of(v, C.V_PACK)
        if v_scale is not None and not scales_weights(C):
            scaled = no_parts()
            for part in tl.static_range(PARTS):
                scaled += ((v if PARTS == 1 else v[part]).to(tl.float32) * v_scale[:, None],)
            v = scaled if PARTS > 1 else scaled[0]
        v = _in_dot_type(v, PARTS, C)
    if SOURCE != "pages":
        if SOURCE == "new":
            v = None
        row = token * new.v_token + head * new.v_head
        v = _with_new(v, new.v, row, new.v_dim, key < unit.cached, is_new, C.V_WIDTH, C.V_DIM, MASKED, SOURCE, PARTS, C)
    return v


@triton.jit
def _scales(cache, page, head, key, inside, C: tl.constexpr):
    """The scales of each key and value, 1 for those that do not come from pages; None where they are not quantised."""
    slot = key % C.PAGE_SIZE
    page = page.to(tl.int64)
    k_scale, v_scale = None, None
    if C.K_SCALE_STEPS is not None:
        at = page * C.K_SCALE_STEPS[0] + slot * C.K_SCALE_STEPS[1] + head * C.K_SCALE_STEPS[2]
        k_scale = _load_scales(cache.k_scale + at, inside, C.K_GROUPS is not None, tl.constexpr(C.K_FORMAT))
    if C.V_IN_K:
        v_scale = k_scale
    elif C.V_SCALE_STEPS is not None:
        at = page * C.V_SCALE_STEPS[0] + slot * C.V_SCALE_STEPS[1] + head * C.V_SCALE_STEPS[2]
        v_scale = _load_scales(cache.v_scale + at, inside, C.V_GROUPS is not None, tl.constexpr(C.V_FORMAT))
    return k_scale, v_scale


@triton.jit
def _zeros(scales, page, head, key, inside, STEPS: tl.constexpr, C: tl.constexpr):
    """The zero points of each key or value `[KEYS, 1]`, which are in its scale."""
    at = page.to(tl.int64)[:, None] * STEPS[0] + (key % C.PAGE_SIZE)[:, None] * STEPS[1] + head * STEPS[2]
    return zero_of(tl.load(scales + at, mask=inside[:, None], other=0.0))


@triton.jit
def _load_scales(at, inside, GROUPED: tl.constexpr, FORMAT: tl.constexpr):
    if GROUPED:
        return tl.load(at, mask=inside, other=1.0 / GROUPED_FACTOR) * GROUPED_FACTOR
    elif has_zero_points(FORMAT):
        return without_zero(tl.load(at, mask=inside, other=1.0))
    else:
        return tl.load(at, mask=inside, other=1.0)


@triton.constexpr_function
def scales_weights(C):
    """Whether the scales of values multiply the weights, which are fewer than values. fp16 has too few exponents for that."""
    return (C.V_PACK > 1 or C.V_IN_K) and C.DOT != "fp16"
