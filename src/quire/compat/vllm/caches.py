"""vLLM's cache tensors as a KVCache over the same memory: the meaning of kv_cache_dtype, and the scales."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch

from quire.cache.format import FORMATS, Format, format_of
from quire.cache.kv_cache import KVCache, Scale
from quire.cache.layout import layout_named
from quire.errors import ArgumentError, describe
from quire.platform import Platform

PLAIN = {"auto": None, "half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
"""Values of kv_cache_dtype for a cache that is not quantised."""

FP8 = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""Values of kv_cache_dtype for a quantised cache, which may be stored as torch.uint8."""

E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

MAX_VALIDATED = 4096
"""The number of validated combinations of shapes, strides and types that are cached."""

Found = torch.Tensor | None

_validated: set[Any] = set()


@lru_cache(maxsize=256)
def format_named(kv_cache_dtype: str, dtype: torch.dtype, device: torch.device) -> Format:
    """The format of a kv_cache_dtype for a storage type."""
    if kv_cache_dtype in FP8:
        kind = FP8[kv_cache_dtype]
        if kind == "e4m3" and (dtype is torch.uint8 or dtype in E4M3):
            return platform_fp8(device) if dtype is torch.uint8 else format_of(dtype)
        # vLLM views any fp8 cache as its platform's e4m3; with this string the bytes are e5m2.
        if kind == "e5m2" and dtype in (torch.uint8, torch.float8_e5m2, *E4M3):
            return FORMATS["e5m2"]
        raise ArgumentError("kv_cache_dtype", f"{kv_cache_dtype!r} over {dtype} storage", f"torch.uint8 or an {kind} type for it")
    if kv_cache_dtype not in PLAIN:
        raise ArgumentError("kv_cache_dtype", repr(kv_cache_dtype), ", ".join((*PLAIN, *FP8)))
    if dtype is torch.uint8:
        raise ArgumentError("kv_cache_dtype", f"{kv_cache_dtype!r} over bytes", f"one that names their format: {', '.join(FP8)}")
    found, named = format_of(dtype), PLAIN[kv_cache_dtype]
    if named not in (None, found.name):
        raise ArgumentError("kv_cache_dtype", f"{kv_cache_dtype!r} over {dtype} storage", f"{FORMATS[named].dtype} storage")
    return found


def platform_fp8(device: torch.device) -> Format:
    """The meaning of "fp8" on a device: e4m3fnuz if the hardware has it, e4m3fn otherwise."""
    return FORMATS[Platform.detect(device).fp8 or "e4m3fn"]


def x_packed(kv_cache_dtype: str, k: torch.Tensor, v: torch.Tensor, k_scale: Scale, v_scale: Scale) -> KVCache:
    """key_cache [blocks, kv_heads, head_size/x, block_size, x] and value_cache [blocks, kv_heads, head_size, block_size]."""
    _tensors(k, v)
    return wrap("vllm_x", k, v, format_named(kv_cache_dtype, k.dtype, k.device), k_scale, v_scale)


def token_major(kv_cache_dtype: str, k: torch.Tensor, v: torch.Tensor, k_scale: Scale, v_scale: Scale) -> KVCache:
    """Both caches [blocks, block_size, kv_heads, head_size], with any strides."""
    _tensors(k, v)
    return wrap("nhd", k, v, format_named(kv_cache_dtype, k.dtype, k.device), k_scale, v_scale)


def _tensors(k: torch.Tensor, v: torch.Tensor) -> None:
    for name, given in (("k_pages", k), ("v_pages", v)):
        if not isinstance(given, torch.Tensor):
            raise ArgumentError(name, describe(given), "a tensor")


def wrap(layout: str, k: torch.Tensor, v: torch.Tensor, format: Format, k_scale: Scale, v_scale: Scale) -> KVCache:
    """A cache over these tensors. It is validated once for each combination of shapes, strides and types, because engines call this
    for every layer of every step."""
    if k.dtype is not format.dtype and format.itemsize == 1:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    k_scale, v_scale = (_flat(k_scale), _flat(v_scale)) if format.quantised else (None, None)
    key = (layout, format.name, _distance(k, v), _distance(k_scale, v_scale), facts(k, v, k_scale, v_scale))
    if key in _validated:
        return KVCache(k, v, layout_named(layout), format, cast(Found, k_scale), cast(Found, v_scale), None, False)
    cache = KVCache.wrap(k, v, layout=layout, format=format.name, k_scale=k_scale, v_scale=v_scale)
    if cache.k_scale is k_scale and cache.v_scale is v_scale:  # otherwise they were numbers, which wrap makes tensors of
        if len(_validated) >= MAX_VALIDATED:
            _validated.clear()
        _validated.add(key)
    return cache


def _flat(scale: Scale) -> Scale:
    """A scale tensor of one element without axes; any other as it is."""
    return scale.reshape(()) if isinstance(scale, torch.Tensor) and scale.dim() and scale.numel() == 1 else scale


def _distance(a: Scale, b: Scale) -> int:
    """The distance of two tensors in memory; with their strides it determines whether they overlap."""
    return b.data_ptr() - a.data_ptr() if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() > 1 else 0


def number(name: str, value: Scale) -> Scale:
    """A scalar argument: a number, a tensor of one element, or an expanded tensor of one element."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() and not any(value.stride()):
        return value[(0,) * value.dim()]
    raise ArgumentError(name, describe(value), "one number, or a tensor of one element")


def facts(*tensors: Any) -> tuple[Any, ...]:
    """Shapes, strides, types and devices of tensors as a hashable value; other values unchanged."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t for t in tensors)
