"""Memory and error of each cache format on the same data: `python tools/cache_formats.py` prints a table of docs/cache_formats.md.

The error is that of the output against float64 over keys and values that were not rounded, as a share of the output: the root mean
square over all elements. Queries and outputs are fp32, so that nothing but the cache is rounded.
"""

from __future__ import annotations

from typing import Any

import torch

import quire
from quire.cache.format import FORMATS
from quire.cache.hadamard import hadamard

HEADS, DIM, GROUP, KEYS, QUERIES = 8, 128, 4, 2048, 16

CACHES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "e4m3fn, one scale": {"format": "e4m3fn", "fit": True},
    "e4m3fn, scale per token and head": {"format": "e4m3fn", "scales": "token"},
    "int8, scale per token and head": {"format": "int8", "scales": "token"},
    "K int8, V int4, scale per token and head": {"k_format": "int8", "v_format": "int4", "scales": "token"},
    "K bf16, V int4, scale per token and head": {"v_format": "int4", "scales": "token"},
    "K int8, V int4_zp, scale per token and head": {"k_format": "int8", "v_format": "int4_zp", "scales": "token"},
    "int4, scale per token and head": {"format": "int4", "scales": "token"},
    "int4_zp, scale per token and head": {"format": "int4_zp", "scales": "token"},
    "int4, scale per token and head, hadamard": {"format": "int4", "scales": "token", "hadamard": True},
    "int4_zp, scale per token and head, hadamard": {"format": "int4_zp", "scales": "token", "hadamard": True},
    "K int4, V int8, scale per token and head": {"k_format": "int4", "v_format": "int8", "scales": "token"},
    "K int4, V int8, scale per token and head, hadamard": {
        "k_format": "int4",
        "v_format": "int8",
        "scales": "token",
        "hadamard": True,
    },
    "nvfp4, one scale": {"format": "nvfp4", "fit": True},
    "nvfp4, one scale, hadamard": {"format": "nvfp4", "fit": True, "hadamard": True},
    "K e4m3fn, V nvfp4, one scale": {"k_format": "e4m3fn", "v_format": "nvfp4", "fit": True},
}


def data(outliers: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, normal numbers. Keys of language models have a few dims that are much larger than the others: with
    `outliers`, 4 of the 128 dims are 8 times as large, and the queries' 8 times smaller."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(QUERIES, HEADS * GROUP, DIM, generator=g)
    k, v = (torch.randn(KEYS, HEADS, DIM, generator=g) for _ in "kv")
    if outliers:
        k[..., :4] *= 8
        q[..., :4] /= 8
    return q, k, v


def measure(how: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    """Bytes of the cache for one token and head of K and V, and the error."""
    pool = quire.PagePool(pages=KEYS // 16, page_size=16)
    given = {name: value for name, value in how.items() if name != "fit"}
    want, _ = quire.reference.attention(q, k, v)
    if "fit" in how:
        stored = hadamard(k) if "hadamard" in how else k
        for part, x in (("k", stored), ("v", v)):
            largest = FORMATS[how.get(f"{part}_format", how.get("format"))].largest
            given[f"{part}_scale"] = float(x.abs().max()) / largest
    cache = quire.KVCache.allocate(pool, kv_heads=HEADS, head_dim=DIM, **given)
    batch = pool.step({pool.sequence(): KEYS})
    quire.write(k, v, cache, batch)
    late = quire.Batch(batch.page_table, batch.kv_lens, torch.tensor([0, QUERIES]))
    out = quire.attend(q, cache, late)
    parts = [cache.k, cache.v, *(scale for scale in (cache.k_scale, cache.v_scale) if scale is not None and scale.dim() == 3)]
    size = sum(part.nbytes for part in parts) / (KEYS * HEADS)
    return size, float((out.double() - want).norm() / want.norm())


def main() -> None:
    plain, steep = data(outliers=False), data(outliers=True)
    print("| cache | bytes of a token and head | of bf16 | error, normal data | error, keys with large dims |")
    print("|---|---|---|---|---|")
    for name, how in CACHES.items():
        size, error = measure(how, *plain)
        _, other = measure(how, *steep)
        print(f"| {name} | {size:.0f} | {size / (4 * DIM):.0%} | {error:.2%} | {other:.2%} |")


if __name__ == "__main__":
    main()
