"""FlashAttention-3 through vLLM's Python function, scheduled ahead of time as vLLM's backend does once a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.batch import Batch
from quire.bench.case import Q_SCALE, BenchCase
from quire.bench.implementations import BoundImplementation, Implementation
from quire.bench.peers import writer
from quire.bench.peers.pages import pages_of
from quire.bench.stream.implementations import StreamImplementation, copy_pages
from quire.bench.stream.setup import Planned, Setup
from quire.bench.workloads import Workload

VERSION = 3
MOST_SPLITS = 32
"""The number of splits of a captured graph, whose workspace must not change: vLLM's own choice."""
SUPPORTED = {"v_dim", "latent", "softcap", "sinks", "select", "prefixes", "batch_invariant"}
"""Prefixes are not shared: every sequence reads them."""
LARGEST = 256
"""The largest head_dim."""
ROTATED = 64
"""Elements of a latent key that are not values: the head_dim of the kernel, and values come with an argument of their own."""


def load() -> Implementation:
    return partial(_bind, _package())


def stream() -> StreamImplementation:
    """The implementation for a stream: scheduled once a step, pages written by vLLM's writer."""
    return partial(Fa3Layers, _package(), writer.load())


def _package() -> Any:
    from vllm.vllm_flash_attn import flash_attn_interface as flash_attn

    if not flash_attn.is_fa_version_supported(VERSION):
        raise ImportError(flash_attn.fa_version_unsupported_reason(VERSION))
    return flash_attn


def _lengths(batch: Batch) -> dict[str, Any]:
    """The arguments of a call that come from the batch."""
    return {
        "cu_seqlens_q": batch.q_starts,
        "max_seqlen_q": batch.max_q_len,
        "seqused_k": batch.kv_lens,
        "max_seqlen_k": batch.max_kv_len,
        "block_table": batch.page_table,
    }


def _schedule(
    flash_attn: Any, batch: Batch, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int, **how: Any
) -> torch.Tensor:
    metadata: torch.Tensor = flash_attn.get_scheduler_metadata(
        batch_size=batch.seqs,
        max_seqlen_q=batch.max_q_len,
        max_seqlen_k=batch.max_kv_len,
        num_heads_q=q_heads,
        num_heads_kv=kv_heads,
        headdim=head_dim,
        cache_seqlens=batch.kv_lens,
        qkv_dtype=dtype,
        cu_seqlens_q=batch.q_starts,
        page_size=page_size,
        causal=True,
        **how,
    )
    return metadata


def _supports(w: Workload) -> bool:
    if w.operation != "attend" or w.features - SUPPORTED or w.format not in ("", "e4m3fn"):
        return False
    if w.latent:
        return not w.format and w.head_dim - w.v_dim == ROTATED
    if w.v_dim:
        return not w.format and (w.head_dim, w.v_dim) == (192, 128)
    return w.head_dim <= LARGEST and ("sinks" not in w.options or w.dtype == "bf16")


def _bind(flash_attn: Any, case: BenchCase) -> BoundImplementation | None:
    w, cache, pages = case.workload, case.cache, pages_of(case)
    if pages is None or not _supports(w):
        return None
    batch, out = pages.batch, case.out()
    # Over an 8-bit cache the queries are 8-bit too: quantised beforehand, as vLLM's attention layer does.
    q_format = cache.format.name if cache.format.quantised else w.dtype
    q, k, v = case.query(q_format), pages.k, pages.v
    given: dict[str, Any] = {}
    if w.latent:
        # As vLLM's MLA backend: the part that is also the value, and the rotated part.
        given["q_v"] = q[..., : w.v_dim].contiguous()
        q, k = q[..., w.v_dim :].contiguous(), k[..., w.v_dim :]
    if cache.k_scale is not None and cache.v_scale is not None:
        q_scale = torch.full((), Q_SCALE, device=q.device)
        by_name = {"q_descale": q_scale, "k_descale": cache.k_scale, "v_descale": cache.v_scale}
        given |= {name: scale.expand(batch.seqs, cache.kv_heads) for name, scale in by_name.items()}
    softcap, sinks = case.options.softcap, case.options.sinks
    given |= {} if softcap is None else {"softcap": softcap}
    given |= {} if sinks is None else {"s_aux": sinks}
    schedule: dict[str, Any] = {"headdim_v": w.v_dim} if w.v_dim else {}
    schedule |= {} if softcap is None else {"has_softcap": True}
    sides = (-1, -1) if w.window is None else (w.window - 1, 0)
    splits = 1 if w.batch_invariant else 0
    sizes = (q.shape[1], cache.kv_heads, q.shape[2], q.dtype, pages.page_size)
    call = partial(
        flash_attn.flash_attn_varlen_func,
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_scale=case.q.shape[2] ** -0.5 if w.scale is None else w.scale,
        causal=True,
        window_size=list(sides),
        scheduler_metadata=_schedule(flash_attn, batch, *sizes, window_size=sides, num_splits=splits, **schedule),
        num_splits=splits,
        fa_version=VERSION,
        **_lengths(batch),
        **given,
    )

    def run() -> torch.Tensor:
        call()
        return out

    return BoundImplementation(run, q_format)


class Fa3Layers:
    is_peer = True

    def __init__(self, flash_attn: Any, write: writer.Write, setup: Setup, fixed: Batch | None = None):
        self.flash_attn, self.write = flash_attn, write
        self.model, self.caches, self.dtype = setup.model, setup.caches(), setup.fused.dtype
        self.splits = 0 if fixed is None else MOST_SPLITS
        self.fixed = fixed is not None
        self.metadata: torch.Tensor | None = None
        self.slots: torch.Tensor | None = None
        self.call: Any = None

    def plan(self, planned: Planned) -> None:
        batch, model, self.slots = planned.batch, self.model, planned.slots
        copy_pages(self.caches, batch)
        sizes = (model.q_heads, model.kv_heads, model.head_dim, self.dtype, model.page_size)
        metadata = _schedule(self.flash_attn, batch, *sizes, window_size=(-1, -1), num_splits=self.splits)
        # A graph goes on reading the tensor that it was captured with.
        self.metadata = metadata if self.metadata is None or not self.fixed else self.metadata.copy_(metadata)
        self.call = partial(
            self.flash_attn.flash_attn_varlen_func,
            softmax_scale=model.head_dim**-0.5,
            causal=True,
            window_size=[-1, -1],
            scheduler_metadata=self.metadata,
            num_splits=self.splits,
            fa_version=VERSION,
            **_lengths(batch),
        )

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        cache = self.caches[layer]
        assert self.slots is not None
        self.write(k, v, cache, self.slots)
        self.call(q=q, k=cache.k, v=cache.v, out=out)
