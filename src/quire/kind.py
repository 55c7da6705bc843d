"""Calls of a kind: all that shapes, strides, types and options say, and nothing that tensors hold or where they lie.

What the static rules and the dispatcher found for one call holds for every call of its kind. A kind is compared by identity: equal
facts are the same object.
"""

from __future__ import annotations

from operator import is_
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
    """The kind of a cache, worked out once for its scales, and for whether it has a ledger: all else of a cache stays."""
    now = (cache.k_scale, cache.v_scale, cache.ledger)
    known, kind = cache.kind
    if known is None or not all(map(is_, known, now)):
        tensors = (cache.k, cache.v, cache.k_scale, cache.v_scale)
        kind = _same((cache.layout.name, cache.format.name, cache.ledger is not None, *map(fact, tensors)))
        cache.kind = now, kind
    return kind


def of_batch(batch: Batch) -> object:
    """The kind of a batch, worked out once for its tensors, whatever is written into them, and for its hints."""
    now = (batch.page_table, batch.kv_lens, batch.q_starts, batch.max_q_len, batch.max_kv_len)
    known, kind = batch.kind
    if known is None or not all(map(is_, known, now)):
        hints = (None if hint is None else power_of_two(hint) for hint in now[3:])
        kind = _same((*hints, *map(fact, now[:3])))
        batch.kind = now, kind
    return kind


def of_options(options: Options) -> object:
    """The kind of options, worked out once, for they are frozen; but not what their tensors are: a model that is moved or converted
    changes its parameters in place."""
    known = options.__dict__.get("_kind")
    if known is None:
        values = [getattr(options, name) for name in Options.__dataclass_fields__]
        tensors = tuple(value for value in values if isinstance(value, torch.Tensor))
        kind = _same(tuple("a tensor" if isinstance(value, torch.Tensor) else value for value in values))
        known = options.__dict__["_kind"] = kind, tensors
    kind, tensors = known
    return (kind, *map(fact, tensors)) if tensors else kind


def read_by(cache: KVCache, batch: Batch, options: Options) -> tuple[torch.Tensor | None, ...]:
    """Every tensor that an attend reads, besides its queries and new tokens."""
    of_options(options)
    scales, indices = (cache.k_scale, cache.v_scale), (batch.page_table, batch.kv_lens, batch.q_starts)
    return (cache.k, cache.v, *scales, *indices, *options.__dict__["_kind"][1])
