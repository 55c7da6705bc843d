"""Who is measured: Quire's own kernels, and what a user of torch would write without it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache

Run = Callable[[], torch.Tensor]
Contestant = Callable[[torch.Tensor, KVCache, Batch], Run]


def own(q: torch.Tensor, cache: KVCache, batch: Batch) -> Run:
    """`quire.attend`, every check that it always makes included."""
    return lambda: attend(q, cache, batch)


def gather_sdpa(q: torch.Tensor, cache: KVCache, batch: Batch) -> Run:
    """For each sequence: gather its pages with index_select, pack the group as query rows, call torch's SDPA. Masks are made
    beforehand and not timed."""
    table, size, kv_heads, dim = batch.page_table.long(), cache.page_size, cache.kv_heads, cache.head_dim
    group = q.shape[1] // kv_heads
    rows = []
    starts = batch.q_starts.tolist()
    for i, kv_len in enumerate(batch.kv_lens.tolist()):
        q_len = starts[i + 1] - starts[i]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len).repeat(group, 1) if q_len > 1 else None
        rows.append((slice(starts[i], starts[i + 1]), q_len, kv_len, table[i, : -(-kv_len // size)], seen))

    @torch.no_grad()
    def run() -> torch.Tensor:
        out = torch.empty_like(q)
        for tokens, q_len, kv_len, ids, seen in rows:
            k, v = (pages.index_select(0, ids).view(-1, kv_heads, dim)[:kv_len].transpose(0, 1) for pages in (cache.k, cache.v))
            packed = q[tokens].view(q_len, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * q_len, dim)
            o = torch.nn.functional.scaled_dot_product_attention(packed, k[None], v[None], attn_mask=seen)
            out[tokens] = o.view(kv_heads, group, q_len, dim).permute(2, 0, 1, 3).reshape(q_len, -1, dim)
        return out

    return run


CONTESTANTS: dict[str, Contestant] = {"quire": own, "gather + SDPA": gather_sdpa}
