"""Cache writes in C++: quantise and store each token in its slot, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.native.call import ABSENT, WRITE, array, batch_of, index, rope_of, written_cache_of
from quire.kernels.native.library import library
from quire.platform import Platform
from quire.problem import Problem


def launch(k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None) -> None:
    """Stores k and v `[tokens, kv_heads, dim]` at `slots` (by default the batch's, negative to skip), every head of them.
    A slot outside of the cache is skipped too."""
    library().write(packed(k, v, cache, batch, slots))


def packed(k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None) -> bytes:
    """A write as `Write` of `call.h`."""
    slots = batch.given_slots if slots is None else slots
    own = WRITE.pack(
        *array(k),
        *array(v),
        *batch_of(batch),
        *(ABSENT if slots is None else index(slots)),
        k.shape[0],
        torch.get_num_threads(),
        library().level,
        cache.v_in_k is not None and cache.scale_kind == "token",
    )
    return own + written_cache_of(cache)


def launcher(problem: Problem, platform: Platform) -> Callable[[Any], None]:
    """The function that launches calls of a problem."""

    def launch_call(call: Any) -> None:
        if call.rope is None:
            launch(call.k, call.v, call.cache, call.batch, call.slots)
        else:
            library().rope_write(rope_of(call) + packed(call.k, call.v, call.cache, call.batch, call.slots))

    return launch_call
