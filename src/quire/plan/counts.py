"""What one layer reads and computes for a batch: exact counts of visible keys, (query, key) pairs, bytes and FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.cache.format import FORMATS

Lengths = tuple[tuple[int, int], ...]
"""(new tokens, context) of each sequence; the context does not include the new tokens."""
_Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerShape:
    """The attention of one layer on one GPU: the heads that this GPU has."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    q_format: str = "bf16"
    """Of queries; outputs have it, too, or are bf16 if it has 8 bits."""
    kv_format: str = "bf16"
    window: int | None = None
    """Keys that a query sees, its own included; None for all."""
    features: tuple[str, ...] = ()
    """Features of the attention, as `quire.Options` names them."""
    scales: str = "tensor"
    """The granularity of the scales of a quantised cache; "token" adds 4 bytes for each token, head, and K or V."""

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def key_bytes(self) -> int:
        """Bytes of one token in the cache of this layer: K and V of every head."""
        return 2 * self.kv_heads * (FORMATS[self.kv_format].bytes_of(self.head_dim) + 4 * (self.scales == "token"))

    @property
    def token_bytes(self) -> int:
        """Bytes of the queries and outputs of one token."""
        q = FORMATS[self.q_format].itemsize
        return self.q_heads * self.head_dim * (q + max(q, 2))

    @property
    def pair_flops(self) -> int:
        """Multiplications and additions for one (query, key) pair of every head: the two products."""
        return 4 * self.q_heads * self.head_dim


class PageShard(NamedTuple):
    """The pages of a sequence that one of several context-parallel ranks has: page `i` belongs to rank `i % ranks`."""

    rank: int = 0
    ranks: int = 1


WHOLE = PageShard()
"""All pages."""


class Counts(NamedTuple):
    """What one GPU reads, writes and computes in one layer."""

    tokens: int
    """New tokens."""
    keys: int
    """Keys that are read, summed over sequences."""
    pairs: int
    """(query, key) pairs of one head, summed over sequences."""
    bytes: int
    flops: int


def count(layer: LayerShape, sequences: Iterable[tuple[int, int]], shard: PageShard = WHOLE) -> Counts:
    """The counts of a batch. Each byte is counted once: keys and values that a query sees, queries, outputs."""
    tokens = keys = pairs = 0
    for (new, context), times in Counter(sequences).items():
        tokens += times * new
        keys += times * visible_keys(new, context, layer, shard)
        pairs += times * visible_pairs(new, context, layer, shard)
    return Counts(tokens, keys, pairs, keys * layer.key_bytes + tokens * layer.token_bytes, pairs * layer.pair_flops)


def visible_keys(new: int, context: int, layer: LayerShape, shard: PageShard = WHOLE) -> int:
    """Keys of a sequence that at least one of its queries sees and that this rank has."""
    if not new:
        return 0
    first = 0 if layer.window is None else max(0, context + 1 - layer.window)
    return int(np.diff(_clipped(_edges(new + context, layer.page_size, shard), first, new + context)).sum())


def visible_pairs(new: int, context: int, layer: LayerShape, shard: PageShard = WHOLE) -> int:
    """(query, key) pairs of a sequence: a query at position p sees p + 1 keys, or as many as the window has."""
    edges = _edges(new + context, layer.page_size, shard)
    below = _pairs_below(edges, new, context, 1)
    if layer.window is not None:
        below = below - _pairs_below(edges, new, context, 1 - layer.window)
    return int(np.diff(below).sum())


def _edges(total: int, page_size: int, shard: PageShard) -> _Whole:
    """The first key of each page of the shard and the key after its last, [pages, 2]."""
    if shard.ranks == 1:
        return np.array([[0, total]], dtype=np.int64)
    first = np.arange(shard.rank * page_size, total, shard.ranks * page_size, dtype=np.int64)
    return np.stack((first, np.minimum(first + page_size, total)), 1)


def _clipped(edges: _Whole, low: int, high: int) -> _Whole:
    return np.clip(edges, low, high)


def _pairs_below(edge: _Whole, new: int, context: int, offset: int) -> _Whole:
    """For each edge x: the sum over query positions p of min(x, max(0, p + offset))."""
    first, last = context + offset, context + new - 1 + offset  # the range of p + offset, which grows by 1
    # Values below 0 count 0, those from x on count x, those between count themselves.
    low, high = np.maximum(first, 1), np.minimum(last, edge)
    between = np.where(high >= low, (low + high) * (high - low + 1) // 2, 0)
    above = np.clip(last - np.maximum(edge, first - 1), 0, None)
    return between + above * edge
