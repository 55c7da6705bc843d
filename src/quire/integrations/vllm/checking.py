"""The checked mode of the plugin (`QUIRE_VLLM_CHECKED`): every call runs within `quire.checked()`, and every cache keeps a ledger
of what was written to it, at which position and with which scales."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.forward_context import get_forward_context

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.ledger import Ledger
from quire.integrations.vllm.metadata import QuireMetadata

_ledgers: WeakValueDictionary[tuple[Any, ...], Ledger] = WeakValueDictionary()
"""By memory: layers that share a cache share its ledger."""


def share_ledger(cache: KVCache, pages: torch.Tensor) -> None:
    """Gives a cache the ledger of its memory, if another layer uses the same memory."""
    key = (pages.device, pages.data_ptr(), tuple(pages.shape), pages.stride())
    if cache.ledger is not None:
        cache.ledger = _ledgers.setdefault(key, cache.ledger)


def batch_of_write(layer: Any) -> Batch | None:
    """The batch of the step that vLLM is running, from which a ledger knows the position of each token; None if there is none."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        metadata = metadata[0]
    found = metadata.get(layer.layer_name) if isinstance(metadata, dict) else metadata
    return found.batch if isinstance(found, QuireMetadata) else None


def is_dummy(metadata: QuireMetadata) -> bool:
    """Whether a step belongs to no request: vLLM then skips every write, and what is read does not matter."""
    return not bool((metadata.slot_mapping >= 0).any())


def without_ledger(cache: KVCache) -> KVCache:
    """The same cache, not audited."""
    other = copy.copy(cache)
    other.ledger = None
    return other
