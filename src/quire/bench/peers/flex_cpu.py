"""torch's FlexAttention on a CPU: compiled when it is first called, over the pages where they lie. Masks are made beforehand.

Sequences with as many new tokens each are one call, since it takes a rectangle. Its mask goes by pages; those that every query sees
go without one."""

from __future__ import annotations

from typing import Any

import torch

from quire.bench.case import BenchCase
from quire.bench.implementations import BoundImplementation

QUERIES = 128
"""How many share a row of the mask."""


def implementation(case: BenchCase) -> BoundImplementation | None:
    from torch.nn.attention.flex_attention import flex_attention

    w, q, cache = case.workload, case.q, case.cache
    if w.operation != "attend" or w.form != "full" or w.window is not None or cache.format.quantised or w.features:
        return None
    dim = cache.head_dim
    k, v = (pages.flatten(0, 1).transpose(0, 1)[None] for pages in (cache.k, cache.v))
    compiled = torch.compile(flex_attention, dynamic=False)
    starts = case.batch.q_starts.tolist()
    jobs = []
    for new in dict.fromkeys(new for new, _ in w.sequences):
        seqs = [i for i, row in enumerate(w.sequences) if row[0] == new]
        tokens = torch.cat([torch.arange(starts[i], starts[i + 1], device="cpu") for i in seqs])
        jobs.append((tokens, new, len(seqs), _mask(case, seqs, new)))

    @torch.no_grad()
    def run() -> torch.Tensor:
        out = torch.empty_like(q)
        for tokens, new, count, mask in jobs:
            packed = q[tokens].view(count, new, -1, dim).transpose(1, 2)
            keys, values = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
            o: Any = compiled(packed, keys, values, block_mask=mask, enable_gqa=True)
            out[tokens] = o.transpose(1, 2).reshape(count * new, -1, dim)
        return out

    return BoundImplementation(run, w.dtype)


def _mask(case: BenchCase, seqs: list[int], new: int) -> Any:
    """Which pages each sequence reads, those that all of its queries see and the others, and what they see of a page."""
    from torch.nn.attention.flex_attention import BlockMask

    size, pages, lists = case.cache.page_size, case.cache.pages, case.page_lists()
    first = torch.full((len(seqs), pages), 1 << 30, dtype=torch.int32, device="cpu")  # the position of a page's first key
    counts = torch.zeros(2, len(seqs), dtype=torch.int32, device="cpu")
    ids = torch.zeros(2, len(seqs), pages, dtype=torch.int32, device="cpu")
    context = torch.tensor([case.workload.sequences[i][1] for i in seqs], dtype=torch.int32, device="cpu")
    for row, i in enumerate(seqs):
        mine, seen = lists[i], (int(context[row]) + 1) // size
        first[row, mine.long()] = torch.arange(len(mine), dtype=torch.int32, device="cpu") * size
        for kind, some in enumerate((mine[seen:], mine[:seen])):
            counts[kind, row], ids[kind, row, : len(some)] = len(some), some

    def sees(b: Any, h: Any, query: Any, key: Any) -> Any:
        return first[b, key // size] + key % size <= context[b] + query

    strips = -(-new // QUERIES)
    (some, whole), (some_ids, whole_ids) = counts[:, :, None, None], ids[:, :, None, None]
    return BlockMask.from_kv_blocks(
        some.expand(-1, 1, strips).contiguous(),
        some_ids.expand(-1, 1, strips, -1).contiguous(),
        whole.expand(-1, 1, strips).contiguous(),
        whole_ids.expand(-1, 1, strips, -1).contiguous(),
        BLOCK_SIZE=(QUERIES, size),
        mask_mod=sees,
        seq_lengths=(new, pages * size),
    )
