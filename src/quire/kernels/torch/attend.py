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
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.torch.broken import broken_sequences
from quire.kernels.torch.exact import exact_products
from quire.kernels.torch.read import Reader
from quire.kernels.torch.sight import Sight
from quire.kernels.torch.strip import Strip
from quire.options import Options
from quire.platform import Platform
from quire.problem import ANY, Problem


class Tile(NamedTuple):
    """How much is computed at a time. Tiles of keys start at multiples of `keys`."""

    strip: int
    """Query tokens of one matrix product."""
    keys: int
    span: int
    """Query tokens that share a tile of keys while it is loaded."""


class Row(NamedTuple):
    """One sequence: the row of q where its new tokens start, and its lengths."""

    token: int
    q_len: int
    kv_len: int
    causal: bool


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
    # Read once, so that a concurrent change cannot cause an invalid access.
    starts, kv_lens, page_table = batch.q_starts.tolist(), batch.kv_lens.tolist(), batch.page_table.clone()
    if starts[0] != 0 or starts[-1] > q.shape[0] or any(stop < start for start, stop in pairwise(starts)):
        _make_nan(slice(0, q.shape[0]), out, lse)  # q_starts does not say which rows belong to which sequence
        return
    causal = options.causal.tolist() if isinstance(options.causal, torch.Tensor) else [options.causal] * batch.seqs
    for padded in (out if zero_padding else None, lse):
        if padded is not None:
            padded[starts[-1] :] = 0
    longest = max((stop - start for start, stop in pairwise(starts)), default=0)
    tile = tile_for(cache, q.shape[1], longest, options.batch_invariant)
    keys = Reader(cache.k, cache.layout.k, cache.format, cache.k_scale, tile.keys)
    values = Reader(cache.v, cache.layout.v, cache.format, cache.v_scale, tile.keys)
    room = torch.empty(min(tile.span, longest), *q.shape[1:], dtype=torch.float32, device=q.device)
    on_host = q.device.type == "cpu"
    broken = broken_sequences(cache, page_table, options, starts, kv_lens, ANY if new is None else context_from)
    for seq, ((token, stop), kv_len) in enumerate(zip(pairwise(starts), kv_lens)):
        q_len = stop - token
        if q_len == 0 or not only[0] <= q_len <= only[1]:
            continue
        if broken[seq]:
            _make_nan(slice(token, stop), out, lse)
            continue
        context, table, bad = kv_len - q_len, page_table[seq], []
        k_new = v_new = None
        if new is not None and q_len >= context_from:
            k_new, v_new = (x[token:stop] for x in new)
        # With a tree mask some cells may be invalid: hidden keys are read from any page, then masked.
        pages = table if options.mask is None else table.clamp(0, cache.pages - 1)
        for begin in range(0, q_len, tile.span):
            strips = _strips(q, cache, options, tile, room, Row(token, q_len, kv_len, causal[seq]), begin)
            # A prefill's rows keep all threads busy; a decode's few are cut over the keys.
            cuts = on_host and q_len == 1 and options.mask is None and not options.batch_invariant
            parts = torch.get_num_threads() if cuts else 1
            for low, high in _tiles([strip.sight for strip in strips], tile.keys):
                k = keys.read(pages, low, high, k_new, context, parts, shared=len(strips) > 1)
                v = values.read(pages, low, high, v_new, context, parts, shared=len(strips) > 1)
                for strip in strips:
                    strip.meet(k, v, low, high)
                if options.mask is not None:
                    cut = high if k_new is None else max(low, min(high, context))
                    bad.append(_needs_bad_page(table, cache, low, cut, strips))
            for strip in strips:
                strip.store(out, lse)
        if bad and bool(torch.stack(bad).any()):
            _make_nan(slice(token, stop), out, lse)


def _strips(q: torch.Tensor, cache: KVCache, options: Options, tile: Tile, room: torch.Tensor, row: Row, begin: int) -> list[Strip]:
    """The strips of the span of queries that begins at the sequence's new token `begin`."""
    strips = []
    for first in range(begin, min(begin + tile.span, row.q_len), tile.strip):
        count = min(tile.strip, row.q_len - first, begin + tile.span - first)
        sight = Sight(options, row.token, first, count, row.q_len, row.kv_len, row.causal)
        tokens = slice(row.token + first, row.token + first + count)
        strips.append(Strip(q, tokens, sight, cache.kv_heads, options, room[first - begin : first - begin + count]))
    return strips


def _tiles(sights: list[Sight], keys: int) -> Iterator[tuple[int, int]]:
    """The tiles of keys that one of them can see. Between the context that a tree's window shows and the new tokens there may be
    any number of keys that nobody sees."""
    lowest, highest = min(sight.low for sight in sights), max(sight.high for sight in sights)
    seen, context = max(sight.context_seen for sight in sights), sights[0].context
    at = lowest // keys * keys
    while at < highest:
        if at >= seen and at + keys <= context:
            at = context // keys * keys
            continue
        yield max(at, lowest), min(at + keys, highest)
        at += keys


def _make_nan(tokens: slice, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    for written in (out, lse):
        if written is not None:
            written[tokens].copy_(torch.full((), math.nan, device=written.device))


def _needs_bad_page(pages: torch.Tensor, cache: KVCache, low: int, high: int, strips: list[Strip]) -> torch.Tensor:
    """Whether a key of [low, high) that somebody sees lies in a page that does not exist. It was not dereferenced, and its
    sequence becomes NaN."""
    column = torch.arange(low, high, device=pages.device) // cache.page_size
    bad = column >= pages.shape[0]
    if pages.shape[0]:
        page = pages[column.clamp(max=pages.shape[0] - 1)]
        bad |= (page < 0) | (page >= cache.pages)
    seen = torch.zeros_like(bad)
    for strip in strips:
        visible = strip.sight.visible(low, high, pages.device)
        seen |= True if visible is None else visible.any(0)
    return (bad & seen).any()


def launcher(problem: Problem, platform: Platform) -> Callable[[Any], None]:
    """What launches calls: nothing is prepared for a problem here."""

    def launch_call(call: Any) -> None:
        launch(
            call.q, call.cache, call.batch, call.options, call.new, call.out, call.lse,
            context_from=call.context_from, only=call.only, zero_padding=call.zero_padding,
        )  # fmt: skip

    return launch_call
