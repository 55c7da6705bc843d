"""The attention features as hooks that `Strip` calls: which query sees which key (causality, window, spans, tree mask:
`VisibleKeys`), softcap (`cap_scores`), ALiBi (`alibi_penalty`) and sinks (`add_sink`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from quire.cache.shard import Shard, keys_of, positions_of
from quire.options import Options


class SequenceRows(NamedTuple):
    """One sequence: its first row of q, its lengths, whether it is causal, which of its keys are on this rank, and which of these
    each new token sees, `[q_len, 2]`, if there are spans."""

    start: int
    q_len: int
    kv_len: int
    causal: bool
    shard: Shard | None
    spans: torch.Tensor | None


class VisibleKeys:
    """The keys that the new tokens [first, first + count) of a sequence see: a subset of [low, high). With a shard, keys are those
    of this rank; otherwise a key is its position.

    Without a tree mask or spans the queries have consecutive positions, so every key of [low, high) is visible to at least one of
    them.
    """

    def __init__(self, options: Options, rows: SequenceRows, first: int, count: int):
        token, q_len, kv_len, causal, self.shard, spans = rows
        self.begin, self.count = kv_len - q_len, count
        """The position of the sequence's first new token, and the number of queries."""
        self.context = keys_of(self.shard, self.begin)
        """The number of keys of the context."""
        self.left, self.right = options.sides
        low, high, context_seen = 0, kv_len, self.begin
        self.first = self.begin + first
        self.tree: torch.Tensor | None = None
        self.spans = None if spans is None else spans[first : first + count]
        self.by_key = options.mask is not None or spans is not None
        """Whether any key may be hidden from every query."""
        if options.mask is not None:
            self.tree = options.mask[token + first : token + first + count, :q_len]
            self.tree_at = None if options.positions is None else options.positions[token : token + q_len].long()
            if self.tree_at is not None:
                low, context_seen = self._context_range(self.tree_at[first : first + count].tolist())
            self.tree_first = first
        elif spans is None:
            if causal:
                self.right = 0
            if self.left is not None:
                low = max(0, self.first - self.left)
            if self.right is not None:
                high = max(0, min(kv_len, self.first + count + self.right))
        self.low, self.high = keys_of(self.shard, low), keys_of(self.shard, high)
        if self.spans is not None:
            self.low, self.high = seen_keys(self.spans)
        self.context_seen = keys_of(self.shard, context_seen)
        """One past the last key of the context that may be visible."""

    def _context_range(self, positions: list[int]) -> tuple[int, int]:
        """From the first to one past the last position of the context that a query at one of these positions sees."""
        first, end = self.begin, 0
        for at in positions:
            low = 0 if self.left is None else max(0, at - self.left)
            high = self.begin if self.right is None else min(self.begin, at + self.right + 1)
            if low < high:
                first, end = min(first, low), max(end, high)
        return max(0, first), end

    def distance(self, low: int, high: int, device: torch.device) -> torch.Tensor:
        """q_pos - k_pos over keys [low, high), `[count, high - low]`."""
        k_at = positions_of(self.shard, torch.arange(low, high, device=device))
        if self.tree is None or self.tree_at is None:
            q_at = torch.arange(self.first, self.first + self.count, device=device)
        else:
            q_at = self.tree_at[self.tree_first : self.tree_first + self.count]
            k_at = torch.where(k_at < self.begin, k_at, self.tree_at[(k_at - self.begin).clamp(min=0)])
        return q_at[:, None] - k_at

    def visible(self, low: int, high: int, device: torch.device) -> torch.Tensor | None:
        """Which query sees which of keys [low, high), bool `[count, high - low]`; None where all see all."""
        tree = self.tree
        if self.spans is not None:
            begin, end = self.spans.unbind(1)
            if bool(((begin <= low) & (end >= high)).all()):
                return None
            key = torch.arange(low, high, device=device)
            return (begin[:, None] <= key) & (key < end[:, None])
        first, last = positions_of(self.shard, low), positions_of(self.shard, high - 1)
        past_left = self.left is not None and (tree is not None or first < self.first + self.count - 1 - self.left)
        past_right = self.right is not None and (tree is not None or last > self.first + self.right)
        if tree is None and not past_left and not past_right:
            return None
        visible = torch.ones(self.count, high - low, dtype=torch.bool, device=device)
        if tree is not None and high > self.context:
            cut = max(low, self.context)
            # Column j of the mask is the token at position `begin + j`.
            columns = slice(cut - self.begin, high - self.begin)
            if self.shard is not None:
                columns = positions_of(self.shard, torch.arange(cut, high, device=device)) - self.begin
            visible[:, cut - low :] = tree[:, columns]
        if past_left or past_right:
            distance = self.distance(low, high, device)
            if self.left is not None:
                visible &= distance <= self.left
            if self.right is not None:
                visible &= distance >= -self.right
        return visible


def spans_as_keys(spans: torch.Tensor, kv_len: int, shard: Shard | None) -> torch.Tensor:
    """The keys [begin, end) that each new token of a sequence sees, int64 `[q_len, 2]`, from the positions that it sees."""
    begin, end = spans.long().unbind(1)
    return torch.stack((keys_of(shard, begin.clamp(min=0)), keys_of(shard, end.clamp(max=kv_len))), 1)


def seen_keys(spans: torch.Tensor) -> tuple[int, int]:
    """The first key in any of the spans, and the one after the last; 0 and 0 if all spans are empty."""
    begin, end = spans[spans[:, 0] < spans[:, 1]].unbind(1)
    return (int(begin.min()), int(end.max())) if len(begin) else (0, 0)


def changes_scores(options: Options) -> bool:
    """Whether scores are changed by more than a scale and a bias, so that torch's fused attention cannot be used."""
    return options.softcap is not None


def cap_scores(scores: torch.Tensor, options: Options) -> torch.Tensor:
    """Applies the softcap in place."""
    return scores if options.softcap is None else scores.div_(options.softcap).tanh_().mul_(options.softcap)


def alibi_penalty(options: Options, keys: VisibleKeys, low: int, high: int, kv_heads: int) -> torch.Tensor | None:
    """What ALiBi subtracts from the logits of keys [low, high), `[kv_heads, count, group, keys]`; None without ALiBi."""
    if options.alibi is None:
        return None
    slopes = options.alibi.float().view(kv_heads, 1, -1, 1)
    return slopes * keys.distance(low, high, slopes.device).abs().unsqueeze(1)


def add_sink(out: torch.Tensor, lse: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[kv_heads, tokens, group, v_head_dim]` and LSE with the sink's term in the denominator."""
    if options.sinks is None:
        return out, lse
    with_sink = torch.logaddexp(lse, options.sinks.float().view(out.shape[0], 1, -1, 1))
    return out * softmax_share(lse, with_sink), with_sink


def softmax_share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """exp(part - whole) of two LSEs, 0 where both are -inf."""
    return torch.exp(part - whole.masked_fill(whole == -math.inf, 0.0))
