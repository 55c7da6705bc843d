"""Latent caches, of which V is a part of K: attention with the features against the reference, and the writer, bit for bit what the
torch writer stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import KVCache, PagePool
from quire.cache.latent import rows_to_write
from quire.kernels.torch import write as plain
from quire.kernels.triton.host.tuning import SMALLEST
from quire.slot_batch import slots_batch
from support import ds_mla
from support.launched import attend, bits, card, write
from support.scenario import LARGEST, TYPES

FORMATS = [format for format in TYPES if format != "int4_zp" and not format.startswith("nvfp4")]
LENS: dict[str, Any] = {"q_lens": [1, 20, 3, 0, 2], "kv_lens": [35, 40, 100, 7, 66], "padding": 2, "page_size": 8}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 24, "v_in_k": 16},
    "odd sizes": {"head_dim": 33, "v_in_k": 20, "layout": "hnd", "index": (torch.int64, torch.int32, torch.int32)},
    "small values": {"head_dim": 40, "v_in_k": 2},
    "all of K": {"head_dim": 24, "v_in_k": 24},
    "all of K in bytes": {"head_dim": 20, "v_in_k": 20, "format": "e4m3fn", "q_dtype": "bf16", "scales": "token", "layout": "hnd"},
    "all of new keys": {"head_dim": 33, "v_in_k": 33, "form": "context", "format": "int8", "scales": "token", "group": 3},
    "bf16": {"head_dim": 96, "v_in_k": 64, "format": "bf16", "q_dtype": "bf16", "group": 8},
    "fp8": {"head_dim": 24, "v_in_k": 16, "format": "e4m3fn", "q_dtype": "bf16", "scales": "head"},
    "fp8 select": {"head_dim": 24, "v_in_k": 16, "format": "e4m3fn", "q_dtype": "bf16", "scales": "head", "select": "positions"},
    "fp8 queries": {"head_dim": 24, "v_in_k": 16, "format": "e4m3fn", "q_dtype": "e4m3fn", "q_scale": 0.5},
    "int8 tokens": {"head_dim": 24, "v_in_k": 16, "format": "int8", "q_dtype": "bf16", "scales": "token"},
    "int4 tokens": {"head_dim": 24, "v_in_k": 16, "format": "int4", "q_dtype": "fp16", "scales": "token"},
    "context": {"head_dim": 24, "v_in_k": 16, "form": "context", "group": 3},
    "context tokens": {"head_dim": 20, "v_in_k": 12, "form": "context", "format": "int8", "scales": "token"},
    "new keys": {"head_dim": 32, "v_in_k": 16, "form": "context", "causal": False, "q_lens": [1, 70], "kv_lens": [35, 80]},
    "window": {"head_dim": 24, "v_in_k": 16, "window": 20, "alibi": True, "causal": "mixed"},
    "tree": {"head_dim": 24, "v_in_k": 16, "mask": True, "softcap": 3.0, "sinks": True},
    "spans": {"head_dim": 24, "v_in_k": 16, "spans": "images"},
    "select": {"head_dim": 24, "v_in_k": 16, "select": "positions"},
    "negative": {"head_dim": 24, "v_in_k": 16, "scale": -0.3},
    "invariant": {"head_dim": 24, "v_in_k": 16, "batch_invariant": True},
    "large group": {"head_dim": 24, "v_in_k": 16, "kv_heads": 1, "group": 128, "q_lens": [1, 5], "kv_lens": [40, 33]},
}


@pytest.mark.parametrize("kernel", ["mixed", "decode"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, kernel: str, device: str) -> None:
    attend(kernel, device, **LENS | FEATURES[name])


def test_units_that_are_split(device: str) -> None:
    """The keys of one query are divided among programs, and its heads among tiles."""
    case: dict[str, Any] = {"q_lens": [1], "kv_lens": [300], "kv_heads": 1, "group": 80, "page_size": 32}
    attend("decode", device, how={"platform": card(device, 3)}, head_dim=24, v_in_k=16, **case)


def test_the_sizes_of_deepseek(device: str) -> None:
    case: dict[str, Any] = {"q_lens": [1, 2], "kv_lens": [40, 20], "kv_heads": 1, "group": 16, "page_size": 64}
    attend("mixed", device, head_dim=576, v_in_k=512, format="bf16", q_dtype="bf16", **case)


@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("v_in_k", [576, 544, 40])
def test_parts_wider_than_512(v_in_k: int, form: str, device: str) -> None:
    case: dict[str, Any] = {"q_lens": [1, 17], "kv_lens": [40, 37], "kv_heads": 1, "group": 3, "page_size": 8, "form": form}
    attend("mixed", device, head_dim=576, v_in_k=v_in_k, format="e4m3fn", q_dtype="bf16", scales="head", **case)


DS_MLA: dict[str, dict[str, Any]] = {
    "fp32": {"q_dtype": "fp32"},
    "bf16": {"q_dtype": "bf16", "read_as": torch.bfloat16, "group": 8},
    "fp16": {"q_dtype": "fp16", "layout": "hnd"},
    "fp8 queries": {"q_dtype": "e4m3fn", "q_scale": 0.5, "read_as": torch.bfloat16},
    "context": {"q_dtype": "bf16", "read_as": torch.bfloat16, "form": "context", "window": 20},
    "select": {"q_dtype": "fp32", "select": "positions"},
    "padded": {"q_dtype": "bf16", "read_as": torch.bfloat16, "storage": "padded", "kv_heads": 1, "group": 80},
}


@pytest.mark.parametrize("kernel", ["mixed", "decode"])
@pytest.mark.parametrize("name", DS_MLA)
def test_fp8_ds_mla(name: str, kernel: str, device: str) -> None:
    """With 16-bit queries, what is read is rounded to bf16 once."""
    lens: dict[str, Any] = {"q_lens": [1, 9, 0], "kv_lens": [35, 40, 7], "padding": 2, "page_size": 8}
    attend(kernel, device, **{"head_dim": 576, "v_in_k": 512, "format": ds_mla.NAME} | lens | DS_MLA[name])


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_of_fp8_ds_mla(dtype: torch.dtype, layout: str, device: str) -> None:
    how: dict[str, Any] = {"kv_heads": 2, "head_dim": 576, "v_in_k": 512, "format": ds_mla.NAME, "layout": layout}
    caches = [KVCache.allocate(PagePool(6, 4), device=device, **how) for _ in range(2)]
    g = torch.Generator().manual_seed(7)
    k = torch.randn(7, 2, 576, generator=g) * 4.0 ** torch.randint(-6, 6, (7, 2, 1), generator=g)
    k[3], k[4, 0, 9], k[5, 1, 130] = 0.0, torch.nan, torch.inf
    whole, slots = k.to(dtype).to(device), torch.tensor([5, -1, 23, 0, 9, 10, 11], device=device)
    batch = batch_of(7, device)
    plain.launch(*rows_to_write(whole, None, caches[0]), caches[0], batch, slots)
    write(*rows_to_write(whole, None, caches[1]), caches[1], batch, slots)
    read = [cache.k_format.unpack(cache.k) for cache in caches]
    assert torch.equal(*(numbers.nan_to_num(7e30) for numbers in read))
    finite = ~read[0].isnan()[..., :512].unflatten(-1, (4, 128)).any(-1)
    scales = [cache.k[..., 512:528].contiguous().view(torch.float32)[finite] for cache in caches]
    assert torch.equal(*scales)


@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("format", FORMATS)
def test_write(format: str, scales: str, device: str) -> None:
    for dims in ((24, 16), (38, 2), (40, 34), (24, 24)):
        caches = [cache_of(device, format, scales, *dims) for _ in range(3)]
        g = torch.Generator().manual_seed(7)
        k = (torch.randn(7, 2, dims[0], generator=g) * 2).to(torch.float32 if format == "fp32" else torch.bfloat16)
        k[0, 0, : dims[1]] *= 0.01  # the largest element is in the second part, then in the first
        k[2, 1, dims[1] :] *= 0.01
        k[3], k[4, 0, -1] = 0.0, torch.nan
        slots = torch.tensor([5, -1, 23, 0, 9, 10, 11], device=device)
        whole = k.to(device)
        parts = whole[..., : dims[1]].contiguous(), whole[..., dims[1] :].contiguous()
        parts = parts if dims[1] < dims[0] else whole
        batch = batch_of(7, device)
        plain.launch(*rows_to_write(whole, None, caches[0]), caches[0], batch, slots)
        write(*rows_to_write(whole, None, caches[1]), caches[1], batch, slots)
        write(*rows_to_write(parts, None, caches[2]), caches[2], batch, slots, SMALLEST)
        for cache in caches[1:]:
            assert torch.equal(bits(cache.k_bytes), bits(caches[0].k_bytes))
            if cache.k_scale is not None:
                assert torch.equal(bits(cache.k_scale), bits(caches[0].k_scale))  # type: ignore[arg-type]


def cache_of(device: str, format: str, scales: str, head_dim: int, first: int) -> KVCache:
    """6 pages of 4, full of a pattern."""
    given: dict[str, Any] = {"dtype": TYPES[format], "format": format, "device": device}
    if format in LARGEST:
        one = 3.0 / LARGEST[format]
        per_head = one * torch.linspace(1, 1.5, 2, device=device)
        given |= {"tensor": {"k_scale": one}, "head": {"k_scale": per_head}, "token": {"scales": "token"}}[scales]
    cache = KVCache.allocate(PagePool(6, 4), kv_heads=2, head_dim=head_dim, v_in_k=first, **given)
    cache.k_bytes.view(torch.uint8).fill_(77)
    return cache


def batch_of(tokens: int, device: str) -> Any:
    return slots_batch(tokens, torch.zeros(tokens, dtype=torch.int64, device=device))
