"""One tile of keys meets one tile of queries: load keys, score, hide, weigh, load values, fold."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.formats import decode

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def look_up(rows, unit, key, end, C: tl.constexpr):
    """What the table says is the page of each key below `end`, existing or not; -1 where the table has no such column."""
    column = unit.row.to(tl.int64) * rows.table_row + key // C.PAGE_SIZE * rows.table_step
    end = within_table(rows, tl.minimum(end, unit.cached), C)
    return tl.load(rows.page_table + column, mask=key < end, other=-1)


@triton.jit
def within_table(rows, end, C: tl.constexpr):
    """`end`, or the number of keys that the table has columns for if that is less. A tile begins before the first key that a query
    sees: a table without a column for those keys is valid, and must not be read there."""
    return tl.where((end - 1) // C.PAGE_SIZE < rows.table_width, end, rows.table_width * C.PAGE_SIZE)


@triton.jit
def existing(page, pages):
    """Page ids, the last one's in place of those that do not exist, and which do. Without a sign, a negative id is a large one."""
    if page.dtype == tl.int64:
        unsigned = page.to(tl.uint64, bitcast=True)
        last = tl.full([], 0, tl.uint64) + (pages - 1)
    else:
        unsigned = page.to(tl.uint32, bitcast=True)
        last = tl.full([], 0, tl.uint32) + (pages - 1)
    return tl.minimum(unsigned, last), unsigned <= last


@triton.jit
def key_at(page, head, key, dim, C: tl.constexpr):
    """The offset of an element of K, as wide as `page` is; `page` and `key` broadcast against `dim`."""
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
def as_factor(x, C: tl.constexpr):
    """Elements in the type of the products."""
    if C.DOT == "bf16":
        return x.to(tl.bfloat16)
    elif C.DOT == "fp16":
        return x.to(tl.float16)
    else:
        return x.to(tl.float32)


@triton.jit
def product(a, b, acc, C: tl.constexpr):
    """a b + acc in fp32; acc may be None. fp32 factors are multiplied as fp32: tf32 would lose what their user asked for."""
    if C.DOT == "fp32":
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def nth_key(T: tl.constexpr):
    """Which key of a tile each of its keys is, `[KEYS]`: those of heads that are together have the same number."""
    return tl.arange(0, T.KEYS) // T.TOGETHER


@triton.jit
def member_of(T: tl.constexpr):
    """Which of the heads that are together each key of a tile is of, `[KEYS]`."""
    return tl.arange(0, T.KEYS) % T.TOGETHER


@triton.jit
def meet(
    state, q, scale, next_page, only, unit, rows, cache, new, features, begin, end,
    HIDE: tl.constexpr, SOURCE: tl.constexpr, ASK: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Folds keys [begin, end) into the state of a unit, tile by tile; begin is a multiple of a tile. A tile of few rows is given
    the pages of its first keys; and perhaps which of the heads that are together are met `only`.

    HIDE: some queries may not see some of these keys. SOURCE: 'pages', 'new' or 'both'. ASK: nobody has looked yet whether the
    pages exist; those that do not are noted in the state, and the last page is read in their place."""
    weighted, top, total, missing = state
    STEP: tl.constexpr = T.STEP
    # New tokens lie where they lie, with no page to wait for: one step less of the pipeline. From both takes twice the memory. And
    # from bytes and new tokens at once there is no pipeline: Triton 3.6 made one that gave NaN on an H200, with a tree, where the
    # same kernel without it is right.
    STAGES: tl.constexpr = T.STAGES if SOURCE == "pages" else 1 if SOURCE == "both" and C.BYTES else max(T.STAGES - 1, 1)
    head = unit.kv_head if T.TOGETHER == 1 else (unit.kv_head + member_of(T))[:, None]
    EAGER: tl.constexpr = C.BYTES and not T.FEW
    k_dim = tl.arange(0, C.K_WIDTH)
    for first in tl.range(begin, end, STEP, num_stages=STAGES if only is None else 1):
        first = tl.multiple_of(first, STEP)
        key = first + nth_key(T)
        inside = (key >= unit.low) & (key < unit.high) if HIDE else key >= 0
        seen = sees(unit, features, key, inside, C) if HIDE else inside[None, :]
        if T.TOGETHER > 1:
            seen &= unit.member[:, None] == member_of(T)[None, :]
            if only is not None:
                inside &= member_of(T) == only
        if C.TREE and HIDE:
            # A tree may hide a key from everybody: then it is nobody's business what it holds.
            inside = tl.max(seen.to(tl.int32), 0) > 0
        from_pages = inside & (key < unit.cached) if SOURCE == "both" else inside

        # load keys
        page, token, fresh = None, None, None
        if SOURCE != "new":
            if T.FEW:
                page = next_page
                next_page = look_up(rows, unit, key + STEP, end, C)
            else:
                page = look_up(rows, unit, key, end, C)
            if ASK:
                page, exists = existing(page, cache.pages)
                missing |= from_pages & ~exists
            page = page.to(tl.int64) if C.FAR else page.to(tl.int32)
            at = key_at(page[:, None], head, key[:, None], k_dim[None, :], C)
            if HIDE:
                k = tl.load(cache.k + at, mask=from_pages[:, None] & (k_dim < C.HEAD_DIM)[None, :], other=0)
            elif C.K_WIDTH != C.HEAD_DIM:
                k = tl.load(cache.k + at, mask=(k_dim < C.HEAD_DIM)[None, :], other=0)
            else:
                k = tl.load(cache.k + at)
            k = as_factor(decode(k, tl.constexpr(C.FORMAT), C.HARDWARE), C)
        if SOURCE != "pages":
            token = (unit.start + key - unit.context).to(tl.int64)[:, None]
            fresh = (inside & (key >= unit.cached))[:, None]
            at = token * new.k_token + head * new.k_head + k_dim[None, :] * new.k_dim
            if HIDE or C.K_WIDTH != C.HEAD_DIM:
                k_new = as_factor(tl.load(new.k + at, mask=fresh & (k_dim < C.HEAD_DIM)[None, :], other=0.0), C)
            else:
                k_new = as_factor(tl.load(new.k + at), C)
            if SOURCE == "both":
                k = tl.where((key < unit.cached)[:, None], k, k_new)
            else:
                k = k_new

        # score
        score = product(q, tl.trans(k), None, C)
        k_scale, v_scale = None, None
        if C.PER_KEY and SOURCE != "new":
            k_scale, v_scale = _scales(cache, page, unit.kv_head + member_of(T), key, from_pages, C)
            score *= k_scale[None, :]
        if EAGER:
            # Bytes take a while to become numbers: that runs while the matrix unit scores.
            v = _values(cache, new, unit, head, page, token, key, from_pages, fresh, v_scale, HIDE, SOURCE, C)
        score, factor = logits(score, scale, unit, features, key, C)
        if HIDE:
            score = tl.where(seen, score, float("-inf"))

        # weigh
        higher = tl.maximum(top, tl.max(score, 1) * factor)
        base = tl.where(higher == float("-inf"), 0.0, higher) if HIDE else higher
        weight = tl.exp2(score * per_row(factor) - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        top = higher

        # load values
        if not EAGER:
            v = _values(cache, new, unit, head, page, token, key, from_pages, fresh, v_scale, HIDE, SOURCE, C)

        # fold
        weighted = product(as_factor(weight, C), v, weighted * shrink[:, None], C)
    return weighted, top, total, missing


@triton.jit
def _values(
    cache, new, unit, head, page, token, key, from_pages, fresh, v_scale, HIDE: tl.constexpr, SOURCE: tl.constexpr, C: tl.constexpr
):
    """The values of a tile `[KEYS, V_WIDTH]`, ready for the product; zeros where nobody looks, whatever memory holds there."""
    dim = tl.arange(0, C.V_WIDTH)
    if SOURCE != "new":
        at = value_at(page[:, None], head, key[:, None], dim[None, :], C)
        if HIDE:
            v = tl.load(cache.v + at, mask=from_pages[:, None] & (dim < C.V_DIM)[None, :], other=0)
        elif C.V_WIDTH != C.V_DIM:
            v = tl.load(cache.v + at, mask=(dim < C.V_DIM)[None, :], other=0)
        else:
            v = tl.load(cache.v + at)
        v = decode(v, tl.constexpr(C.FORMAT), C.HARDWARE)
        if C.PER_KEY:
            v = v.to(tl.float32) * v_scale[:, None]
        v = as_factor(v, C)
    if SOURCE != "pages":
        at = token * new.v_token + head * new.v_head + dim[None, :] * new.v_dim
        if HIDE or C.V_WIDTH != C.V_DIM:
            v_new = as_factor(tl.load(new.v + at, mask=fresh & (dim < C.V_DIM)[None, :], other=0.0), C)
        else:
            v_new = as_factor(tl.load(new.v + at), C)
        if SOURCE == "both":
            v = tl.where((key < unit.cached)[:, None], v, v_new)
        else:
            v = v_new
    return v


@triton.jit
def _scales(cache, page, head, key, inside, C: tl.constexpr):
    """What the stored numbers of each key and value are multiplied with; 1 for those that do not come from pages."""
    slot = key % C.PAGE_SIZE
    page = page.to(tl.int64)
    k_at = page * C.K_SCALE_STEPS[0] + slot * C.K_SCALE_STEPS[1] + head * C.K_SCALE_STEPS[2]
    v_at = page * C.V_SCALE_STEPS[0] + slot * C.V_SCALE_STEPS[1] + head * C.V_SCALE_STEPS[2]
    return tl.load(cache.k_scale + k_at, mask=inside, other=1.0), tl.load(cache.v_scale + v_at, mask=inside, other=1.0)


@triton.jit
def sees(unit, features, key, inside, C: tl.constexpr):
    """Which query row sees which key, `[ROWS, KEYS]`. Rows that hold no query see what they like: nobody looks at them."""
    if C.TREE:
        column = key - unit.context
        seen = inside[None, :] & unit.live[:, None]
        mask = tl.load(
            features.mask + unit.token.to(tl.int64)[:, None] * features.mask_token + column[None, :] * features.mask_column,
            mask=seen & (column >= 0)[None, :],
            other=0,
        )
        seen &= (column < 0)[None, :] | (mask != 0)
        if C.LEFT is not None:
            seen &= _distance(unit, features, key, C) <= C.LEFT
        if C.RIGHT is not None:
            seen &= _distance(unit, features, key, C) >= -C.RIGHT
        return seen
    elif C.LEFT is not None:
        return (key[None, :] < unit.sees_to[:, None]) & (key[None, :] >= unit.sees_from[:, None])
    else:
        return key[None, :] < unit.sees_to[:, None]


@triton.jit
def _distance(unit, features, key, C: tl.constexpr):
    """q_pos - k_pos, `[ROWS, KEYS]`."""
    if features.positions is not None:
        fresh = key >= unit.context
        token = (unit.start + key - unit.context).to(tl.int64)
        position = tl.load(features.positions + token * features.positions_step, mask=fresh & (key < unit.high), other=0)
        return unit.at[:, None] - tl.where(fresh, position.to(tl.int32), key)[None, :]
    else:
        return unit.at[:, None] - key[None, :]


@triton.jit
def logits(score, scale, unit, features, key, C: tl.constexpr):
    """Products as logits: scale, cap, ALiBi. What is left of the scale comes back beside them, in units of log 2: it is applied
    where the largest logit is subtracted, in one instruction."""
    if features.softcap is not None or features.alibi is not None:
        score = score * per_row(scale)
        if features.softcap is not None:
            score = tanh(score / (features.softcap * LOG2E)) * (features.softcap * LOG2E)
        if features.alibi is not None:
            distance = _distance(unit, features, key, C)
            score -= unit.slope[:, None] * tl.abs(distance).to(tl.float32)
        scale = scale * 0.0 + 1.0
    return score, scale


@triton.jit
def per_row(scale):
    """A scale against scores: balanced queries have one each, and so have those of heads that are together and have one each."""
    if scale.type.is_block():
        return scale[:, None]
    else:
        return scale


@triton.jit
def tanh(x):
    """Exact to fp32's last places for any x: nothing overflows, and small x do not cancel."""
    square = x * x
    near = x * (1.0 - square * (0.3333333333 - square * (0.1333333333 - square * 0.0539682540)))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))
