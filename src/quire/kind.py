"""Calls of a kind: all that shapes, strides, types and options say, and nothing that tensors hold or where they lie.

What the static rules and the dispatcher found for one call holds for every call of its kind. A kind is compared by identity: equal
facts are the same object.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.options import Options
from quire.problem import power_of_two

MOST = 4096
"""How many sets of facts are remembered. Facts are, never tensors."""

_known: dict[Any, object] = {}


class Kind:
    """A set of facts, by identity."""

    __slots__ = ()


def _same(facts: Any) -> object:
    found = _known.get(facts)
    if found is None:
        if len(_known) >= MOST:
            _known.clear()
        found = _known[facts] = Kind()
    return found


def fact(value: Any) -> Any:
    """A tensor without its memory; anything else as it is."""
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def facts(values: tuple[Any, ...] | None) -> Any:
    """The facts of several."""
    return None if values is None else tuple(map(fact, values))


def of_cache(cache: KVCache) -> object:
    """The kind of a cache, worked out once for its tensors."""
    tensors, kind = cache.kind
    if (
        tensors is None
        or tensors[0] is not cache.k
        or tensors[1] is not cache.v
        or tensors[2] is not cache.k_scale
        or tensors[3] is not cache.v_scale
    ):
        tensors = (cache.k, cache.v, cache.k_scale, cache.v_scale)
        kind = _same((cache.layout.name, cache.format.name, cache.ledger is not None, *map(fact, tensors)))
        cache.kind = tensors, kind
    return kind


def of_batch(batch: Batch) -> object:
    """The kind of a batch, worked out once: its tensors stay, whatever is written into them."""
    if batch.kind is None:
        hints = (None if hint is None else power_of_two(hint) for hint in (batch.max_q_len, batch.max_kv_len))
        batch.kind = _same((*hints, *map(fact, (batch.page_table, batch.kv_lens, batch.q_starts))))
    return batch.kind


def of_options(options: Options) -> object:
    """The kind of options, worked out once: they are frozen."""
    kind = options.__dict__.get("_kind")
    if kind is None:
        kind = _same(tuple(fact(getattr(options, name)) for name in Options.__dataclass_fields__))
        options.__dict__["_kind"] = kind
    return kind
