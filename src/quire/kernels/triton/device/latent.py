"""Rows of `fp8_ds_mla` (`quire.cache.latent_rows`): e4m3 codes, fp32 scales of groups and bf16 elements in one row of bytes. The
pages are bytes; the other types are read and written through pointers of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.cache.latent_rows import GROUP as LATENT_GROUP
from quire.cache.latent_rows import LARGEST, SMALLEST_SCALE
from quire.kernels.triton.device.formats import decode_e4m3fn, encode_e4m3fn

GROUP = tl.constexpr(LATENT_GROUP)
LARGEST_CODE = tl.constexpr(LARGEST)
SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.constexpr_function
def is_latent(C):
    """Whether the pages have such rows."""
    return C.K_FORMAT == "fp8_ds_mla"


@triton.jit
def scales_in(rows, DIM: tl.constexpr):
    """Pointers to the scales of rows that begin at `rows` `[rows, 1]`, `[rows, groups]`."""
    return (rows + DIM).to(tl.pointer_type(tl.float32), bitcast=True) + tl.arange(0, DIM // GROUP)[None, :]


@triton.jit
def rest_in(rows, element, DIM: tl.constexpr):
    """Pointers to elements behind the latent, bf16 `[rows, elements]`."""
    return (rows + DIM + DIM // GROUP * 4).to(tl.pointer_type(tl.bfloat16), bitcast=True) + element[None, :]


@triton.jit
def load_latent_scales(rows, inside, DIM: tl.constexpr, MASKED: tl.constexpr):
    """The scales of a tile of keys; zeros where no query sees the key."""
    if MASKED:
        return tl.load(scales_in(rows, DIM), mask=inside[:, None], other=0.0)
    else:
        return tl.load(scales_in(rows, DIM))


@triton.jit
def load_latent_rest(rows, inside, DIM: tl.constexpr, REST: tl.constexpr, MASKED: tl.constexpr):
    """The elements behind the latent, likewise."""
    if MASKED:
        return tl.load(rest_in(rows, tl.arange(0, REST), DIM), mask=inside[:, None], other=0.0)
    else:
        return tl.load(rest_in(rows, tl.arange(0, REST), DIM))


@triton.jit
def decode_latent(codes, scales, HARDWARE: tl.constexpr):
    """Codes `[rows, dim]` and scales `[rows, groups]` as fp32."""
    ROWS: tl.constexpr = codes.shape[0]
    DIM: tl.constexpr = codes.shape[1]
    numbers = tl.reshape(decode_e4m3fn(codes, HARDWARE).to(tl.float32), [ROWS, DIM // GROUP, GROUP])
    return tl.reshape(numbers * scales[:, :, None], [ROWS, DIM])


@triton.jit
def encode_latent(x, HARDWARE: tl.constexpr):
    """The codes of a latent `[rows, dim]`, and its scales `[rows, groups]`."""
    ROWS: tl.constexpr = x.shape[0]
    DIM: tl.constexpr = x.shape[1]
    groups = tl.reshape(x.to(tl.float32), [ROWS, DIM // GROUP, GROUP])
    largest = tl.max(tl.abs(groups), 2)
    scales = tl.div_rn(largest, tl.full(largest.shape, LARGEST_CODE, tl.float32))
    scales = tl.maximum(scales, SMALLEST)
    # A maximum ignores NaN; the scale of a group with a NaN must be NaN.
    scales = tl.where(tl.max((groups != groups).to(tl.int32), 2) > 0, float("nan"), scales)
    codes = encode_e4m3fn(tl.div_rn(groups, tl.broadcast_to(scales[:, :, None], groups.shape)), HARDWARE)
    return tl.reshape(codes, [ROWS, DIM]), scales
