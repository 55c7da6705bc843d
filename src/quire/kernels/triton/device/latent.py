"""Rows of `fp8_ds_mla` (`quire.cache.latent_rows`): fp8 codes, fp32 scales of groups and bf16 elements in one row of bytes. The
pages are bytes; the other types are read and written through pointers of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.formats import LATENT_GROUP


@triton.constexpr_function
def is_latent(C):
    """Whether the pages have such rows."""
    return C.K_FORMAT == "fp8_ds_mla"


@triton.jit
def scales_in(rows, DIM: tl.constexpr):
    """Pointers to the scales of rows that begin at `rows` `[rows, 1]`, `[rows, groups]`."""
    return (rows + DIM).to(tl.pointer_type(tl.float32), bitcast=True) + tl.arange(0, DIM // LATENT_GROUP)[None, :]


@triton.jit
def rest_in(rows, element, DIM: tl.constexpr):
    """Pointers to elements behind the latent, bf16 `[rows, elements]`."""
    return (rows + DIM + DIM // LATENT_GROUP * 4).to(tl.pointer_type(tl.bfloat16), bitcast=True) + element[None, :]


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
