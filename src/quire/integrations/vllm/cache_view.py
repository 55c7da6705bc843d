"""vLLM's cache of a layer as a `quire.KVCache`: a view, whatever order the memory has.

vLLM gives a layer one tensor `[blocks, kv_heads, block_size, content]` with strides of any of its layouts. The content of a slot is
K then V; with scales per token and head it is K, K's scale, V, V's scale, each scale 4 bytes. On a CPU, where the bytes of a block
and head are contiguous, they are used in another order: `halves`.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache
from quire.integrations.engines import EngineError

PLAIN = ("auto", "float16", "bfloat16")
PER_TENSOR = ("fp8", "fp8_e4m3", "fp8_e5m2")
PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head")
CACHE_TYPES = (*PLAIN, *PER_TENSOR, *PER_TOKEN_HEAD)
"""The values of `--kv-cache-dtype` that Quire has a format for."""

SCALE_BYTES = 4


def format_name(cache_type: str, fp8: torch.dtype) -> str | None:
    """The format of a quantised cache; None if the type of the tensor is the format. `fp8` is the platform's own fp8 type."""
    if cache_type in PLAIN:
        return None
    if cache_type == "int8_per_token_head":
        return "int8"
    dtype = torch.float8_e5m2 if cache_type == "fp8_e5m2" else fp8
    return next(format.name for format in FORMATS.values() if format.dtype is dtype)


def layer_scale(name: str, scale: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """A layer's scale as fp32 `[]` or `[kv_heads]`, sharing the layer's memory: checkpoints are loaded into it."""
    if scale.numel() not in (1, kv_heads) or scale.dtype is not torch.float32:
        given = f"{scale.dtype} {list(scale.shape)}"
        raise EngineError(f"{name}: got {given}; allowed is float32 with 1 or {kv_heads} (kv_heads) elements")
    return scale.view(()) if scale.numel() == 1 else scale.view(kv_heads)


def cache_view(
    pages: torch.Tensor,
    cache_type: str,
    head_dim: int,
    scales: tuple[torch.Tensor, torch.Tensor],
    fp8: torch.dtype,
    ledger: bool = False,
) -> KVCache:
    """vLLM's tensor of a layer as a cache. Nothing is copied.

    Args:
        pages: `[blocks, kv_heads, block_size, content]`, with any strides.
        cache_type: The layer's `kv_cache_dtype`.
        head_dim: The size of a head of K.
        scales: The layer's scales of K and V; not used by caches that are not quantised or have scales per token and head.
        fp8: The platform's fp8 type.
        ledger: Whether the cache keeps a ledger.
    """
    format = format_name(cache_type, fp8)
    if cache_type in PER_TOKEN_HEAD:
        return _with_inline_scales(pages, format, head_dim, ledger)
    k_scale, v_scale = None, None
    if format is not None:
        k_scale = layer_scale("k_scale", scales[0], pages.shape[1])
        v_scale = layer_scale("v_scale", scales[1], pages.shape[1])
    named: dict[str, Any] = {"format": format, "k_scale": k_scale, "v_scale": v_scale, "ledger": ledger}
    if pages.device.type == "cpu" and pages.stride()[2:] == (pages.shape[3], 1):
        return KVCache.wrap(*halves(pages, head_dim), layout="hnd", **named)
    return KVCache.wrap(pages, layout="vllm_joint", head_dim=head_dim, **named)


def halves(pages: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of each block and head as all of its keys, then all of its values, `[blocks, kv_heads, block_size, dim]`: a CPU
    reads rows that follow each other faster than every other row. vLLM's own CPU backend does the same. Nothing but attention uses
    what is inside a block: prefix caching, copies and zeroing take whole blocks. KV connectors do, and are refused on a CPU."""
    blocks, heads, slots, content = pages.shape
    v_dim, (block, head), start = content - head_dim, pages.stride()[:2], pages.storage_offset()
    k = pages.as_strided((blocks, heads, slots, head_dim), (block, head, head_dim, 1), start)
    return k, pages.as_strided((blocks, heads, slots, v_dim), (block, head, v_dim, 1), start + slots * head_dim)


def _with_inline_scales(pages: torch.Tensor, format: str | None, head_dim: int, ledger: bool) -> KVCache:
    """The view of a cache whose slots hold their own scales."""
    content = pages.shape[-1]
    v_head_dim = content - head_dim - 2 * SCALE_BYTES
    if v_head_dim < 1 or head_dim % SCALE_BYTES or v_head_dim % SCALE_BYTES:
        allowed = f"multiples of {SCALE_BYTES}: a slot holds fp32 scales between K and V"
        raise EngineError(
            f"head sizes of a cache with scales per token and head: got {head_dim} and {v_head_dim}; allowed are {allowed}"
        )
    v_at = head_dim + SCALE_BYTES

    def scale(at: int) -> torch.Tensor:
        # [blocks, heads, slots, 1] of fp32, in Quire's order [pages, slots, heads].
        return pages[..., at : at + SCALE_BYTES].view(torch.float32)[..., 0].transpose(1, 2)

    return KVCache.wrap(
        pages[..., :head_dim],
        pages[..., v_at : v_at + v_head_dim],
        layout="hnd",
        format=format,
        k_scale=scale(head_dim),
        v_scale=scale(v_at + v_head_dim),
        ledger=ledger,
    )
