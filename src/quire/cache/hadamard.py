"""The Hadamard transform of keys before they are quantised (`KVCache.hadamard`). Queries are transformed alike: the transform is
orthogonal, so no score changes. A large dim is spread over all dims of a head and does not set the scale of the others."""

from __future__ import annotations

from typing import Any

import torch

from quire.cache.format import Format
from quire.errors import ArgumentError, describe


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The last axis, whose length n is a power of two, times the Hadamard matrix of ±1 / sqrt(n); computed in fp32. It is its own
    inverse. The bits of a row do not depend on other rows, as those of a matrix product would."""
    n, step = x.shape[-1], 1
    y = x.float().movedim(-1, 0).reshape(n, -1)  # sums of long rows are faster than those of single elements
    while step < n:
        a, b = y.unflatten(0, (-1, 2, step)).unbind(1)
        y, step = torch.stack((a + b, a - b), 1).flatten(0, 2), 2 * step
    return (y * n**-0.5).to(x.dtype).view(n, *x.shape[:-1]).movedim(0, -1).contiguous()


def transformed(name: str, x: Any, cache: Any) -> Any:
    """Queries or keys of a call, transformed if the keys of its cache are. What is no such tensor is left to the rules."""
    if not getattr(cache, "hadamard", False) or not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        return x
    if x.dim() != 3 or x.shape[2] != cache.head_dim:
        return x
    if x.dtype.itemsize == 1:
        raise ArgumentError(name, describe(x), "fp32, fp16 or bf16 with a hadamard cache: fp8 would be rounded again")
    return hadamard(x)


def refuse_rope(rope: object, cache: Any) -> None:
    """Raises if a write over such a cache would rotate: the transform comes after that."""
    if rope is not None and getattr(cache, "hadamard", False):
        raise ArgumentError("rope", describe(rope), "None with a hadamard cache: rotate q and k before, with rope.rotate")


def checked_hadamard(given: object, head_dim: int, format: Format, v_in_k: int | None) -> bool:
    """Whether the keys of a cache are transformed. Raises ArgumentError where they cannot be."""
    if not isinstance(given, bool):
        raise ArgumentError("hadamard", describe(given), "True or False")
    if not given:
        return False
    if v_in_k is not None:
        raise ArgumentError("hadamard", True, "False with v_in_k: V would be transformed too")
    if head_dim & (head_dim - 1):
        raise ArgumentError("hadamard", f"True with head_dim = {head_dim}", "a head_dim that is a power of two")
    if not format.quantised:
        raise ArgumentError("hadamard", f"True with K in {format}", "a quantised format of K")
    return True
