"""Arguments for a cache in which V is a part of K (`KVCache.v_in_k`): new keys come without values, whole or in two parts."""

from __future__ import annotations

from typing import Any

import torch

from quire.cache.hadamard import refuse_rope, transformed
from quire.errors import ArgumentError, describe

Keys = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""New keys, whole or in two parts."""


def rows_to_write(k: Any, v: Any, cache: Any, rope: object = None) -> tuple[Any, Any]:
    """What a write stores: k and v or, if V is a part of K, the first `v_in_k` elements of k and the others, as views."""
    first = getattr(cache, "v_in_k", None)
    refuse_rope(rope, cache)
    if first is None:
        return transformed("k", k, cache), v
    _refuse_values("v", v, first)
    whole = f"[tokens, kv_heads, {cache.head_dim}]"
    if first == cache.head_dim:
        sizes = f"{whole}, a tensor: V is all of K"
    else:
        sizes = f"{whole}, or a pair of its parts: [tokens, kv_heads, {first}] and [tokens, kv_heads, {cache.head_dim - first}]"
        if isinstance(k, (tuple, list)) and len(k) == 2:
            return k[0], k[1]
    if isinstance(k, torch.Tensor) and k.dim() == 3 and k.shape[2] == cache.head_dim:
        return k[..., :first], k[..., first:]
    raise ArgumentError("k", f"{len(k)} parts" if isinstance(k, (tuple, list)) else describe(k), sizes)


def with_values(new: Any, cache: Any) -> Any:
    """New keys and values of an attend. If V is a part of K, values are not given: they are made, a view of the keys."""
    first = getattr(cache, "v_in_k", None)
    if not isinstance(new, (tuple, list)) or len(new) != 2:
        return new
    k, v = new
    if first is None:
        keys = transformed("new[0]", k, cache)
        return new if keys is k else (keys, v)
    _refuse_values("new[1]", v, first)
    if not isinstance(k, torch.Tensor) or k.dim() != 3:
        raise ArgumentError(
            "new[0]", describe(k), f"[tokens, kv_heads, {cache.head_dim}]: its first {first} elements are the values"
        )
    return k, k[..., :first]


def as_read(q: Any, new: Any, cache: Any) -> tuple[Any, Any]:
    """Queries, and new keys and values, as a kernel takes them."""
    return transformed("q", q, cache), None if new is None else with_values(new, cache)


def as_given(k: Any, v: Any, cache: Any) -> tuple[Any, Any]:
    """The inverse of `rows_to_write`."""
    if cache.v_in_k is None:
        return k, v
    return k if cache.v_in_k == cache.head_dim else (k, v), None


def _refuse_values(name: str, values: Any, first: int) -> None:
    if values is not None:
        raise ArgumentError(name, describe(values), f"None: in this cache V is the first {first} elements of K (v_in_k)")
