"""FlashInfer's paged wrappers: decode on tensor cores for one new token each, prefill otherwise. Planned beforehand, as its users
do once a step."""

from __future__ import annotations

import torch

from quire.bench.case import Case
from quire.bench.contestants import Bound, Contestant

WORKSPACE = 1 << 30
"""Bytes for partial results; what is left over costs nothing."""


def load() -> Contestant:
    import flashinfer

    def bind(case: Case) -> Bound | None:
        if case.workload.operation != "attend":
            return None
        batch, cache, q, out, window = case.batch, case.cache, case.q, case.out(), case.workload.window
        lists = case.page_lists()
        counts = torch.tensor([0, *map(len, lists)], device="cpu").cumsum(0).int().to(q.device)
        last = (batch.kv_lens - 1) % cache.page_size + 1
        pages = (counts, torch.cat(lists), last)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        heads = (q.shape[1], cache.kv_heads, q.shape[2], cache.page_size)
        types = {"q_data_type": q.dtype, "kv_data_type": cache.k.dtype}
        left = -1 if window is None else window - 1
        if batch.max_q_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(*pages, *heads, window_left=left, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(batch.q_starts, *pages, *heads, causal=True, window_left=left, **types)
        scales = {}
        if cache.k_scale is not None and cache.v_scale is not None:
            scales = {"k_scale": float(cache.k_scale), "v_scale": float(cache.v_scale)}

        def run() -> torch.Tensor:
            wrapper.run(q, (cache.k, cache.v), out=out, **scales)
            return out

        return Bound(run, case.workload.dtype)

    return bind
