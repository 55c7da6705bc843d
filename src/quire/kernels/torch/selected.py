"""Attention over selected keys, in torch operators: the keys of a few queries are gathered by their slots.

    for each sequence, for each strip of its queries, for each tile of the keys selected for them:
        gather keys and values that some query sees; scores, mask, softmax, and merge with the result of earlier tiles

A strip has queries that share their entries (all of a sequence, with selected columns), or queries with entries of their own, whose
products are computed together.
"""

from __future__ import annotations

import math

import torch

from quire.cache.kv_cache import KVCache
from quire.cache.select import Select
from quire.kernels.torch.codec import decode
from quire.kernels.torch.features import SequenceRows, add_sink, cap_scores, softmax_share
from quire.options import Options
from quire.problem import is_fp8

GATHERED = 1 << 21
"""The elements of K, or of V, that are gathered at a time."""
TILE = 512
"""Keys of a tile of a batch-invariant call."""


class AttendSelected:
    """Attends to the selected keys of one sequence after the other."""

    def __init__(
        self, q: torch.Tensor, cache: KVCache, options: Options, select: Select, out: torch.Tensor, lse: torch.Tensor | None
    ):
        self.q, self.cache, self.options, self.select, self.out, self.lse = q, cache, options, select, out, lse
        self.group = q.shape[1] // cache.kv_heads
        self.widest = cache.kv_heads * max(cache.head_dim, cache.v_head_dim)
        self.each = select.keys_per_entry(cache.page_size)
        self.shared = select.kind == "columns"
        self.formats = cache.k_format, cache.v_format
        self.stored = [
            view.view(torch.uint8) if format.itemsize == 1 else view
            for view, format in zip((cache.k_view, cache.v_view), self.formats)
        ]
        self.groups = cache.k_groups, cache.v_groups

    def __call__(self, rows: SequenceRows, table: torch.Tensor, seq: int) -> bool:
        """Writes the output and LSE of a sequence; NaN for queries with an entry that does not exist, or whose page does not.
        False: its length is invalid."""
        if rows.kv_len < 0:
            return False
        keys = self.select.n * self.each
        if self.options.batch_invariant:
            strip = 1
        elif self.shared:
            strip = max(1, 1024 // self.group)
        else:
            strip = max(1, GATHERED // (max(min(keys, TILE), 1) * self.widest))
        for first in range(0, rows.q_len, strip):
            self._strip(rows, first, min(strip, rows.q_len - first), table, seq)
        return True

    def _strip(self, rows: SequenceRows, first: int, count: int, table: torch.Tensor, seq: int) -> None:
        """The queries of new tokens [first, first + count)."""
        tokens = slice(rows.start + first, rows.start + first + count)
        entries = self.select.entries[seq : seq + 1] if self.shared else self.select.entries[tokens]
        entries = entries.long()
        limit = -(-rows.kv_len // self.each)
        bad = ((entries < -1) | (entries >= limit)).any(2)
        key = torch.where((entries < 0) | (entries >= limit), -1, entries * self.each)
        if self.shared:
            within = torch.arange(self.each, device=key.device)
            key = torch.where(key[..., None] < 0, -1, key[..., None] + within).flatten(2)
        # [units, queries, 1, 1]: queries of a unit share their keys.
        at = torch.arange(count, device=key.device) + (rows.kv_len - rows.q_len + first)
        at = at.view(key.shape[0], -1, 1, 1)
        kv_heads = self.cache.kv_heads
        shape = (kv_heads, count, self.group)
        total = torch.zeros(*shape, self.cache.v_head_dim, dtype=torch.float32, device=key.device)
        logs = torch.full((*shape, 1), -math.inf, dtype=torch.float32, device=key.device)
        if not self.options.batch_invariant:
            bad |= self._attend(total, logs, tokens, slice(0, kv_heads), key, at, rows, table)
        else:
            # The shapes of products depend only on the keys that the query sees.
            for head in range(key.shape[1]):
                seen = key[:, head : head + 1][:, :, self._visible(key[:, head : head + 1], at, rows)[0, 0, 0]]
                heads = slice(0, kv_heads) if key.shape[1] == 1 else slice(head, head + 1)
                bad[:, head] |= self._attend(total, logs, tokens, heads, seen, at, rows, table)[:, 0]
        total, logs = add_sink(total, logs, self.options)
        wrong = bad.expand(-1, kv_heads).T.expand(-1, count)[..., None, None]
        self._store(tokens, total.masked_fill(wrong, math.nan), logs.masked_fill(wrong, math.nan))

    def _visible(self, key: torch.Tensor, at: torch.Tensor, rows: SequenceRows) -> torch.Tensor:
        """Which query of a unit sees which key, bool `[units, heads, queries, keys]`."""
        left, right = self.options.sides
        right = 0 if rows.causal else right
        distance = at.transpose(1, 2) - key[:, :, None]
        visible = (key >= 0)[:, :, None] & (key < rows.kv_len)[:, :, None]
        visible = visible & (distance <= left) if left is not None else visible.expand_as(distance)
        return visible if right is None else visible & (distance >= -right)

    def _attend(
        self,
        total: torch.Tensor,
        logs: torch.Tensor,
        tokens: slice,
        heads: slice,
        key: torch.Tensor,
        at: torch.Tensor,
        rows: SequenceRows,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """Merges attention of some heads over keys `[units, heads or 1, keys]` into the total. Returns which units and heads
        need a page that does not exist, `[units, heads or 1]`."""
        q = self._queries(tokens, heads, key.shape[0])
        missing = torch.zeros(key.shape[:2], dtype=torch.bool, device=key.device)
        # As many keys as fit, in one tile of a batch-invariant call always the same number.
        step = TILE if self.options.batch_invariant else max(1, GATHERED // (key.shape[0] * self.widest))
        for low in range(0, key.shape[2], step):
            some = key[:, :, low : low + step]
            visible = self._visible(some, at, rows)
            needed = visible.any(2)
            column = some.clamp(min=0) // self.cache.page_size
            page = torch.full_like(some, -1)
            if table.shape[0]:
                page = torch.where(column < table.shape[0], table[column.clamp(max=table.shape[0] - 1)].long(), -1)
            absent = (page < 0) | (page >= self.cache.pages)
            missing |= (needed & absent).any(2)
            here = needed & ~absent
            if not bool(here.any()):
                continue
            offset = some.clamp(min=0) % self.cache.page_size
            k, v = (self._gather(part, torch.where(here, page, 0), offset, here, heads) for part in (0, 1))
            self._tile(total, logs, heads, q, k, v, visible & here[:, :, None], at.transpose(1, 2) - some[:, :, None])
        return missing

    def _queries(self, tokens: slice, heads: slice, units: int) -> torch.Tensor:
        """The queries of some heads as scaled fp32 rows `[units, heads, queries * group, head_dim]`."""
        options, q = self.options, self.q[tokens].unflatten(1, (self.cache.kv_heads, -1))[:, heads]
        scale = self.q.shape[2] ** -0.5 if options.scale is None else options.scale
        if options.q_scale is not None:
            scale = scale * options.q_scale
        return (q.float() * scale).unflatten(0, (units, -1)).transpose(1, 2).flatten(2, 3)

    def _gather(self, part: int, page: torch.Tensor, offset: torch.Tensor, here: torch.Tensor, heads: slice) -> torch.Tensor:
        """Keys (part 0) or values of some heads, fp32 `[units, heads, keys, dim]`; zeros where no query sees the key."""
        cache, view = self.cache, self.stored[part]
        head = torch.arange(cache.kv_heads, device=page.device)[heads].view(1, -1, 1)
        raw = view[page, head, offset // view.shape[3], offset % view.shape[3]].flatten(3)
        format = self.formats[part]
        made = torch.empty((*raw.shape[:-1], format.elements_in(raw.shape[-1])), dtype=torch.float32, device=raw.device)
        groups = self.groups[part]
        if groups is not None:
            groups = groups[page, head, offset // groups.shape[3], offset % groups.shape[3]].flatten(3)
        decode(raw[..., None, :], format, made[..., None, :], groups)
        scale = (cache.k_scale, cache.v_scale)[part]
        if scale is not None:
            by_token = scale.dim() == 3
            scale = scale[page, offset, head][..., None] if by_token else scale.expand(cache.kv_heads)[heads].view(1, -1, 1, 1)
            format.scaled_in_place(made, scale)
        return made.masked_fill_(~here[..., None], 0.0)

    def _tile(
        self,
        total: torch.Tensor,
        logs: torch.Tensor,
        heads: slice,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor,
        distance: torch.Tensor,
    ) -> None:
        """Merges attention over a tile of keys into the total."""
        scores = cap_scores(q @ k.transpose(2, 3), self.options).unflatten(2, (-1, self.group))
        if self.options.alibi is not None:
            slopes = self.options.alibi.float().view(self.cache.kv_heads, 1, self.group, 1)[heads]
            scores -= slopes * distance.abs().unsqueeze(3)
        scores.masked_fill_(~visible.unsqueeze(3), -math.inf)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        part = (torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)).flatten(2, 3) @ v).unflatten(2, (-1, self.group))
        # [units, heads, queries, group, dim] as [heads, tokens, group, dim]
        part, lse = (x.transpose(0, 1).flatten(1, 2) for x in (part, lse))
        merged = torch.logaddexp(logs[heads], lse)
        total[heads] = total[heads] * softmax_share(logs[heads], merged) + part * softmax_share(lse, merged)
        logs[heads] = merged

    def _store(self, tokens: slice, total: torch.Tensor, logs: torch.Tensor) -> None:
        """Stores results `[kv_heads, tokens, group, dim]`."""
        if self.options.out_scale is not None:
            total = total / self.options.out_scale
        if is_fp8(self.out.dtype):
            largest = torch.finfo(self.out.dtype).max
            total = total.clamp(-largest, largest)
        kv_heads = self.cache.kv_heads
        self.out[tokens].unflatten(1, (kv_heads, -1)).copy_(total.transpose(0, 1))
        if self.lse is not None:
            self.lse[tokens].unflatten(1, (kv_heads, -1)).copy_(logs.squeeze(3).transpose(0, 1))
