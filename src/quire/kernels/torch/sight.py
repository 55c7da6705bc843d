"""Who sees whom: the keys that a tile of queries can see, and which query sees which of them."""

from __future__ import annotations

import torch

from quire.options import Options


class Sight:
    """What queries [first, first + count) of a sequence's new tokens can see: some of the keys [low, high), never others.

    Without a tree mask the queries lie at consecutive positions, so every key of [low, high) is seen by at least one of them.
    """

    def __init__(self, options: Options, token: int, first: int, count: int, q_len: int, kv_len: int, causal: bool):
        self.context, self.count = kv_len - q_len, count
        self.left, self.right = options.sides
        self.low, self.high = 0, kv_len
        self.first = self.context + first
        self.context_seen = self.context
        """One past the last key of the context that may be seen."""
        self.tree: torch.Tensor | None = None
        if options.mask is not None:
            self.tree = options.mask[token + first : token + first + count, :q_len]
            self.tree_at = None if options.positions is None else options.positions[token : token + q_len].long()
            if self.tree_at is not None:
                self.low, self.context_seen = self._context_range(self.tree_at[first : first + count].tolist())
            self.tree_first = first
            return
        if causal:
            self.right = 0
        if self.left is not None:
            self.low = max(0, self.first - self.left)
        if self.right is not None:
            self.high = max(0, min(kv_len, self.first + count + self.right))

    def _context_range(self, positions: list[int]) -> tuple[int, int]:
        """From the first to one past the last key of the context that a query at one of these positions sees."""
        first, end = self.context, 0
        for at in positions:
            low = 0 if self.left is None else max(0, at - self.left)
            high = self.context if self.right is None else min(self.context, at + self.right + 1)
            if low < high:
                first, end = min(first, low), max(end, high)
        return max(0, first), end

    def distance(self, low: int, high: int, device: torch.device) -> torch.Tensor:
        """q_pos - k_pos over keys [low, high), `[count, high - low]`."""
        k_at = torch.arange(low, high, device=device)
        if self.tree is None or self.tree_at is None:
            q_at = torch.arange(self.first, self.first + self.count, device=device)
        else:
            q_at = self.tree_at[self.tree_first : self.tree_first + self.count]
            k_at = torch.where(k_at < self.context, k_at, self.tree_at[(k_at - self.context).clamp(min=0)])
        return q_at[:, None] - k_at

    def visible(self, low: int, high: int, device: torch.device) -> torch.Tensor | None:
        """Which query sees which of keys [low, high), bool `[count, high - low]`; None where all see all."""
        tree = self.tree
        past_left = self.left is not None and (tree is not None or low < self.first + self.count - 1 - self.left)
        past_right = self.right is not None and (tree is not None or high - 1 > self.first + self.right)
        if tree is None and not past_left and not past_right:
            return None
        visible = torch.ones(self.count, high - low, dtype=torch.bool, device=device)
        if tree is not None and high > self.context:
            cut = max(low, self.context)
            visible[:, cut - low :] = tree[:, cut - self.context : high - self.context]
        if past_left or past_right:
            distance = self.distance(low, high, device)
            if self.left is not None:
                visible &= distance <= self.left
            if self.right is not None:
                visible &= distance >= -self.right
        return visible
