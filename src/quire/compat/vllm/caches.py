"""vLLM's cache tensors as a KVCache over the same memory: what a kv_cache_dtype stands for, and which numbers scale it."""

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
"""Strings for a cache that is stored as it is."""

FP8 = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""Strings for a quantised cache, whose storage may be bytes."""

E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

MOST = 4096
"""How many kinds of call are remembered as sound. Facts are, never tensors."""

Found = torch.Tensor | None

_sound: set[Any] = set()


@lru_cache(maxsize=256)
def format_named(kv_cache_dtype: str, dtype: torch.dtype, device: torch.device) -> Format:
    """The format that a string means for storage of a certain type."""
    if kv_cache_dtype in FP8:
        kind = FP8[kv_cache_dtype]
        if kind == "e4m3" and (dtype is torch.uint8 or dtype in E4M3):
            return platform_fp8(device) if dtype is torch.uint8 else format_of(dtype)
        # vLLM hands over any fp8 cache as its platform's e4m3: under this string those are bytes of another format.
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
    """What fp8 alone means on a device: e4m3fnuz where the hardware has that flavour, e4m3fn elsewhere."""
    return FORMATS[Platform.detect(device).fp8 or "e4m3fn"]


def x_packed(kv_cache_dtype: str, k: torch.Tensor, v: torch.Tensor, k_scale: Scale, v_scale: Scale) -> KVCache:
    """key_cache [blocks, kv_heads, head_size/x, block_size, x] and value_cache [blocks, kv_heads, head_size, block_size]."""
    _tensors(k, v)
    return wrap("vllm_x", k, v, format_named(kv_cache_dtype, k.dtype, k.device), k_scale, v_scale)


def token_major(kv_cache_dtype: str, k: torch.Tensor, v: torch.Tensor, k_scale: Scale, v_scale: Scale) -> KVCache:
    """Both caches [blocks, block_size, kv_heads, head_size]; views in which another axis is the outer one will do."""
    _tensors(k, v)
    return wrap("nhd", k, v, format_named(kv_cache_dtype, k.dtype, k.device), k_scale, v_scale)


def _tensors(k: torch.Tensor, v: torch.Tensor) -> None:
    for name, given in (("k_pages", k), ("v_pages", v)):
        if not isinstance(given, torch.Tensor):
            raise ArgumentError(name, describe(given), "a tensor")


def wrap(layout: str, k: torch.Tensor, v: torch.Tensor, format: Format, k_scale: Scale, v_scale: Scale) -> KVCache:
    """A cache over these tensors. Whether they make one is found out once for tensors of a kind: engines call this for every
    layer of every step."""
    if k.dtype is not format.dtype and format.itemsize == 1:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    k_scale, v_scale = (_flat(k_scale), _flat(v_scale)) if format.quantised else (None, None)
    key = (layout, format.name, _apart(k, v), _apart(k_scale, v_scale), facts(k, v, k_scale, v_scale))
    if key in _sound:
        return KVCache(k, v, layout_named(layout), format, cast(Found, k_scale), cast(Found, v_scale), None, False)
    cache = KVCache.wrap(k, v, layout=layout, format=format.name, k_scale=k_scale, v_scale=v_scale)
    if cache.k_scale is k_scale and cache.v_scale is v_scale:  # otherwise they were numbers, which wrap makes tensors of
        if len(_sound) >= MOST:
            _sound.clear()
        _sound.add(key)
    return cache


def _flat(scale: Scale) -> Scale:
    """A scale tensor of one element without axes; any other as it is."""
    return scale.reshape(()) if isinstance(scale, torch.Tensor) and scale.dim() and scale.numel() == 1 else scale


def _apart(a: Scale, b: Scale) -> int:
    """How far apart two tensors of many elements lie: with their strides it says whether they share memory."""
    return b.data_ptr() - a.data_ptr() if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() > 1 else 0


def number(name: str, value: Scale) -> Scale:
    """What a call takes one number from: a number, a tensor of one element, or one element seen many times (`expand`)."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() and not any(value.stride()):
        return value[(0,) * value.dim()]
    raise ArgumentError(name, describe(value), "one number, or a tensor of one element")


def facts(*tensors: Any) -> tuple[Any, ...]:
    """What shapes, types and devices say, hashable. Other values are facts of their own."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t for t in tensors)
