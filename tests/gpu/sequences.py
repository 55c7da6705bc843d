"""Sequences that grow step by step in one bf16 cache, and all that they hold besides, densely: what a step must give follows from
that alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

import quire
from gpu.calls import DEVICE

PAGE, KV_HEADS, GROUP, DIM = 16, 2, 4, 64


class Step(NamedTuple):
    """The new tokens of a step, in the rows of some batch."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    kv_lens: torch.Tensor
    q_starts: torch.Tensor
    expected: torch.Tensor
    weighted: torch.Tensor


class Sequences:
    """As many as `count`, of up to `pages` pages each."""

    def __init__(self, count: int, pages: int, seed: int = 0):
        self.g = torch.Generator().manual_seed(seed)
        self.table = torch.randperm(count * pages + 2, generator=self.g)[: count * pages].view(count, pages)
        shape = (count * pages + 2, PAGE, KV_HEADS, DIM)
        k, v = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        self.cache = quire.KVCache.wrap(k, v, layout="nhd")
        self.k, self.v = ([torch.zeros(0, KV_HEADS, DIM) for _ in range(count)] for _ in range(2))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.g).bfloat16()

    def step(self, q_lens: dict[int, int], tokens: int) -> Step:
        """That many new tokens for these sequences, in this order, in tensors of `tokens` rows: the rest is padding, NaN."""
        live = sum(q_lens.values())
        q = torch.full((tokens, KV_HEADS * GROUP, DIM), torch.nan, dtype=torch.bfloat16)
        k, v = (torch.full((tokens, KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16) for _ in range(2))
        q[:live], k[:live], v[:live] = (self._random(live, heads, DIM) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS))
        expected, weighted, starts = [], [], [0]
        for which, q_len in q_lens.items():
            rows = slice(starts[-1], starts[-1] + q_len)
            self.k[which], self.v[which] = torch.cat((self.k[which], k[rows])), torch.cat((self.v[which], v[rows]))
            expected.append(quire.reference.attention(q[rows], self.k[which], self.v[which])[0])
            weighted.append(quire.reference.attention(q[rows], self.k[which], self.v[which].abs())[0])
            starts.append(rows.stop)
        table = self.table[list(q_lens)]
        kv_lens = torch.tensor([self.k[which].shape[0] for which in q_lens])
        return Step(q, k, v, table, kv_lens, torch.tensor(starts), torch.cat(expected), torch.cat(weighted))

    def store(self) -> None:
        """Puts all that the sequences hold into the cache, without `quire.write`."""
        for pages, held in ((self.cache.k, self.k), (self.cache.v, self.v)):
            for row, dense in enumerate(held):
                at = torch.arange(dense.shape[0])
                pages[self.table[row, at // PAGE].to(DEVICE), (at % PAGE).to(DEVICE)] = dense.bfloat16().to(DEVICE)


def is_correct(step: Step, out: torch.Tensor) -> bool:
    """Whether every live row is as near as bf16 factors and a bf16 output allow."""
    got = out[: step.expected.shape[0]].double().cpu()
    eps = torch.finfo(torch.bfloat16).eps
    return bool(((got - step.expected).abs() <= eps * (step.weighted + step.expected.abs()) + 1e-5).all())
