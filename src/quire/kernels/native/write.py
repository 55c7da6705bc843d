"""Cache writes in C++: quantise, and store each token in its slot, whatever the layout."""

from __future__ import annotations

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.native.call import Index, Write, array, batch_of, cache_of, index
from quire.kernels.native.library import library


def launch(k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None) -> None:
    """Stores k and v `[tokens, kv_heads, dim]` at `slots` (by default the batch's, negative to skip), every head of them."""
    native = library()
    slots = batch.given_slots if slots is None else slots
    native.write(
        Write(
            k=array(k),
            v=array(v),
            cache=cache_of(cache),
            batch=batch_of(batch),
            slots=Index() if slots is None else index(slots),
            tokens=k.shape[0],
            threads=torch.get_num_threads(),
            level=native.level,
        )
    )
