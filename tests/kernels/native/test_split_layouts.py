"""Layouts in which the elements of a row are not contiguous: rows are gathered, and results are those of `nhd`."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.cache.format import FORMATS
from quire.kernels.native import library
from support.kernels import NO_LIBRARY, levels

pytestmark = pytest.mark.skipif(not library.FILE.exists(), reason=NO_LIBRARY)
SIZES = ((64, 16), (80, 24), (48, 7))
"""head_dim and page_size: whole blocks of slots, a rest of them, and pages without a block."""
NEW = (1, 5, 40)


def built(layout: str, format: str, dim: int, page_size: int, q_type: torch.dtype) -> list[torch.Tensor]:
    """What a decode, a verify and a prefill give, and the memory of the cache in the order of slots."""
    torch.manual_seed(dim + page_size)
    pool = quire.PagePool(pages=99, page_size=page_size)
    sequences = [pool.sequence() for _ in range(3)]
    pool.free(*[_taken(pool) for _ in range(3)])
    scales = {"scales": "token"} if FORMATS[format].scaled and format.startswith("int") else {}
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=dim, layout=layout, format=format, **scales)
    results = []
    for new in (150, *NEW):
        batch = pool.step({s: new - i if new > 5 else new for i, s in enumerate(sequences)})
        tokens = int(batch.q_starts[-1])
        q, k, v = torch.randn(tokens, 10, dim).to(q_type).split((6, 2, 2), dim=1)
        quire.write(k, v, cache, batch)
        if new != 150:
            results.append(quire.attend(q, cache, batch, quire.Options(window=100)))
    slots = batch.page_table.long()[0, :8]
    results += [view[slots].reshape(8, 2, page_size, -1).contiguous() for view in (cache.k_view, cache.v_view)]
    return results


def _taken(pool: quire.PagePool) -> object:
    """A sequence that holds a page, so that the pages of others are no longer in order once it is freed."""
    sequence = pool.sequence()
    pool.step({sequence: 1})
    return sequence


@pytest.mark.parametrize("dim, page_size", SIZES)
@pytest.mark.parametrize("format", ["fp32", "bf16", "e4m3fn"])
@pytest.mark.parametrize("layout", ["vllm_x", "aiter"])
def test_results_are_those_of_nhd(layout: str, format: str, dim: int, page_size: int) -> None:
    if layout == "aiter" and page_size % (16 // FORMATS[format].itemsize):
        page_size *= 16
    for level in levels():
        with library.forced(level):
            found, plain = (built(name, format, dim, page_size, torch.float32) for name in (layout, "nhd"))
        # Gathered rows are converted before they are multiplied, so that sums over keys and elements have another order:
        # one rounding for each of them, of numbers below 5.
        most = 0.0 if format == "fp32" else 2.0**-23 * (240 + 128) * 5
        for a, b in zip(found[:-2], plain[:-2], strict=True):
            assert (a - b).abs().max() <= most, level
        for a, b in zip(found[-2:], plain[-2:], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), level


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("layout", ["vllm_x", "aiter"])
def test_writes_store_the_codes_of_nhd(layout: str, format: str) -> None:
    for level in levels():
        with library.forced(level):
            mine, plain = (built(name, format, 64, 32, torch.bfloat16)[-2:] for name in (layout, "nhd"))
        for a, b in zip(mine, plain, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), level


def test_slots_that_are_not_required_are_not_read() -> None:
    """NaN in the other slots of the pages: a block of slots is read only if all of them are required."""
    pool = quire.PagePool(pages=16, page_size=16)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=32, layout="vllm_x", format="fp32")
    sequence = pool.sequence()
    k, v = torch.randn(2, 61, 1, 32)
    quire.write(k, v, cache, pool.step({sequence: 61}))
    batch = pool.step({sequence: 1})
    quire.write(k[:1], v[:1], cache, batch)
    last = int(batch.page_table[0, 3])
    cache.k_view[last, :, :, 14:] = cache.v_view[last, :, :, 14:] = float("nan")
    q = torch.randn(1, 4, 32)
    for window in (None, 59, 21):
        out = quire.attend(q, cache, batch, quire.Options(window=window))
        assert out.isfinite().all()
