"""Clause 9: a cache above 2^31 elements is right, not wrapped. The memory in between is mapped, never touched."""

from __future__ import annotations

import pytest
import torch

import quire
from support.kernels import each_kernel  # noqa: F401

pytestmark = pytest.mark.usefixtures("each_kernel")


def test_offsets_beyond_2_to_the_31_elements() -> None:
    # Pages 2^22 elements apart, 600 of them: the last lies at element 2^31.2. int8, so 2.5 GB of address space.
    stride, pages, page_size, dim = 1 << 22, 600, 16, 8
    memory = torch.empty(stride * pages, dtype=torch.uint8)
    k = memory.as_strided((pages, page_size, 1, dim), (stride, dim, dim, 1))
    v = memory.as_strided((pages, page_size, 1, dim), (stride, dim, dim, 1), page_size * dim)
    ids = [599, 3, 512, 87]  # 599 and 512 start at or beyond 2^31; wrapped at 2^31 or 2^32 they would be 87 and 0
    for page in (*ids, 0):
        k[page], v[page] = 0x7F, 0x7F  # NaN in e4m3fn: whatever is not written shows
    cache = quire.KVCache.wrap(k, v, layout="nhd", format="e4m3fn", k_scale=0.5, v_scale=0.25)
    table = torch.tensor([ids[:2], ids[2:]])
    batch = quire.Batch(table, torch.tensor([32, 20]), torch.tensor([0, 32, 52]))
    q, new_k, new_v = torch.randn(52, 2, dim), torch.randn(52, 1, dim), torch.randn(52, 1, dim)
    out = quire.step(q, new_k, new_v, cache, batch)
    for rows in (slice(0, 32), slice(32, 52)):
        seen_k = (new_k[rows] / 0.5).to(torch.float8_e4m3fn).double() * 0.5
        seen_v = (new_v[rows] / 0.25).to(torch.float8_e4m3fn).double() * 0.25
        expected, _ = quire.reference.attention(q[rows], seen_k, seen_v)
        assert (out[rows].double() - expected).abs().max() < 1e-5
