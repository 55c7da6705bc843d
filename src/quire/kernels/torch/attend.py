"""Attention in plain torch: what every machine has, with no compiler and no extra package.

    for each sequence, for each span of its queries, for each tile of the keys that one of them can see:
        load keys and values once, and let every strip of the span meet them:
            score, hide, weigh, fold into what earlier tiles gave

Such a meeting is a complete attention with an LSE of its own, and folding two of them is what `quire.merge` does. The query heads
of a group are rows of one matrix product. All arithmetic is fp32: torch's own 16-bit products die with an illegal instruction on
CPUs that advertise AMX without its palette, as some hypervisors do, and would round the scores besides.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.torch.exact import exact_products
from quire.kernels.torch.read import Reader
from quire.kernels.torch.sight import Sight
from quire.kernels.torch.strip import Strip
from quire.options import Options

ANY = 2**31 - 1
"""More new tokens than any sequence has."""


class Tile(NamedTuple):
    """How much is computed at a time. Tiles of keys start at multiples of `keys`."""

    strip: int
    """Query tokens of one matrix product."""
    keys: int
    span: int
    """Query tokens that share a tile of keys while it is loaded."""


def tile_for(cache: KVCache, q_heads: int, longest: int, batch_invariant: bool) -> Tile:
    """Keys such that a tile of K stays near the cores, strips of a thousand rows a group (torch's fused operator takes its large
    steps from 768 on), spans whose totals stay in megabytes.

    A batch-invariant call takes one query at a time: the shape of every product, and so its bits, then follows from the
    query's own position, however its prompt was cut."""
    if batch_invariant:
        return Tile(strip=1, keys=512, span=1)
    widest = max(cache.head_dim, cache.v_head_dim)
    # A decode's tiles serve a handful of rows: larger ones save operators. A prefill's are met by strip after strip.
    budget = 4 << 20 if longest == 1 else 2 << 20
    keys = max(64, min(1024, budget // (4 * cache.kv_heads * widest)))
    if cache.page_size <= keys:
        keys -= keys % cache.page_size
    strip = max(1, 1024 * cache.kv_heads // q_heads)
    return Tile(strip, keys, max(strip, (4 << 20) // (4 * q_heads * widest)))


@torch.no_grad()
@exact_products()
def launch(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    context_from: int = 1,
    only: tuple[int, int] = (0, ANY),
    zero_padding: bool = False,
) -> None:
    """Writes `out` and, if given, `lse` for every live row. Sequences with at least `context_from` new tokens take those from
    `new`; the others find all of theirs in the cache. Under `only=(low, high)`, those with fewer than `low` or more than `high` new
    tokens are left alone: nothing of them is read, and their output stays as it was. Rows of the LSE that belong to no sequence
    become zero, and those of the output under `zero_padding`."""
    starts, kv_lens = batch.q_starts.tolist(), batch.kv_lens.tolist()
    causal = options.causal.tolist() if isinstance(options.causal, torch.Tensor) else [options.causal] * batch.seqs
    if zero_padding:
        out[starts[-1] :] = 0
    if lse is not None:
        lse[starts[-1] :] = 0
    longest = max((stop - start for start, stop in pairwise(starts)), default=0)
    tile = tile_for(cache, q.shape[1], longest, options.batch_invariant)
    keys = Reader(cache.k, cache.layout.k, cache.format, cache.k_scale, tile.keys)
    values = Reader(cache.v, cache.layout.v, cache.format, cache.v_scale, tile.keys)
    room = torch.empty(min(tile.span, longest), *q.shape[1:], dtype=torch.float32, device=q.device)
    on_host = q.device.type == "cpu"
    for seq, ((token, stop), kv_len) in enumerate(zip(pairwise(starts), kv_lens)):
        q_len = stop - token
        if not only[0] <= q_len <= only[1]:
            continue
        context, pages, bad = kv_len - q_len, batch.page_table[seq], []
        k_new = v_new = None
        if new is not None and q_len >= context_from:
            k_new, v_new = (x[token:stop] for x in new)
        # On the host the contract was checked, and only a tree mask can leave gaps; elsewhere nobody has looked.
        table = pages
        if not on_host or options.mask is not None:
            missing = max(0, -(-kv_len // cache.page_size) - pages.shape[0])
            table = torch.nn.functional.pad(pages, (0, missing), value=-1)
            pages = table.clamp(0, cache.pages - 1)
        for begin in range(0, q_len, tile.span):
            strips = []
            for first in range(begin, min(begin + tile.span, q_len), tile.strip):
                count = min(tile.strip, q_len - first, begin + tile.span - first)
                sight = Sight(options, token, first, count, q_len, kv_len, causal[seq])
                tokens = slice(token + first, token + first + count)
                strips.append(Strip(q, tokens, sight, cache.kv_heads, options, room[first - begin : first - begin + count]))
            # A prefill's rows keep all threads busy; a decode's few are cut over the keys.
            cuts = on_host and q_len == 1 and options.mask is None and not options.batch_invariant
            parts = torch.get_num_threads() if cuts else 1
            lowest, highest = min(s.sight.low for s in strips), max(s.sight.high for s in strips)
            for at in range(lowest // tile.keys * tile.keys, highest, tile.keys):
                low, high = max(at, lowest), min(at + tile.keys, highest)
                k = keys.read(pages, low, high, k_new, context, parts, shared=len(strips) > 1)
                v = values.read(pages, low, high, v_new, context, parts, shared=len(strips) > 1)
                for strip in strips:
                    strip.meet(k, v, low, high)
                if not on_host:
                    cut = high if k_new is None else max(low, min(high, context))
                    bad.append(_needs_bad_page(table, cache, low, cut, strips))
            for strip in strips:
                strip.store(out, lse)
        if bad and bool(torch.stack(bad).any()):
            for written in (out, lse):
                if written is not None:
                    written[token:stop].copy_(torch.full((), math.nan, device="cpu"))


def _needs_bad_page(pages: torch.Tensor, cache: KVCache, low: int, high: int, strips: list[Strip]) -> torch.Tensor:
    """Whether a key of [low, high) that somebody sees lies in a page that does not exist. It was not dereferenced, and its
    sequence becomes NaN."""
    page = pages[torch.arange(low, high, device=pages.device) // cache.page_size]
    bad = (page < 0) | (page >= cache.pages)
    seen = torch.zeros_like(bad)
    for strip in strips:
        visible = strip.sight.visible(low, high, pages.device)
        seen |= True if visible is None else visible.any(0)
    return (bad & seen).any()
