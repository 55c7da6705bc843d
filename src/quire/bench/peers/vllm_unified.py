"""vLLM's `unified_attention` in Triton, with the buffers that its backend would give it for short batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quire.batch import Batch
from quire.bench.case import BenchCase
from quire.bench.implementations import BoundImplementation, Implementation
from quire.bench.peers import writer
from quire.bench.stream.implementations import StreamImplementation, copy_pages
from quire.bench.stream.setup import Planned, Setup

LEAST_PROGRAMS = 128
"""Below so many (sequence, key head) pairs vLLM cuts each sequence into segments."""
SEGMENTS = 16
SUPPORTED = {"softcap", "alibi", "sinks", "part_causal", "prefixes"}
"""Prefixes are not shared: every sequence reads them."""
PAGE = 16
"""Page sizes are multiples of it."""


def load() -> Implementation:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    def bind(case: BenchCase) -> BoundImplementation | None:
        w = case.workload
        if w.operation != "attend" or w.features - SUPPORTED or w.page_size % PAGE or w.format not in ("", "e4m3fn", "e5m2"):
            return None
        batch, cache, device, (_, q_heads, head_dim) = case.batch, case.cache, case.q.device, case.q.shape
        one, out, window = torch.ones((), device=device), case.out(), case.workload.window
        per_head = (batch.seqs, cache.kv_heads)
        call = partial(
            unified_attention,
            q=case.q,
            k=cache.k,
            v=cache.v,
            out=out,
            cu_seqlens_q=batch.q_starts,
            max_seqlen_q=batch.max_q_len,
            seqused_k=batch.kv_lens,
            max_seqlen_k=batch.max_kv_len,
            softmax_scale=head_dim**-0.5,
            causal=case.options.causal,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=batch.page_table,
            softcap=case.options.softcap or 0.0,
            alibi_slopes=case.options.alibi,
            sinks=case.options.sinks,
            q_descale=None,
            k_descale=(one if cache.k_scale is None else cache.k_scale).expand(per_head),
            v_descale=(one if cache.v_scale is None else cache.v_scale).expand(per_head),
            **_buffers(q_heads, cache.kv_heads, head_dim, device),
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if cache.format.quantised else KVQuantMode.NONE,
        )

        def run() -> torch.Tensor:
            call()
            return out

        return BoundImplementation(run, case.workload.dtype)

    return bind


def stream() -> StreamImplementation:
    """The implementation for a stream: its buffers are allocated once, pages are written by vLLM's writer."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    return partial(VllmUnifiedLayers, partial(unified_attention, kv_quant_mode=KVQuantMode.NONE), writer.load())


class VllmUnifiedLayers:
    is_peer = True

    def __init__(self, attention: Callable[..., Any], write: writer.Write, setup: Setup, fixed: Batch | None = None):
        model, device = setup.model, setup.device
        self.attention, self.write = attention, write
        self.model, self.caches = model, setup.caches()
        self.one = torch.ones((), device=device)
        self.buffers = _buffers(model.q_heads, model.kv_heads, model.head_dim, device)
        self.slots: torch.Tensor | None = None
        self.call: Any = None

    def plan(self, planned: Planned) -> None:
        batch, self.slots = planned.batch, planned.slots
        copy_pages(self.caches, batch)
        scales = self.one.expand(batch.seqs, self.model.kv_heads)
        self.call = partial(
            self.attention,
            cu_seqlens_q=batch.q_starts,
            max_seqlen_q=batch.max_q_len,
            seqused_k=batch.kv_lens,
            max_seqlen_k=batch.max_kv_len,
            softmax_scale=self.model.head_dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.page_table,
            softcap=0.0,
            q_descale=None,
            k_descale=scales,
            v_descale=scales,
            **self.buffers,
        )

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        cache = self.caches[layer]
        assert self.slots is not None
        self.write(k, v, cache, self.slots)
        self.call(q=q, k=cache.k, v=cache.v, out=out)


def _buffers(q_heads: int, kv_heads: int, head_dim: int, device: torch.device) -> dict[str, Any]:
    """What vLLM's backend allocates once for batches whose sequences are cut into segments."""
    most = LEAST_PROGRAMS // kv_heads
    padded = 1 << (head_dim - 1).bit_length()
    return {
        "seq_threshold_3D": most,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty(most, q_heads, SEGMENTS, padded, device=device),
        "softmax_segm_max": torch.empty(most, q_heads, SEGMENTS, device=device),
        "softmax_segm_expsum": torch.empty(most, q_heads, SEGMENTS, device=device),
    }
