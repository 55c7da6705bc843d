"""vLLM's `unified_attention` in Triton, with the buffers that its backend would give it for short batches."""

from __future__ import annotations

from functools import partial

import torch

from quire.bench.case import Case
from quire.bench.contestants import Bound, Contestant

LEAST_PROGRAMS = 128
"""Below so many (sequence, key head) pairs vLLM cuts each sequence into segments."""
SEGMENTS = 16


def load() -> Contestant:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    def bind(case: Case) -> Bound | None:
        if case.workload.operation != "attend":
            return None
        batch, cache, device, (_, q_heads, head_dim) = case.batch, case.cache, case.q.device, case.q.shape
        one, out, window = torch.ones((), device=device), case.out(), case.workload.window
        per_head = (batch.seqs, cache.kv_heads)
        most = LEAST_PROGRAMS // cache.kv_heads
        padded = 1 << (head_dim - 1).bit_length()
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
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=batch.page_table,
            softcap=0.0,
            q_descale=None,
            k_descale=(one if cache.k_scale is None else cache.k_scale).expand(per_head),
            v_descale=(one if cache.v_scale is None else cache.v_scale).expand(per_head),
            seq_threshold_3D=most,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=torch.empty(most, q_heads, SEGMENTS, padded, device=device),
            softmax_segm_max=torch.empty(most, q_heads, SEGMENTS, device=device),
            softmax_segm_expsum=torch.empty(most, q_heads, SEGMENTS, device=device),
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if cache.format.quantised else KVQuantMode.NONE,
        )

        def run() -> torch.Tensor:
            call()
            return out

        return Bound(run, case.workload.dtype)

    return bind
