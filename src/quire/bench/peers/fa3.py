"""FlashAttention-3 through vLLM's Python function, scheduled ahead of time as vLLM's backend does once a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.batch import Batch
from quire.bench.case import Q_SCALE, Case
from quire.bench.contestants import Bound, Contestant
from quire.bench.peers import writer
from quire.bench.stream.contestants import Contestant as StreamContestant
from quire.bench.stream.contestants import copy_pages
from quire.bench.stream.setup import Planned, Setup

VERSION = 3


def load() -> Contestant:
    from vllm.vllm_flash_attn import flash_attn_interface as flash_attn

    if not flash_attn.is_fa_version_supported(VERSION):
        raise ImportError(flash_attn.fa_version_unsupported_reason(VERSION))

    def bind(case: Case) -> Bound | None:
        if case.workload.operation != "attend":
            return None
        batch, cache, out, window = case.batch, case.cache, case.out(), case.workload.window
        # Over an 8-bit cache the queries are 8-bit too: quantised beforehand, as vLLM's attention layer does.
        q_format = cache.format.name if cache.format.quantised else case.workload.dtype
        q = case.query(q_format)
        sides = (-1, -1) if window is None else (window - 1, 0)
        scales = {}
        if cache.k_scale is not None and cache.v_scale is not None:
            q_scale = torch.full((), Q_SCALE, device=q.device)
            by_name = {"q_descale": q_scale, "k_descale": cache.k_scale, "v_descale": cache.v_scale}
            scales = {name: scale.expand(batch.seqs, cache.kv_heads) for name, scale in by_name.items()}
        metadata = flash_attn.get_scheduler_metadata(
            batch_size=batch.seqs,
            max_seqlen_q=batch.max_q_len,
            max_seqlen_k=batch.max_kv_len,
            num_heads_q=q.shape[1],
            num_heads_kv=cache.kv_heads,
            headdim=q.shape[2],
            cache_seqlens=batch.kv_lens,
            qkv_dtype=q.dtype,
            cu_seqlens_q=batch.q_starts,
            page_size=cache.page_size,
            causal=True,
            window_size=sides,
            num_splits=0,
        )
        call = partial(
            flash_attn.flash_attn_varlen_func,
            q=q,
            k=cache.k,
            v=cache.v,
            out=out,
            cu_seqlens_q=batch.q_starts,
            max_seqlen_q=batch.max_q_len,
            seqused_k=batch.kv_lens,
            max_seqlen_k=batch.max_kv_len,
            softmax_scale=q.shape[2] ** -0.5,
            causal=True,
            window_size=list(sides),
            block_table=batch.page_table,
            scheduler_metadata=metadata,
            num_splits=0,
            fa_version=VERSION,
            **scales,
        )

        def run() -> torch.Tensor:
            call()
            return out

        return Bound(run, q_format)

    return bind


MOST_SPLITS = 32
"""The number of splits of a captured graph, whose workspace must not change: vLLM's own choice."""


def stream() -> StreamContestant:
    """The contestant of a stream: scheduled once a step, pages written by vLLM's writer."""
    from vllm.vllm_flash_attn import flash_attn_interface as flash_attn

    if not flash_attn.is_fa_version_supported(VERSION):
        raise ImportError(flash_attn.fa_version_unsupported_reason(VERSION))
    write = writer.load()

    class Layers:
        is_peer = True

        def __init__(self, setup: Setup, fixed: Batch | None = None):
            self.model, self.caches, self.dtype = setup.model, setup.caches(), setup.fused.dtype
            self.splits = 0 if fixed is None else MOST_SPLITS
            self.fixed = fixed is not None
            self.metadata: torch.Tensor | None = None
            self.slots: torch.Tensor | None = None
            self.call: Any = None

        def plan(self, planned: Planned) -> None:
            batch, self.slots = planned.batch, planned.slots
            copy_pages(self.caches, batch)
            metadata = flash_attn.get_scheduler_metadata(
                batch_size=batch.seqs,
                max_seqlen_q=batch.max_q_len,
                max_seqlen_k=batch.max_kv_len,
                num_heads_q=self.model.q_heads,
                num_heads_kv=self.model.kv_heads,
                headdim=self.model.head_dim,
                cache_seqlens=batch.kv_lens,
                qkv_dtype=self.dtype,
                cu_seqlens_q=batch.q_starts,
                page_size=self.model.page_size,
                causal=True,
                window_size=(-1, -1),
                num_splits=self.splits,
            )
            # A graph goes on reading the tensor that it was captured with.
            self.metadata = metadata if self.metadata is None or not self.fixed else self.metadata.copy_(metadata)
            self.call = partial(
                flash_attn.flash_attn_varlen_func,
                cu_seqlens_q=batch.q_starts,
                max_seqlen_q=batch.max_q_len,
                seqused_k=batch.kv_lens,
                max_seqlen_k=batch.max_kv_len,
                softmax_scale=self.model.head_dim**-0.5,
                causal=True,
                window_size=[-1, -1],
                block_table=batch.page_table,
                scheduler_metadata=self.metadata,
                num_splits=self.splits,
                fa_version=VERSION,
            )

        def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            cache = self.caches[layer]
            assert self.slots is not None
            write(k, v, cache, self.slots)
            self.call(q=q, k=cache.k, v=cache.v, out=out)

    return Layers
