"""Cache writes. One program takes a few pairs of token and head: finds their slots, quantises, stores."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.device.arguments import KStride, Number, Pointer, Stride, UnitStride, VectorPointer, VStride
from quire.kernels.triton.device.features import is_in_shard, keys_before
from quire.kernels.triton.device.formats import encode, encode_latent, encode_nvfp4, encode_with_zero, has_zero_points
from quire.kernels.triton.device.groups import group_at
from quire.kernels.triton.device.latent import is_latent, rest_in, scales_in
from quire.kernels.triton.device.rope import RopeConstants, normalised, rotated, rows_of_tables


class NewTokens(NamedTuple):
    """New keys and values `[tokens, kv_heads, dim]`, and their slots: `slots`, or from page table and lengths."""

    k: VectorPointer
    k_token: KStride
    k_head: KStride
    k_dim: UnitStride
    v: VectorPointer
    v_token: VStride
    v_head: VStride
    v_dim: UnitStride
    slots: Pointer
    slots_step: Stride
    slot_words: Number
    """32-bit words of a slot, 1 or 2; 0 if no slots are given."""
    page_table: Pointer
    table_row: Stride
    table_step: UnitStride
    table_width: Number
    kv_lens: Pointer
    kv_lens_step: UnitStride
    q_starts: Pointer
    q_starts_step: UnitStride
    seqs: Number
    tokens: Number
    search: Number
    """Steps of the binary search for a token's sequence."""
    rank: Number
    """This and the next two are the shard, None without one: tokens of other ranks are not written."""
    ranks: Number
    interleave: Number


class PageTensors(NamedTuple):
    """The pages of the cache, and their scales."""

    k: VectorPointer
    v: VectorPointer
    k_scale: Pointer
    v_scale: Pointer
    pages: Number


class WriteConstants(NamedTuple):
    """What the kernel is compiled for."""

    ROWS: int
    KV_HEADS: int
    HEAD_DIM: int
    V_DIM: int
    K_WIDTH: int
    V_WIDTH: int
    PAGE_SIZE: int
    K_STEPS: tuple[int, ...]
    K_SLOTS: int
    K_DIMS: int
    V_STEPS: tuple[int, ...]
    V_SLOTS: int
    V_DIMS: int
    K_GROUPS: tuple[int, ...] | None
    """Where the scales of groups of K are, `quire.cache.groups.GroupPlaces`; None if the format has none."""
    V_GROUPS: tuple[int, ...] | None
    K_FORMAT: str
    K_PACK: int
    """Elements in one element of storage."""
    K_LARGEST: float | None
    """The largest magnitude that is stored; None if K is not quantised."""
    V_FORMAT: str
    V_PACK: int
    V_LARGEST: float | None
    HARDWARE: bool
    K_SCALE_STEPS: tuple[int, ...] | None
    V_SCALE_STEPS: tuple[int, ...] | None
    PER_TOKEN: bool
    """Whether scales are computed here, one per token and head."""
    V_AT: int
    """Where V begins in a row of its pages, in elements of storage: not 0 where two parts of K are stored, in place of K and V."""
    SHARED_SCALES: bool
    """Whether K and V are two parts that share the scale of a token."""
    ROPE: RopeConstants | None = None
    """Of `rope_kernel`."""


@triton.jit
def write_kernel(pages, tokens, S: tl.constexpr):
    write_rows(pages, tokens, None, S)


@triton.jit
def rope_kernel(pages, tokens, rope, S: tl.constexpr):
    """Keys are rotated before they are stored; the programs from `k_programs` on rotate queries."""
    if tl.program_id(0) < rope.k_programs:
        write_rows(pages, tokens, rope, S)
    elif rope.q is not None:
        rotate_queries(tokens, rope, S)


@triton.jit
def rotate_queries(tokens, rope, S: tl.constexpr):
    R: tl.constexpr = S.ROPE
    index = (tl.program_id(0) - rope.k_programs) * S.ROWS + tl.arange(0, S.ROWS)
    token = index // R.Q_HEADS
    head = index % R.Q_HEADS
    live = is_live(tokens, token)
    _, position = place_of(tokens, token, live)
    rows = rows_of_tables(rope, token, live, position, R)
    padding = (token < tokens.tokens) & (rope.zero_padding != 0) & ~live
    start = rope.q + token.to(tl.int64) * rope.q_token + head * rope.q_head
    to = rope.out + token.to(tl.int64) * rope.out_token + head * rope.out_head
    if is_in_parts(S):
        copy_queries(start, to, rows[3], live, padding, rope, S.HEAD_DIM, S.K_WIDTH)
        start += S.HEAD_DIM * rope.q_dim
        to += S.HEAD_DIM * rope.out_dim
        rotate_heads(start, to, rows, live, padding, None, rope, S.V_DIM, S.V_WIDTH, R)
    else:
        rotate_heads(start, to, rows, live, padding, rope.q_norm, rope, S.HEAD_DIM, S.K_WIDTH, R)


@triton.jit
def rotate_heads(
    start, to, rows, live, padding, weight, rope, DIM: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Rotates DIM elements of queries from `start` on, `[rows]`, into those from `to` on."""
    dim = tl.arange(0, WIDTH)
    wide = (dim < DIM)[None, :]
    q = tl.load(start[:, None] + dim[None, :] * rope.q_dim, mask=live[:, None] & wide, other=0.0)
    q = rotated(q, start, rope.q_dim, rows, weight, rope, DIM, WIDTH, R)
    q = tl.where(live[:, None], q, 0.0).to(rope.out.dtype.element_ty)
    # In place, other threads may still have to load what is stored here.
    tl.debug_barrier()
    tl.store(to[:, None] + dim[None, :] * rope.out_dim, q, mask=(live | padding)[:, None] & wide)


@triton.jit
def copy_queries(start, to, inside, live, padding, rope, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Copies elements that are not rotated; NaN where the tables lack a position."""
    dim = tl.arange(0, WIDTH)
    wide = (dim < DIM)[None, :]
    live &= (rope.in_place == 0) | ~inside
    q = tl.load(start[:, None] + dim[None, :] * rope.q_dim, mask=live[:, None] & wide, other=0.0)
    q = tl.where((inside | padding)[:, None], q.to(tl.float32), float("nan")).to(rope.out.dtype.element_ty)
    tl.store(to[:, None] + dim[None, :] * rope.out_dim, q, mask=(live | padding)[:, None] & wide)


@triton.constexpr_function
def is_in_parts(S):
    """Whether K and V are the two parts of keys, of which the second is rotated."""
    return S.V_AT != 0


@triton.jit
def write_rows(pages, tokens, rope, S: tl.constexpr):
    index = tl.program_id(0) * S.ROWS + tl.arange(0, S.ROWS)
    token = index // S.KV_HEADS
    head = index % S.KV_HEADS
    known = None
    if S.ROPE is not None:
        known = place_of(tokens, token, is_live(tokens, token))
    page, slot, live = slot_of(pages, tokens, token, known, S)

    dim = tl.arange(0, S.K_WIDTH)
    mask = live[:, None] & (dim < S.HEAD_DIM)[None, :]
    at = token.to(tl.int64)[:, None] * tokens.k_token + head[:, None] * tokens.k_head + dim[None, :] * tokens.k_dim
    k = tl.load(tokens.k + at, mask=mask, other=0.0)
    v = None
    if S.ROPE is not None:
        R: tl.constexpr = S.ROPE
        rows = rows_of_tables(rope, token, live, known[1], R)  # type: ignore[index]
        if is_in_parts(S):
            k = normalised(k, rows[3], rope.k_norm, rope, S.HEAD_DIM, S.K_WIDTH, R)
            start = tokens.v + token.to(tl.int64) * tokens.v_token + head * tokens.v_head
            v = values(tokens, token, head, live, S)
            v = rotated(v, start, tokens.v_dim, rows, None, rope, S.V_DIM, S.V_WIDTH, R)
        else:
            start = tokens.k + token.to(tl.int64) * tokens.k_token + head * tokens.k_head
            k = rotated(k, start, tokens.k_dim, rows, rope.k_norm, rope, S.HEAD_DIM, S.K_WIDTH, R)
    first = None
    if S.SHARED_SCALES:
        if v is None:
            v = values(tokens, token, head, live, S)
        first = k
    if S.K_LARGEST is not None:
        scale = pages.k_scale + page * S.K_SCALE_STEPS[0] + slot * S.K_SCALE_STEPS[1] + head * S.K_SCALE_STEPS[2]
        k = quantised(k, v, scale, live, S.K_LARGEST, tl.constexpr(S.K_FORMAT), S)
    if S.K_GROUPS is not None:
        K_PLACES: tl.constexpr = S.K_GROUPS
        k = grouped(k, pages.k, page, head, slot, live, S.HEAD_DIM, K_PLACES, S)
    place = page * S.K_STEPS[0] + head * S.K_STEPS[1] + (slot // S.K_SLOTS) * S.K_STEPS[2] + (slot % S.K_SLOTS) * S.K_STEPS[3]
    rows_at = pages.k + place[:, None]
    if is_latent(S):
        k, of_groups = encode_latent(k, S.HARDWARE)
        tl.store(scales_in(rows_at, S.HEAD_DIM), of_groups, mask=live[:, None])
    unit = tl.arange(0, S.K_WIDTH // S.K_PACK)
    mask = live[:, None] & (unit < S.HEAD_DIM // S.K_PACK)[None, :]
    at = place[:, None] + ((unit // S.K_DIMS) * S.K_STEPS[4] + (unit % S.K_DIMS) * S.K_STEPS[5])[None, :]
    tl.store(pages.k + at, k.to(pages.k.dtype.element_ty), mask=mask)

    if S.V_DIM > 0:
        if v is None:
            v = values(tokens, token, head, live, S)
        if is_latent(S):
            dim = tl.arange(0, S.V_WIDTH)
            tl.store(rest_in(rows_at, dim, S.HEAD_DIM), v.to(tl.bfloat16), mask=live[:, None] & (dim < S.V_DIM)[None, :])
        else:
            store_values(pages, v, first, page, head, slot, live, S)


@triton.jit
def store_values(pages, v, first, page, head, slot, live, S: tl.constexpr):
    """Stores values, or the second part of keys whose first one is `first`."""
    if S.V_LARGEST is not None:
        scale = pages.v_scale + page * S.V_SCALE_STEPS[0] + slot * S.V_SCALE_STEPS[1] + head * S.V_SCALE_STEPS[2]
        v = quantised(v, first, scale, live, S.V_LARGEST, tl.constexpr(S.V_FORMAT), S)
    if S.V_GROUPS is not None:
        V_PLACES: tl.constexpr = S.V_GROUPS
        v = grouped(v, pages.v, page, head, slot, live, S.V_DIM, V_PLACES, S)
    place = page * S.V_STEPS[0] + head * S.V_STEPS[1] + (slot // S.V_SLOTS) * S.V_STEPS[2] + (slot % S.V_SLOTS) * S.V_STEPS[3]
    unit = tl.arange(0, S.V_WIDTH // S.V_PACK)
    mask = live[:, None] & (unit < S.V_DIM // S.V_PACK)[None, :]
    if S.V_AT != 0:
        unit += S.V_AT
    at = place[:, None] + ((unit // S.V_DIMS) * S.V_STEPS[4] + (unit % S.V_DIMS) * S.V_STEPS[5])[None, :]
    tl.store(pages.v + at, v.to(pages.v.dtype.element_ty), mask=mask)


@triton.jit
def values(tokens, token, head, live, S: tl.constexpr):
    """The values of new tokens, or the second part of their keys."""
    dim = tl.arange(0, S.V_WIDTH)
    mask = live[:, None] & (dim < S.V_DIM)[None, :]
    at = token.to(tl.int64)[:, None] * tokens.v_token + head[:, None] * tokens.v_head + dim[None, :] * tokens.v_dim
    return tl.load(tokens.v + at, mask=mask, other=0.0)


@triton.jit
def is_live(tokens, token):
    """Whether a token is not padding."""
    end = tl.load(tokens.q_starts + tokens.seqs * tokens.q_starts_step)
    return (token < tokens.tokens) & (token < end)


@triton.jit
def place_of(tokens, token, live):
    """The sequence of each token, and its position there. Binary search: the first `low` sequences end at this token or before."""
    low = token * 0
    high = token * 0 + tokens.seqs
    for _ in range(tokens.search):
        middle = (low + high) // 2
        stop = tl.load(tokens.q_starts + (middle + 1) * tokens.q_starts_step, mask=live & (low < high), other=0)
        passed = (stop <= token) & (low < high)
        low = tl.where(passed, middle + 1, low)
        high = tl.where(passed, high, tl.minimum(middle, high))
    seq = tl.minimum(low, tokens.seqs - 1)
    stop = tl.load(tokens.q_starts + (seq + 1) * tokens.q_starts_step, mask=live, other=0).to(tl.int64)
    return seq, token - stop + tl.load(tokens.kv_lens + seq * tokens.kv_lens_step, mask=live, other=0).to(tl.int64)


@triton.jit
def slot_of(pages, tokens, token, known, S: tl.constexpr):
    """The page and the slot in it of each token, and whether it is written: not padding, not skipped, its page existing. `known` is
    the result of `place_of`, or None."""
    live = is_live(tokens, token)
    page = tl.zeros(token.shape, tl.int64) - 1
    slot = tl.zeros(token.shape, tl.int64)
    if tokens.slot_words != 0:
        # Slots of both integer types are read as 32-bit words, so that one kernel serves both.
        at = token.to(tl.int64) * tokens.slots_step
        found = tl.load(tokens.slots + at, mask=live, other=-1).to(tl.int64)
        upper = tl.load(tokens.slots + at + 1, mask=live & (tokens.slot_words == 2), other=0).to(tl.int64)
        found = tl.where(tokens.slot_words == 2, (upper << 32) | (found & 0xFFFFFFFF), found)
        live &= found >= 0
        page = found // S.PAGE_SIZE
        slot = found % S.PAGE_SIZE
    else:
        if known is None:
            seq, position = place_of(tokens, token, live)
        else:
            seq, position = known
        if tokens.ranks is not None:
            owned = (position >= 0) & is_in_shard(tokens, position)
            position = tl.where(owned, keys_before(tokens, position), -1)
        live &= (position >= 0) & (position // S.PAGE_SIZE < tokens.table_width)
        column = position // S.PAGE_SIZE
        slot = position % S.PAGE_SIZE
        at = seq.to(tl.int64) * tokens.table_row + column * tokens.table_step
        page = tl.load(tokens.page_table + at, mask=live, other=-1).to(tl.int64)
    live &= (page >= 0) & (page < pages.pages)
    return tl.where(live, page, 0), tl.where(live, slot, 0), live


@triton.jit
def quantised(x, other, scale, live, LARGEST: tl.constexpr, FORMAT: tl.constexpr, S: tl.constexpr):
    """Divides rows by their scales and converts them to the cache's format. Per-token scales are computed and stored here. `other`
    is None, or other parts of the rows, which have the same scales."""
    x = x.to(tl.float32)
    if has_zero_points(FORMAT):
        codes, factor = encode_with_zero(x)
        tl.store(scale, factor, mask=live)
        return codes
    else:
        if S.PER_TOKEN:
            largest = tl.max(tl.abs(x), 1)
            if other is not None:
                other = other.to(tl.float32)
                largest = tl.maximum(largest, tl.max(tl.abs(other), 1))
                largest = tl.where(tl.max((other != other).to(tl.int32), 1) > 0, float("nan"), largest)
            # A maximum ignores NaN; the scale of a row with a NaN must be NaN.
            largest = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), largest)
            factor = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
            factor = tl.where(factor == 0.0, 1.0, factor)
            tl.store(scale, factor, mask=live)
        else:
            factor = tl.load(scale, mask=live, other=1.0)
        return encode(tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape)), FORMAT, S.HARDWARE)


@triton.jit
def grouped(x, start, page, head, slot, live, DIM: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Stores the scales of the groups of fp32 rows, and returns their codes."""
    codes, scales = encode_nvfp4(x, G.group, S.HARDWARE)
    group = tl.arange(0, scales.shape[1])
    at = group_at(page[:, None], head[:, None], slot[:, None], group[None, :], G)
    tl.store(start + at, scales.to(start.dtype.element_ty), mask=live[:, None] & (group < DIM // G.group)[None, :])
    return codes
