"""Whether a result is right: no speed is printed for a wrong one."""

from __future__ import annotations

import torch

from quire import reference
from quire.batch import Batch
from quire.cache.kv_cache import KVCache

HEADS = 2
"""How many key heads of each sequence are compared, and at most how many of its queries: float64 is slow, faults are not shy."""
QUERIES = 48


def error_and_budget(out: torch.Tensor, q: torch.Tensor, cache: KVCache, batch: Batch) -> tuple[float, float]:
    """The largest error against float64, over a sample of heads and queries of every sequence, and what is allowed: twice the error
    of a plain kernel that computes in fp32 and rounds weights and output to the query's type, and one rounding of the output."""
    size, group = cache.page_size, q.shape[1] // cache.kv_heads
    heads = torch.arange(0, cache.kv_heads, max(1, cache.kv_heads // HEADS))[:HEADS]
    q_heads = (heads[:, None] * group + torch.arange(group)).flatten()
    starts, errors, plain_errors, largest = batch.q_starts.tolist(), [], [], 0.0
    for i, kv_len in enumerate(batch.kv_lens.tolist()):
        q_len = starts[i + 1] - starts[i]
        pages = batch.page_table[i, : -(-kv_len // size)].long()
        k, v = (x[pages].flatten(0, 1)[:kv_len, heads] for x in (cache.k, cache.v))
        # The first queries of the sequence and the last, over the keys up to the last of them.
        for first in {0, max(0, q_len - QUERIES)}:
            count = min(QUERIES, q_len - first)
            end = kv_len - q_len + first + count
            rows = slice(starts[i] + first, starts[i] + first + count)
            want, _ = reference.attention(q[rows][:, q_heads], k[:end], v[:end])
            plain = _plain(q[rows][:, q_heads], k[:end], v[:end])
            errors.append(float((out[rows][:, q_heads].double() - want).abs().max()))
            plain_errors.append(float((plain.double() - want).abs().max()))
            largest = max(largest, float(want.abs().max()))
    worst = max(errors, key=lambda e: float("inf") if e != e else e, default=0.0)
    return worst, 2 * max(plain_errors, default=0.0) + torch.finfo(q.dtype).eps / 2 * largest


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence in fp32, weights and output rounded to the query's type."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[2] ** -0.5
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights.float(), v).to(q.dtype)
