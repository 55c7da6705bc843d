"""Converts bf16 queries to fp16 for products with an 8-bit cache, each row divided by a power of two. One program takes a few query
rows. Tiles of few rows convert their queries themselves."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device.units import balanced


@triton.jit
def balance_kernel(ready, exponents, query, count, ROWS: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, C.K_WIDTH)
    token = (row // (C.KV_HEADS * C.GROUP)).to(tl.int64)
    head = row % (C.KV_HEADS * C.GROUP)
    inside = (row < count)[:, None] & (dim < C.HEAD_DIM)[None, :]
    at = token[:, None] * query.token + head[:, None] * query.head + dim[None, :] * query.dim
    q, exponent = balanced(tl.load(query.at + at, mask=inside, other=0.0), None)
    tl.store(ready + row.to(tl.int64)[:, None] * C.HEAD_DIM + dim[None, :], q, mask=inside)
    tl.store(exponents + row, exponent, mask=row < count)
