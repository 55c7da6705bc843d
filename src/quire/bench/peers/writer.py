"""vLLM's writer in Triton: what puts the new tokens of a stream into the pages for the peers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.cache.kv_cache import KVCache

Write = Callable[[torch.Tensor, torch.Tensor, KVCache, torch.Tensor], None]


def load() -> Write:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    def write(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> None:
        one = _one(k.device)
        triton_reshape_and_cache_flash(k, v, cache.k, cache.v, slots, "auto", one, one)

    ones: dict[torch.device, torch.Tensor] = {}

    def _one(device: torch.device) -> torch.Tensor:
        if device not in ones:
            ones[device] = torch.ones((), device=device)
        return ones[device]

    return write
