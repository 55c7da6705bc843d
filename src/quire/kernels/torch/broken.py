"""Which sequences cannot be computed: a length is invalid, or a required page does not exist. Their output is NaN."""

from __future__ import annotations

from itertools import pairwise

import torch

from quire.cache.kv_cache import KVCache
from quire.options import Options


def broken_sequences(
    cache: KVCache, page_table: torch.Tensor, options: Options, starts: list[int], kv_lens: list[int], context_from: int
) -> list[bool]:
    """One flag per sequence. New tokens of sequences with at least `context_from` of them are not in the cache. With a tree mask
    only lengths are checked here: its pages are checked key by key when they are read."""
    size, width = cache.page_size, page_table.shape[1]
    room = width * size
    left, _ = options.sides
    broken, firsts, ends = [], [], []
    for (start, stop), kv_len in zip(pairwise(starts), kv_lens):
        q_len = stop - start
        context = kv_len - q_len
        end = max(0, context) if q_len >= context_from else kv_len
        first = 0 if left is None else max(0, context - left)
        if q_len == 0 or kv_len < 0:
            broken.append(q_len > 0)
            first = end = 0
        elif options.mask is not None:
            broken.append(_tree_is_broken(options, start, stop, context, room) or (cache.pages == 0 and end > 0))
            first = end = 0
        else:
            broken.append(first < end and end > room)
        firsts.append(min(first, room))
        ends.append(min(end, room))
    if not broken or not width or options.mask is not None:
        return broken
    device = page_table.device
    column = torch.arange(width, device=device) * size
    low, high = (torch.tensor(bounds, device=device)[:, None] for bounds in (firsts, ends))
    needed = (low < high) & (column < high) & (column + size > low)
    bad = needed & ((page_table < 0) | (page_table >= cache.pages))
    return [a or b for a, b in zip(broken, bad.any(1).tolist())]


def _tree_is_broken(options: Options, start: int, stop: int, context: int, room: int) -> bool:
    """Whether a mask is too narrow for its tokens, or one of them sees a key of the context that the table has no cell for."""
    assert options.mask is not None
    if stop - start > options.mask.shape[1]:
        return True
    if context <= room:
        return False
    left, right = options.sides
    if options.positions is None:
        return True
    for at in options.positions[start:stop].tolist():
        low = room if left is None else max(room, at - left)
        high = context if right is None else min(context, at + right + 1)
        if low < high:
            return True
    return False
