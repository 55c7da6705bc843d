"""Paged attention in plain torch, tile by tile with an online softmax, in splits that are merged: what a kernel does, and correct.

It shares no code with the kit. Every step is a method, so that a faulty kernel changes one of them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

TILE = 32
SPLIT = 256
TYPES = {
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Running maximum [heads, queries, 1], sum [heads, queries, 1], accumulator [heads, queries, dim]."""


class Attention:
    """One kernel; the arguments of the call are attributes while it runs."""

    def __call__(
        self,
        *,
        q,
        k_pages,
        v_pages,
        page_table,
        kv_lens,
        q_starts,
        out,
        scale,
        window,
        softcap,
        alibi,
        sinks,
        causal,
        mask,
        positions,
        k_scale,
        v_scale,
        q_scale,
        new_k,
        new_v,
        lse,
        layout,
        format,
    ) -> None:  # type: ignore[no-untyped-def]
        self.a = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})
        by_slot = layout == "nhd"
        self.size = k_pages.shape[3 if layout in ("vllm_x", "aiter") else 1 if by_slot else 2]
        self.kv_heads = k_pages.shape[2 if by_slot else 1]
        self.q_heads = q.shape[1]
        self.group = self.q_heads // self.kv_heads
        starts, lens = q_starts.tolist(), kv_lens.tolist()
        for seq in range(len(lens)):
            if starts[seq + 1] > starts[seq]:
                self.run(seq, starts[seq], starts[seq + 1], max(lens[seq], 0))
        self.finish()

    def finish(self) -> None:
        """What is done after the last sequence."""

    def run(self, seq: int, first: int, end: int, n: int) -> None:
        """One sequence: rows `first` to `end` of q, `n` keys."""
        self.seq, self.first, self.q_len, self.n = seq, first, end - first, n
        self.context = n - self.q_len
        self.q = self.a.q[first:end].float().transpose(0, 1) * (self.a.q_scale or 1.0)
        parts = []
        for low in range(0, n, SPLIT):
            state = self.begin()
            for at in range(low, min(low + SPLIT, n), TILE):
                state = self.tile(state, torch.arange(at, min(at + TILE, low + SPLIT, n)))
            parts.append(state)
        m, total, acc = self.sink(self.merge(parts) if parts else self.begin())
        value = torch.where(total > 0, acc / total.clamp(min=1e-38), 0.0)
        self.store(value, self.log_sum(m, total))

    def begin(self) -> State:
        shape = (self.q_heads, self.q_len, 1)
        return torch.full(shape, -math.inf), torch.zeros(shape), torch.zeros(*shape[:2], self.a.out.shape[2])

    def tile(self, state: State, keys: torch.Tensor) -> State:
        q_at, k_at = self.places(keys)
        seen = self.visible(q_at[:, None], k_at[None, :], keys)
        if not bool(seen.any()):
            return state
        k, v = self.load("k", keys), self.load("v", keys)
        used = seen.any(0)[:, None, None]
        k, v = torch.where(used, k, 0.0), torch.where(used, v, 0.0)
        heads = self.kv_head()
        logits = self.scores(self.q, k[:, heads].transpose(0, 1))
        logits = logits + self.bias(q_at[:, None], k_at[None, :])
        return self.update(state, self.hide(logits, seen), v[:, heads].transpose(0, 1))

    # Reading.

    def kv_head(self) -> torch.Tensor:
        return torch.arange(self.q_heads) // self.group

    def page_of(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table()[keys // self.size].long(), keys % self.size

    def table(self) -> torch.Tensor:
        return self.a.page_table[self.seq]

    def load(self, part: str, keys: torch.Tensor) -> torch.Tensor:
        """[keys, kv_heads, dim], numbers."""
        new = getattr(self.a, f"new_{part}")
        if new is None:
            return self.cached(part, keys)
        old = keys[keys < self.context]
        fresh = new[self.first + keys[keys >= self.context] - self.context].float()
        return torch.cat((self.cached(part, old), fresh)) if old.numel() else fresh

    def cached(self, part: str, keys: torch.Tensor) -> torch.Tensor:
        page, slot = self.page_of(keys)
        return self.numbers(part, page, slot) * self.factor(part, page, slot)

    def numbers(self, part: str, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """What lies in these slots, [keys, kv_heads, dim]."""
        pages = getattr(self.a, f"{part}_pages")
        if pages.dtype is torch.uint8:
            pages = pages.view(TYPES[self.a.format])
        at = torch.arange(page.numel())
        block, layout = pages.view(torch.uint8)[page].view(pages.dtype) if pages.dtype.itemsize == 1 else pages[page], self.a.layout
        if layout == "nhd":
            found = block[at, slot]
        elif layout in ("hnd", "vllm_joint"):
            found = block.transpose(1, 2)[at, slot]
        elif part == "k":
            found = block.permute(0, 3, 1, 2, 4)[at, slot].flatten(2)
        elif layout == "vllm_x":
            found = block.permute(0, 3, 1, 2)[at, slot]
        else:
            x = block.shape[-1]
            found = block.permute(0, 2, 4, 1, 3)[at, slot // x, slot % x]
        return found.float()

    def factor(self, part: str, page: torch.Tensor, slot: torch.Tensor) -> Any:
        scale = getattr(self.a, f"{part}_scale")
        if scale is None:
            return 1.0
        return scale[page, slot][..., None].float() if scale.dim() == 3 else scale.float().reshape(1, -1, 1)

    # Scores.

    def places(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the queries and of these keys."""
        if self.a.positions is None:
            return torch.arange(self.context, self.n), keys
        own = self.a.positions[self.first : self.first + self.q_len].long()
        return own, torch.where(keys < self.context, keys, own[(keys - self.context).clamp(min=0)])

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.cap(q @ k.transpose(1, 2) * self.a.scale)

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.a.softcap is None else self.a.softcap * torch.tanh(logits / self.a.softcap)

    def bias(self, q_at: torch.Tensor, k_at: torch.Tensor) -> Any:
        return 0.0 if self.a.alibi is None else -self.a.alibi.float()[:, None, None] * (q_at - k_at).abs()

    def hide(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(~seen, -math.inf)

    def is_causal(self) -> bool:
        causal = self.a.causal
        return bool(causal[self.seq]) if isinstance(causal, torch.Tensor) else causal

    def visible(self, q_at: torch.Tensor, k_at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(self.q_len, keys.numel(), dtype=torch.bool)
        if self.a.mask is not None:
            new = (keys - self.context).clamp(min=0)
            seen &= torch.where(keys < self.context, True, self.tree()[:, new])
        elif self.is_causal():
            seen &= self.causal(q_at, k_at)
        left, right = self.a.window
        if left is not None:
            seen &= self.left_of_window(q_at, k_at, left)
        return seen if right is None else seen & (k_at <= q_at + right)

    def tree(self) -> torch.Tensor:
        return self.a.mask[self.first : self.first + self.q_len].bool()

    def causal(self, q_at: torch.Tensor, k_at: torch.Tensor) -> torch.Tensor:
        return k_at <= q_at

    def left_of_window(self, q_at: torch.Tensor, k_at: torch.Tensor, left: int) -> torch.Tensor:
        return k_at >= q_at - left

    # Softmax.

    def update(self, state: State, logits: torch.Tensor, v: torch.Tensor) -> State:
        m, total, acc = state
        new = torch.maximum(m, logits.amax(-1, keepdim=True))
        safe = torch.where(new == -math.inf, 0.0, new)
        p, alpha = torch.exp(logits - safe), torch.exp(m - safe)
        return new, total * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ v

    def merge(self, parts: list[State]) -> State:
        m = torch.stack([part[0] for part in parts]).amax(0)
        safe = torch.where(m == -math.inf, 0.0, m)
        weights = [torch.exp(part[0] - safe) for part in parts]
        total = sum((w * part[1] for w, part in zip(weights, parts)), torch.zeros(()))
        return m, total, sum((w * part[2] for w, part in zip(weights, parts)), torch.zeros(()))

    def sink(self, state: State) -> State:
        if self.a.sinks is None:
            return state
        m, total, acc = state
        extra = self.sink_logits()
        new = torch.maximum(m, extra)
        alpha = torch.exp(m - new)
        return new, total * alpha + torch.exp(extra - new), acc * alpha

    def sink_logits(self) -> torch.Tensor:
        return self.a.sinks.float()[:, None, None]

    def log_sum(self, m: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.where(total > 0, m + total.log(), -math.inf)

    def store(self, value: torch.Tensor, lse: torch.Tensor) -> None:
        rows = slice(self.first, self.first + self.q_len)
        self.a.out[rows] = value.transpose(0, 1).to(self.a.out.dtype)
        if self.a.lse is not None:
            self.a.lse[rows] = lse[..., 0].T


correct = Attention()
