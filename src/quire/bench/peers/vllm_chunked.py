"""vLLM's `chunked_prefill_paged_decode` in Triton: a prefill kernel that takes new tokens as arguments, and a decode kernel."""

from __future__ import annotations

from functools import partial

import torch

from quire.bench.case import BenchCase
from quire.bench.implementations import BoundImplementation, Implementation

SUPPORTED = {"alibi", "sinks", "prefixes"}
"""Prefixes are not shared: every sequence reads them."""
PAGE = 16
"""Page sizes are multiples of it."""


def load() -> Implementation:
    from vllm.v1.attention.ops.chunked_prefill_paged_decode import chunked_prefill_paged_decode

    def bind(case: BenchCase) -> BoundImplementation | None:
        w = case.workload
        if w.operation != "attend" or w.features - SUPPORTED or w.page_size % PAGE or w.format not in ("", "e4m3fn"):
            return None
        batch, cache, out = case.batch, case.cache, case.out()
        one = torch.ones((), device=case.q.device)
        # K as [pages, kv_heads, head_dim / x, page_size, x] with x of 16 bytes, V as [pages, kv_heads, head_dim, page_size].
        x = 16 // cache.format.itemsize
        k = cache.k_bytes.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous().view(cache.k.dtype)
        v = cache.v_bytes.permute(0, 2, 3, 1).contiguous().view(cache.v.dtype)
        call = partial(
            chunked_prefill_paged_decode,
            query=case.q,
            key=case.k,
            value=case.v,
            output=out,
            kv_cache_dtype="fp8" if cache.format.quantised else "auto",
            key_cache=k,
            value_cache=v,
            block_table=batch.page_table,
            query_start_loc=batch.q_starts,
            seq_lens=batch.kv_lens,
            max_seq_len=batch.max_kv_len,
            max_query_len=batch.max_q_len,
            k_scale=one if cache.k_scale is None else cache.k_scale,
            v_scale=one if cache.v_scale is None else cache.v_scale,
            alibi_slopes=case.options.alibi,
            sliding_window=w.window,
            sinks=case.options.sinks,
            sm_scale=case.q.shape[2] ** -0.5,
        )

        def run() -> torch.Tensor:
            call()
            return out

        return BoundImplementation(run, case.workload.dtype)

    return bind
