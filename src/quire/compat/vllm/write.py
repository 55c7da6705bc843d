"""Cache writes: new keys and values into the slots of vLLM's slot_mapping."""

from __future__ import annotations

import torch

from quire.batch import INDEX_TYPES
from quire.cache.kv_cache import KVCache, Scale
from quire.compat.vllm.caches import token_major, x_packed
from quire.compat.vllm.translation import operator
from quire.contract.call import Call
from quire.contract.check import enforce, is_watched
from quire.errors import ArgumentError, describe
from quire.launch import launcher_for
from quire.slot_batch import slots_batch


@operator()
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Writes key and value [tokens, kv_heads, head_size] to the x-packed caches. Tokens with a negative slot, and those beyond
    `slot_mapping`, are skipped."""
    store(key, value, x_packed(kv_cache_dtype, key_cache, value_cache, k_scale, v_scale), slot_mapping)


@operator()
def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """The same for caches [blocks, block_size, kv_heads, head_size] of any strides. The scales may be one for each kv head."""
    store(key, value, token_major(kv_cache_dtype, key_cache, value_cache, k_scale, v_scale), slot_mapping)


def store(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Every negative slot skips its token; in `quire.write` only -1 does."""
    if not isinstance(slot_mapping, torch.Tensor) or slot_mapping.dim() != 1 or slot_mapping.dtype not in INDEX_TYPES:
        raise ArgumentError("slots", describe(slot_mapping), "a tensor [tokens] of int32 or int64")
    for name, tensor in (("k", key), ("v", value)):
        if tensor.dim() != 3:
            raise ArgumentError(name, describe(tensor), "a tensor [tokens, kv_heads, head_size]")
    tokens = slot_mapping.shape[0]
    key, value = key[:tokens], value[:tokens]
    batch = slots_batch(tokens, slot_mapping)
    checked_slots = slot_mapping.clamp(min=-1) if key.device.type == "cpu" or is_watched() else slot_mapping
    enforce("write", Call(cache, batch, k=key, v=value, slots=checked_slots), "auto")
    call = Call(cache, batch, k=key, v=value, slots=slot_mapping)
    launcher_for("write", call)(call)
