"""RoPE in cache writes: heads are normalised and rotated in fp32 while they are in registers, and rounded once."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.device.arguments import KStride, Number, Pointer, Stride, UnitStride, VectorPointer


class Rotation(NamedTuple):
    """The tables, norms and positions of `quire.Rope`, and the queries that are rotated; None where there is none."""

    cos: Pointer
    sin: Pointer
    table_row: Stride
    table_rows: Number
    positions: Pointer
    position_axis: Stride
    position_step: Stride
    position_words: Number
    """32-bit words of a position, 1 or 2; 0 if positions follow from the lengths."""
    q_norm: Pointer
    k_norm: Pointer
    """If V is a part of K, of the first part of keys."""
    eps: Number
    q: VectorPointer
    q_token: KStride
    q_head: KStride
    q_dim: UnitStride
    out: VectorPointer
    out_token: KStride
    out_head: KStride
    out_dim: UnitStride
    zero_padding: Number
    """1 if rows of `out` that belong to no sequence are set to zero."""
    in_place: Number
    """1 if `out` is q: then elements that are not rotated stay where they are."""
    k_programs: Number
    """The programs that store keys and values; the others rotate queries."""


class RopeConstants(NamedTuple):
    """What a rotation is compiled for."""

    HALF: int
    """Pairs of a head."""
    INTERLEAVED: bool
    SECTIONS: tuple[int, ...] | None
    """Frequencies per axis of positions, None if positions have one axis."""
    SPREAD: bool
    """Whether the axes take turns."""
    UNIT_OFFSET: bool
    VECTORS: bool
    """Whether rows of the tables can be read 16 bytes at a time."""
    Q_HEADS: int


@triton.jit
def given_positions(rope, token, live, axis: tl.constexpr):
    """The given positions of tokens on one axis. Both integer types are read as 32-bit words, so that one kernel serves both."""
    at = rope.positions + axis * rope.position_axis + token.to(tl.int64) * rope.position_step
    found = tl.load(at, mask=live, other=-1).to(tl.int64)
    upper = tl.load(at + 1, mask=live & (rope.position_words == 2), other=0).to(tl.int64)
    return tl.where(rope.position_words == 2, (upper << 32) | (found & 0xFFFFFFFF), found)


@triton.jit
def rows_of_tables(rope, token, live, position, R: tl.constexpr):
    """The rows of the tables for each token, by axis, and whether the tables have them. `position` follows from the lengths."""
    if R.SECTIONS is not None:
        time = given_positions(rope, token, live, 0)
        height = given_positions(rope, token, live, 1)
        width = given_positions(rope, token, live, 2)
    else:
        time = position
        if rope.position_words != 0:
            time = given_positions(rope, token, live, 0)
        height = time
        width = time
    inside = live & (time >= 0) & (time < rope.table_rows)
    if R.SECTIONS is not None:
        inside &= (height >= 0) & (height < rope.table_rows) & (width >= 0) & (width < rope.table_rows)
    return time, height, width, inside


@triton.jit
def turn(rope, rows, frequency, used, R: tl.constexpr):
    """Cosines and sines `[tokens, frequencies]`; 1 and 0 where they are not used."""
    time, height, width, inside = rows
    if R.SECTIONS is None:
        row = time[:, None]
    else:
        if R.SPREAD:
            second = (frequency % 3 == 1) & (frequency < 3 * R.SECTIONS[1])
            third = (frequency % 3 == 2) & (frequency < 3 * R.SECTIONS[2])
        else:
            second = (frequency >= R.SECTIONS[0]) & (frequency < R.SECTIONS[0] + R.SECTIONS[1])
            third = frequency >= R.SECTIONS[0] + R.SECTIONS[1]
        row = tl.where(second[None, :], height[:, None], tl.where(third[None, :], width[:, None], time[:, None]))
    cos = rope.cos + row * rope.table_row
    sin = rope.sin + row * rope.table_row
    if R.VECTORS:
        cos = tl.multiple_of(cos, (16, 16))
        sin = tl.multiple_of(sin, (16, 16))
    mask = inside[:, None] & used[None, :]
    at = frequency[None, :]
    return tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def weights(weight, dim, used, R: tl.constexpr):
    """The factors of a norm for some elements of a head."""
    w = tl.load(weight + dim, mask=used, other=0.0).to(tl.float32)
    if R.UNIT_OFFSET:
        w += 1.0
    return w[None, :]


@triton.jit
def norm_factor(x, rope, DIM: tl.constexpr):
    """1 / the root of the mean square of heads `x [tokens, width]`, which are zero from DIM on, `[tokens, 1]`."""
    squares = tl.sum(x * x, 1)
    mean = tl.div_rn(squares, tl.full(squares.shape, DIM, tl.float32)) + rope.eps
    return tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(mean))[:, None]


@triton.jit
def normalised(x, inside, weight, rope, DIM: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr):
    """Elements `x [tokens, WIDTH]` of heads of which others are rotated, with zeros where nothing is to be loaded. They are NaN
    where the tables lack a position, as the others are."""
    x = x.to(tl.float32)
    if weight is not None:
        dim = tl.arange(0, WIDTH)
        x = x * norm_factor(x, rope, DIM) * weights(weight, dim, dim < DIM, R)
    return tl.where(inside[:, None], x, float("nan"))


@triton.jit
def rotated(x, head, step, rows, weight, rope, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr):
    """Rotates heads `x [tokens, WIDTH]`, which were loaded from `head[:, None]` on, with zeros where nothing is to be loaded."""
    x = x.to(tl.float32)
    dim = tl.arange(0, WIDTH)
    inside = rows[3]
    factor = 1.0
    if weight is not None:
        factor = norm_factor(x, rope, HEAD_DIM)
        x = x * factor * weights(weight, dim, dim < HEAD_DIM, R)
    if R.INTERLEAVED:
        pair = tl.arange(0, WIDTH // 2)
        a, b = tl.split(tl.reshape(x, (x.shape[0], WIDTH // 2, 2)))
        cos, sin = turn(rope, rows, pair, pair < R.HALF, R)
        x = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (x.shape[0], WIDTH))
    else:
        # The partner of an element is in another thread: it is loaded again, from the cache.
        used = dim < 2 * R.HALF
        other = (dim + R.HALF) % (2 * R.HALF)
        partner = tl.load(head[:, None] + (other * step)[None, :], mask=inside[:, None] & used[None, :], other=0.0).to(tl.float32)
        if weight is not None:
            partner = partner * factor * weights(weight, other, used, R)
        cos, sin = turn(rope, rows, dim % R.HALF, used, R)
        x = x * cos + tl.where((dim < R.HALF)[None, :], -partner, partner) * sin
    return tl.where(inside[:, None], x, float("nan"))
