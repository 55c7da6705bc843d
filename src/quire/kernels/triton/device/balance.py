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
    q = tl.load(query.at + at, mask=inside, other=0.0)
    STEP: tl.constexpr = C.HEAD_DIM if C.REST_DIM is None else C.HEAD_DIM + C.REST_DIM
    if C.REST_DIM is None:
        q, exponent = balanced(q, None)
    else:
        whole = q
        rest_dim = C.HEAD_DIM + tl.arange(0, C.REST_WIDTH)
        inside_rest = (row < count)[:, None] & (rest_dim < STEP)[None, :]
        at = token[:, None] * query.token + head[:, None] * query.head + rest_dim[None, :] * query.dim
        rest = tl.load(query.at + at, mask=inside_rest, other=0.0)
        q, exponent = balanced(whole, rest)
        rest, _ = balanced(rest, whole)
        tl.store(ready + row.to(tl.int64)[:, None] * STEP + rest_dim[None, :], rest, mask=inside_rest)
    tl.store(ready + row.to(tl.int64)[:, None] * STEP + dim[None, :], q, mask=inside)
    tl.store(exponents + row, exponent, mask=row < count)
