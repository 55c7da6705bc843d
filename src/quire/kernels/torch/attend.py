"""Attention in torch operators: it runs on every machine, without a compiler or another package.

    for each sequence, for each span of its queries, for each tile of keys that one of them sees:
        load keys and values once; for every strip of the span:
            scores, mask, softmax, and merge with the result of earlier tiles

The result of a tile is an attention with an LSE of its own; two results are merged as in `quire.merge`. The query heads of a group
are rows of one matrix product. All arithmetic is fp32: torch's 16-bit products end with an illegal instruction on CPUs that
advertise AMX without its palette, as some hypervisors do, and would round the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.torch.exact_products import exact_products
from quire.kernels.torch.features import SequenceRows, VisibleKeys, spans_as_keys
from quire.kernels.torch.invalid import invalid_sequences
from quire.kernels.torch.read import Reader
from quire.kernels.torch.selected import AttendSelected
from quire.kernels.torch.strip import Strip
from quire.options import Options
from quire.platform import Platform
from quire.problem import ANY, Problem


class TorchTile(NamedTuple):
    """How much is computed at a time. Tiles of keys start at multiples of `keys`."""

    strip: int
    """Query tokens of one matrix product."""
    keys: int
    span: int
    """Query tokens that share a tile of keys while it is loaded."""


def tile_for(cache: KVCache, q_heads: int, longest: int, batch_invariant: bool) -> TorchTile:
    """Keys such that a tile of K fits into the cores' caches, strips of a thousand rows per group (torch's fused operator uses its
    large tiles from 768 on), spans whose accumulators take a few megabytes.

    A batch-invariant call takes one query at a time: the shape of every product, and so its bits, then depends on the query's own
    position alone, however its prompt was divided."""
    if batch_invariant:
        return TorchTile(strip=1, keys=512, span=1)
    widest = max(cache.head_dim, cache.v_head_dim)
    # The tiles of a decode are used by a few rows: larger ones save operators. Those of a prefill are used by many strips.
    budget = 4 << 20 if longest == 1 else 2 << 20
    keys = max(64, min(1024, budget // (4 * cache.kv_heads * widest)))
    if cache.page_size <= keys:
        keys -= keys % cache.page_size
    strip = max(1, 1024 * cache.kv_heads // q_heads)
    return TorchTile(strip, keys, max(strip, (4 << 20) // (4 * q_heads * widest)))


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
    `new`; the others have all of theirs in the cache. With `only=(low, high)`, sequences with fewer than `low` or more than `high`
    new tokens are skipped: they are not read, and their output is unchanged. Rows of the LSE that belong to no sequence become
    zero, and with `zero_padding` those of the output too."""
    # Read once, so that a concurrent change cannot cause an invalid access.
    starts, kv_lens, page_table = batch.q_starts.tolist(), batch.kv_lens.tolist(), batch.page_table.clone()
    if starts[0] != 0 or starts[-1] > q.shape[0] or any(stop < start for start, stop in pairwise(starts)):
        _make_nan(slice(0, q.shape[0]), out, lse)  # q_starts does not say which rows belong to which sequence
        return
    for padded in (out if zero_padding else None, lse):
        if padded is not None:
            padded[starts[-1] :] = 0
    longest = max((stop - start for start, stop in pairwise(starts)), default=0)
    context_from = ANY if new is None else context_from
    sequences = _sequences(batch, options, starts, kv_lens)
    if batch.select is not None:
        selected = AttendSelected(q, cache, options, batch.select, out, lse)
        for seq, rows in enumerate(sequences):
            if not selected(rows, page_table[seq], seq):
                _make_nan(slice(rows.start, rows.start + rows.q_len), out, lse)
        return
    invalid = invalid_sequences(cache, page_table, options, sequences, context_from)
    kernel = AttendSequence(q, cache, options, out, lse, longest)
    for seq, rows in enumerate(sequences):
        start, q_len = rows.start, rows.q_len
        if q_len == 0 or not only[0] <= q_len <= only[1]:
            continue
        new_rows = None if new is None or q_len < context_from else _keys_among(new, rows)
        if invalid[seq] or not kernel(rows, page_table[seq], new_rows):
            _make_nan(slice(start, start + q_len), out, lse)


def _sequences(batch: Batch, options: Options, starts: list[int], kv_lens: list[int]) -> list[SequenceRows]:
    causal = options.causal.tolist() if isinstance(options.causal, torch.Tensor) else [options.causal] * batch.seqs
    found = []
    for seq, ((start, stop), kv_len) in enumerate(zip(pairwise(starts), kv_lens)):
        spans = None if batch.spans is None else spans_as_keys(batch.spans[start:stop], kv_len, batch.shard)
        found.append(SequenceRows(start, stop - start, kv_len, causal[seq], batch.shard, spans))
    return found


def _keys_among(new: tuple[torch.Tensor, torch.Tensor], rows: SequenceRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The new keys and values of a sequence; with a shard, those of this rank."""
    of_sequence = slice(rows.start, rows.start + rows.q_len)
    k, v = new[0][of_sequence], new[1][of_sequence]
    if rows.shard is None:
        return k, v
    owned = rows.shard.owns(torch.arange(rows.kv_len - rows.q_len, rows.kv_len, device=k.device))
    return k[owned], v[owned]


class AttendSequence:
    """Attends to the keys of one sequence after the other."""

    def __init__(
        self, q: torch.Tensor, cache: KVCache, options: Options, out: torch.Tensor, lse: torch.Tensor | None, longest: int
    ):
        self.q, self.cache, self.options, self.out, self.lse = q, cache, options, out, lse
        self.tile = tile = tile_for(cache, q.shape[1], longest, options.batch_invariant)
        self.keys = Reader(cache.k, cache.layout.k, cache.k_format, cache.k_scale, tile.keys)
        self.values = Reader(cache.v, cache.layout.v, cache.v_format, cache.v_scale, tile.keys)
        self.buffer = torch.empty(min(tile.span, longest), *q.shape[1:], dtype=torch.float32, device=q.device)

    def __call__(self, rows: SequenceRows, table: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
        """Writes the output and LSE of a sequence. False: with a tree mask or spans, a visible key lies in a page that does not
        exist."""
        missing = []
        for begin in range(0, rows.q_len, self.tile.span):
            missing += self._attend_span(rows, begin, table, new)
        return not missing or not bool(torch.stack(missing).any())

    def _attend_span(
        self, rows: SequenceRows, begin: int, table: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """The span of queries from the new token `begin` on. Returns, with a tree mask or spans, flags of missing pages."""
        options, tile, missing = self.options, self.tile, []
        k_new, v_new = (None, None) if new is None else new
        strips = self._strips(rows, begin)
        # With a tree mask or spans some page ids may be invalid: hidden keys are read from any page, then masked.
        by_key = strips[0].keys.by_key
        pages = table.clamp(0, self.cache.pages - 1) if by_key else table
        context = strips[0].keys.context
        # The rows of a prefill keep all threads busy; the keys of a decode are divided among threads.
        on_host = self.q.device.type == "cpu"
        divides = on_host and rows.q_len == 1 and options.mask is None and not options.batch_invariant
        parts = torch.get_num_threads() if divides else 1
        for low, high in _tiles([strip.keys for strip in strips], tile.keys):
            k = self.keys.read(pages, low, high, k_new, context, parts, shared=len(strips) > 1)
            v = self.values.read(pages, low, high, v_new, context, parts, shared=len(strips) > 1)
            for strip in strips:
                strip.attend_tile(k, v, low, high)
            if by_key:
                end = high if new is None else max(low, min(high, context))
                missing.append(_needs_missing_page(table, self.cache, low, end, strips))
        for strip in strips:
            strip.store(self.out, self.lse)
        return missing

    def _strips(self, rows: SequenceRows, begin: int) -> list[Strip]:
        """The strips of the span of queries that begins at the sequence's new token `begin`."""
        strips, tile, options = [], self.tile, self.options
        for first in range(begin, min(begin + tile.span, rows.q_len), tile.strip):
            count = min(tile.strip, rows.q_len - first, begin + tile.span - first)
            keys = VisibleKeys(options, rows, first, count)
            tokens = slice(rows.start + first, rows.start + first + count)
            buffer = self.buffer[first - begin : first - begin + count]
            strips.append(Strip(self.q, tokens, keys, self.cache.kv_heads, options, buffer))
        return strips


def _tiles(ranges: list[VisibleKeys], keys: int) -> Iterator[tuple[int, int]]:
    """The tiles of keys that some query sees. With a tree mask and a window, there may be any number of hidden keys between the
    visible context and the new tokens, and with spans anywhere."""
    lowest, highest = min(one.low for one in ranges), max(one.high for one in ranges)
    seen, context = max(one.context_seen for one in ranges), ranges[0].context
    at = lowest // keys * keys
    while lowest < highest and at < highest:
        if at >= seen and at + keys <= context:
            at = context // keys * keys
            continue
        if any(one.low < at + keys and at < one.high for one in ranges):
            yield max(at, lowest), min(at + keys, highest)
        at += keys


def _make_nan(tokens: slice, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    for written in (out, lse):
        if written is not None:
            written[tokens].copy_(torch.full((), math.nan, device=written.device))


def _needs_missing_page(pages: torch.Tensor, cache: KVCache, low: int, high: int, strips: list[Strip]) -> torch.Tensor:
    """Whether a visible key of [low, high) lies in a page that does not exist. It was not dereferenced; the output becomes NaN."""
    column = torch.arange(low, high, device=pages.device) // cache.page_size
    bad = column >= pages.shape[0]
    if pages.shape[0]:
        page = pages[column.clamp(max=pages.shape[0] - 1)]
        bad |= (page < 0) | (page >= cache.pages)
    seen = torch.zeros_like(bad)
    for strip in strips:
        visible = strip.keys.visible(low, high, pages.device)
        seen |= True if visible is None else visible.any(0)
    return (bad & seen).any()


def launcher(problem: Problem, platform: Platform) -> Callable[[Any], None]:
    """The function that launches calls of a problem."""

    def launch_call(call: Any) -> None:
        launch(
            call.q, call.cache, call.batch, call.options, call.new, call.out, call.lse,
            context_from=call.context_from, only=call.only, zero_padding=call.zero_padding,
        )  # fmt: skip

    return launch_call
