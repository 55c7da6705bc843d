"""Attention in plain torch: what every machine has, with no compiler and no extra package.

    for each sequence, for each span of its queries, for each tile of the keys that one of them can see:
        load keys and values once, and let every strip of the span meet them:
            score, hide, weigh, fold into what earlier tiles gave

A strip's meeting with a tile is a complete attention with an LSE of its own, and folding two of them is what `quire.merge` does.
The query heads of a group are rows of one matrix product. All arithmetic is fp32: torch's own 16-bit products die with an illegal
instruction on CPUs that advertise AMX without its palette, as some hypervisors do, and would round the scores besides.
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
from quire.options import Options
from quire.problem import is_fp8


class Tile(NamedTuple):
    """How much is computed at a time. Tiles of keys start at multiples of `keys`."""

    strip: int
    """Query tokens of one matrix product."""
    keys: int
    span: int
    """Query tokens that share a tile of keys while it is loaded."""


class Part(NamedTuple):
    """Attention over some of the keys: `out [kv_heads, rows, v_head_dim]` and `lse [kv_heads, rows, 1]`, fp32. A row is one
    query token of one query head of the group."""

    out: torch.Tensor
    lse: torch.Tensor


def tile_for(cache: KVCache, q_heads: int, longest: int, batch_invariant: bool) -> Tile:
    """Keys such that a tile of K stays near a core, strips of a few hundred rows a group, spans whose totals stay in megabytes.

    A batch-invariant call takes one query at a time: the shape of every product, and so its bits, then follows from the
    query's own position, however its prompt was cut."""
    if batch_invariant:
        return Tile(strip=1, keys=512, span=1)
    widest = max(cache.head_dim, cache.v_head_dim)
    budget = 4 << 20 if longest == 1 else 2 << 20
    keys = max(64, min(1024, budget // (4 * cache.kv_heads * widest)))
    if cache.page_size <= keys:
        keys -= keys % cache.page_size
    strip = max(1, 256 * cache.kv_heads // q_heads)
    return Tile(strip, keys, max(strip, (8 << 20) // (4 * q_heads * widest)))


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
) -> None:
    """Writes `out` and, if given, `lse` for every live row. Sequences with at least `context_from` new tokens take those from
    `new`; the others find all of theirs in the cache."""
    starts, kv_lens = batch.q_starts.tolist(), batch.kv_lens.tolist()
    causal = options.causal.tolist() if isinstance(options.causal, torch.Tensor) else [options.causal] * batch.seqs
    q_lens = [stop - start for start, stop in pairwise(starts)]
    longest = max(q_lens, default=0)
    tile = tile_for(cache, q.shape[1], longest, options.batch_invariant)
    keys = Reader(cache.k, cache.layout.k, cache.format, cache.k_scale, tile.keys)
    values = Reader(cache.v, cache.layout.v, cache.format, cache.v_scale, tile.keys)
    room = Room(q, cache.v_head_dim, tile, longest)
    on_host = q.device.type == "cpu"
    for seq, (token, q_len, kv_len) in enumerate(zip(starts, q_lens, kv_lens)):
        context, pages, bad = kv_len - q_len, batch.page_table[seq], []
        k_new = v_new = None
        if new is not None and q_len >= context_from:
            k_new, v_new = (x[token : token + q_len] for x in new)
        # On the host the contract was checked, and only a tree mask can leave gaps; elsewhere nobody has looked.
        if not on_host or options.mask is not None:
            pages = pages.clamp(0, cache.pages - 1)
        for begin in range(0, q_len, tile.span):
            strips = []
            for first in range(begin, min(begin + tile.span, q_len), tile.strip):
                count = min(tile.strip, q_len - first, begin + tile.span - first)
                sight = Sight(options, token, first, count, q_len, kv_len, causal[seq])
                tokens = slice(token + first, token + first + count)
                strips.append(Strip(q[tokens], sight, cache.kv_heads, options, room.total(first - begin, count), tokens))
            lowest, highest = min(s.sight.low for s in strips), max(s.sight.high for s in strips)
            for at in range(lowest // tile.keys * tile.keys, highest, tile.keys):
                low, high = max(at, lowest), min(at + tile.keys, highest)
                k = keys.read(pages, low, high, k_new, context, shared=len(strips) > 1)
                v = values.read(pages, low, high, v_new, context, shared=len(strips) > 1)
                for strip in strips:
                    strip.meet(k, v, low, high, room)
                if not on_host:
                    cut = high if k_new is None else max(low, min(high, context))
                    bad.append(_needs_bad_page(batch.page_table[seq], cache, low, cut, strips))
            for strip in strips:
                strip.store(out, lse)
        if bad and bool(torch.stack(bad).any()):
            for written in (out, lse):
                if written is not None:
                    written[token : token + q_len].copy_(torch.full((), math.nan))


class Room:
    """The buffers of one call, taken once: their size follows from the tile, not from the context."""

    def __init__(self, q: torch.Tensor, v_head_dim: int, tile: Tile, longest: int):
        self.row = q.shape[1] * v_head_dim
        strip, span = min(tile.strip, longest), min(tile.span, longest)
        self.scores = torch.empty(q.shape[1] * strip * tile.keys, device=q.device)
        self.part = torch.empty(strip * self.row, device=q.device)
        self.totals = torch.empty(span * self.row, device=q.device)

    def total(self, first: int, count: int) -> torch.Tensor:
        """Where the strip that starts at token `first` of the span keeps its total."""
        return self.totals[first * self.row : (first + count) * self.row]


class Strip:
    """A few queries of one sequence, and what they have gathered from the keys so far."""

    def __init__(self, q: torch.Tensor, sight: Sight, kv_heads: int, options: Options, room: torch.Tensor, tokens: slice):
        self.rows, self.sight, self.options, self.room, self.tokens = _rows_of(q, kv_heads, options), sight, options, room, tokens
        self.total: Part | None = None

    def meet(self, k: torch.Tensor, v: torch.Tensor, low: int, high: int, room: Room) -> None:
        """Attends to those of keys [low, high) that the strip can see."""
        first, last = max(low, self.sight.low), min(high, self.sight.high)
        if first >= last:
            return
        if (first, last) != (low, high):
            k, v = k[:, first - low : last - low], v[:, first - low : last - low]
        visible = self.sight.visible(first, last, k.device)
        if self.sight.tree is not None and visible is not None:
            # A tree may hide a key from every query; then it must not reach them as 0 * NaN either.
            unseen = ~visible.any(0).view(1, -1, 1)
            k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        scores = _score(self.rows, k, self.sight, first, last, visible, self.options, room.scores)
        part = _weigh(scores, v, visible is not None, self.room if self.total is None else room.part)
        self.total = part if self.total is None else _fold(self.total, part)

    def store(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Lets the sink take its weight, and stores rows as tokens and heads."""
        kv_heads = self.rows.shape[0]
        to = out[self.tokens].unflatten(1, (kv_heads, -1))  # [tokens, kv_heads, group, v_head_dim]
        rows, rows_lse = _nothing(to) if self.total is None else (x.unflatten(1, (to.shape[0], -1)) for x in self.total)
        if self.options.sinks is not None:
            with_sink = torch.logaddexp(rows_lse, self.options.sinks.float().view(kv_heads, 1, -1, 1))
            rows.mul_(_share(rows_lse, with_sink))
            rows_lse = with_sink
        if self.options.out_scale is not None:
            rows.div_(self.options.out_scale)
        if is_fp8(out.dtype):
            largest = torch.finfo(out.dtype).max
            rows.clamp_(-largest, largest)
        to.copy_(rows.transpose(0, 1))
        if lse is not None:
            lse[self.tokens].unflatten(1, (kv_heads, -1)).copy_(rows_lse.squeeze(3).transpose(0, 1))


def _rows_of(q: torch.Tensor, kv_heads: int, options: Options) -> torch.Tensor:
    """Queries `[tokens, q_heads, head_dim]` as scaled fp32 rows `[kv_heads, tokens * group, head_dim]`."""
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    rows = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).to(torch.float32, copy=True)
    if options.q_scale is not None:
        rows.mul_(options.q_scale)
    return rows.mul_(scale).reshape(kv_heads, -1, q.shape[2])


def _score(
    queries: torch.Tensor,
    k: torch.Tensor,
    sight: Sight,
    low: int,
    high: int,
    visible: torch.Tensor | None,
    options: Options,
    room: torch.Tensor,
) -> torch.Tensor:
    """Logits `[kv_heads, rows, keys]`; those of keys a query does not see are -inf."""
    kv_heads, rows, _ = queries.shape
    scores = room[: kv_heads * rows * (high - low)].view(kv_heads, rows, high - low)
    torch.bmm(queries, k.transpose(1, 2), out=scores)
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    by_token = scores.view(kv_heads, sight.count, -1, high - low)
    if options.alibi is not None:
        slopes = options.alibi.float().view(kv_heads, 1, -1, 1)
        by_token.sub_(slopes * sight.distance(low, high, scores.device).abs().unsqueeze(1))
    if visible is not None:
        # A minimum with +-inf: as exact as masked_fill, and ten times as fast on a CPU.
        torch.minimum(by_token, torch.where(visible, math.inf, -math.inf).unsqueeze(1), out=by_token)
    return scores


def _weigh(scores: torch.Tensor, v: torch.Tensor, hides: bool, room: torch.Tensor) -> Part:
    """Softmax over one tile's keys, applied to its values. `scores` become the weights."""
    highest = scores.amax(-1, keepdim=True)
    blind = highest == -math.inf if hides else None
    if blind is not None and bool(blind.any()):
        scores.masked_fill_(blind, 0.0)
    torch.softmax(scores, -1, out=scores)
    # The largest weight is exp(highest - lse): that gives the LSE without a second pass of exponentials.
    lse = highest - scores.amax(-1, keepdim=True).log_()
    out = room[: scores.shape[0] * scores.shape[1] * v.shape[2]].view(*scores.shape[:2], v.shape[2])
    torch.bmm(scores, v, out=out)
    if blind is not None:
        # A query that sees none of these keys gets zeros, whatever the products gave.
        lse.masked_fill_(blind, -math.inf)
        if bool(blind.any()):
            out.masked_fill_(blind, 0.0)
    return Part(out, lse)


def _fold(total: Part, part: Part) -> Part:
    """The total with one more part: each counts by its share of the softmax."""
    lse = torch.logaddexp(total.lse, part.lse)
    return Part(total.out.mul_(_share(total.lse, lse)).addcmul_(part.out, _share(part.lse, lse)), lse)


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """exp(part - whole), 0 where there is nothing to share."""
    return torch.exp(part - whole.masked_fill(whole == -math.inf, 0.0))


def _nothing(to: torch.Tensor) -> Part:
    """What queries without a key give: zeros, and an LSE of -inf."""
    shape = (to.shape[1], to.shape[0], to.shape[2])
    return Part(torch.zeros(*shape, to.shape[3], device=to.device), torch.full((*shape, 1), -math.inf, device=to.device))


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
