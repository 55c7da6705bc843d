"""Which sequences cannot be computed: a length is invalid, or a required page does not exist. Their output is NaN."""

from __future__ import annotations

import torch

from quire.cache.kv_cache import KVCache
from quire.cache.shard import Shard, keys_of
from quire.kernels.torch.features import SequenceRows, seen_keys
from quire.options import Options


def invalid_sequences(
    cache: KVCache, page_table: torch.Tensor, options: Options, sequences: list[SequenceRows], context_from: int
) -> list[bool]:
    """One flag per sequence. New tokens of sequences with at least `context_from` of them are not in the cache. With a tree mask or
    spans only lengths are checked here: pages are checked key by key when they are read."""
    size, width = cache.page_size, page_table.shape[1]
    capacity = width * size
    left, _ = options.sides
    invalid, firsts, ends = [], [], []
    by_key = options.mask is not None
    for start, q_len, kv_len, _, shard, spans in sequences:
        context = kv_len - q_len
        end = max(0, context) if q_len >= context_from else kv_len
        first = 0 if left is None else max(0, context - left)
        first, end = keys_of(shard, first), keys_of(shard, end)
        if q_len == 0 or kv_len < 0:
            invalid.append(q_len > 0)
            first = end = 0
        elif options.mask is not None:
            broken = _tree_is_invalid(options, start, start + q_len, context, capacity, shard)
            invalid.append(broken or (cache.pages == 0 and end > 0))
            first = end = 0
        elif spans is not None:
            invalid.append(cache.pages == 0 and seen_keys(spans)[0] < min(end, seen_keys(spans)[1]))
            first, end, by_key = 0, 0, True
        else:
            invalid.append(first < end and end > capacity)
        firsts.append(min(first, capacity))
        ends.append(min(end, capacity))
    if not invalid or not width or by_key:
        return invalid
    device = page_table.device
    column = torch.arange(width, device=device) * size
    low, high = (torch.tensor(bounds, device=device)[:, None] for bounds in (firsts, ends))
    needed = (low < high) & (column < high) & (column + size > low)
    bad = needed & ((page_table < 0) | (page_table >= cache.pages))
    return [a or b for a, b in zip(invalid, bad.any(1).tolist())]


def _tree_is_invalid(options: Options, start: int, stop: int, context: int, capacity: int, shard: Shard | None) -> bool:
    """Whether a mask is too narrow for its tokens, or one of them sees a key of the context that the table has no column for."""
    assert options.mask is not None
    if stop - start > options.mask.shape[1]:
        return True
    if keys_of(shard, context) <= capacity:
        return False
    left, right = options.sides
    if options.positions is None:
        return True
    for at in options.positions[start:stop].tolist():
        low = capacity if left is None else max(capacity, keys_of(shard, at - left))
        high = keys_of(shard, context if right is None else min(context, at + right + 1))
        if low < high:
            return True
    return False
