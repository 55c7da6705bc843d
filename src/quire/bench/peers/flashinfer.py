"""FlashInfer's paged wrappers: decode on tensor cores for one new token each, prefill otherwise. Planned beforehand, as its users
do once a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.batch import Batch
from quire.bench.implementations import Implementation
from quire.bench.peers import writer
from quire.bench.peers.flashinfer_calls import bind
from quire.bench.stream.implementations import StreamImplementation, copy_pages
from quire.bench.stream.setup import Planned, Setup

WORKSPACE = 1 << 30
"""Bytes for partial results; what is left over costs nothing."""


def load() -> Implementation:
    import flashinfer

    return partial(bind, flashinfer, WORKSPACE)


def stream() -> StreamImplementation:
    """The implementation for a stream, planned once a step. Pages are written by vLLM's writer, as vLLM does with this backend."""
    import flashinfer

    return partial(FlashInferLayers, flashinfer, writer.load(), [])


class FlashInferLayers:
    is_peer = True

    def __init__(
        self, flashinfer: Any, write: writer.Write, workspaces: list[torch.Tensor], setup: Setup, fixed: Batch | None = None
    ):
        self.write = write
        self.model, self.device, self.dtype, self.caches = setup.model, setup.device, setup.fused.dtype, setup.caches()
        self.slots: torch.Tensor | None = None
        # One workspace for all wrappers: they never run at the same time.
        if not workspaces:
            workspaces.append(torch.zeros(WORKSPACE, dtype=torch.uint8, device=setup.device))
        (workspace,) = workspaces
        decode, prefill = ({}, {}) if fixed is None else _graph_buffers(fixed, setup.device)
        self.decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, **decode)
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **prefill)
        self.wrapper = self.prefill

    def plan(self, planned: Planned) -> None:
        batch, model, self.slots = planned.batch, self.model, planned.slots
        copy_pages(self.caches, batch)
        pages = csr(planned, model.page_size)
        heads = (model.q_heads, model.kv_heads, model.head_dim, model.page_size)
        types = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        if batch.max_q_len == 1:
            self.wrapper = self.decode
            self.decode.plan(*pages, *heads, **types)
        else:
            self.wrapper = self.prefill
            starts = torch.tensor([0, *planned.q_lens], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
            self.prefill.plan(starts, *pages, *heads, causal=True, **types)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        cache = self.caches[layer]
        assert self.slots is not None
        self.write(k, v, cache, self.slots)
        self.wrapper.run(q, (cache.k, cache.v), out=out)


def _graph_buffers(fixed: Batch, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the decode and the prefill wrapper for CUDA graphs: a captured graph reads these buffers."""
    indptr = torch.zeros(fixed.seqs + 1, dtype=torch.int32, device=device)
    last = torch.ones(fixed.seqs, dtype=torch.int32, device=device)
    indices = torch.zeros(fixed.page_table.numel(), dtype=torch.int32, device=device)
    decode = {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": indptr,
        "paged_kv_indices_buffer": indices,
        "paged_kv_last_page_len_buffer": last,
    }
    prefill = {
        "use_cuda_graph": True,
        "qo_indptr_buf": torch.zeros(fixed.seqs + 1, dtype=torch.int32, device=device),
        "paged_kv_indptr_buf": indptr,
        "paged_kv_indices_buf": indices,
        "paged_kv_last_page_len_buf": last,
    }
    return decode, prefill


def csr(planned: Planned, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages of a step in FlashInfer's form: offsets and lengths of last pages on the host, where its plan reads them, and page
    ids on the device, gathered there."""
    lens = torch.tensor(planned.kv_lens, dtype=torch.int32, device="cpu")
    counts = (lens + page_size - 1) // page_size
    indptr = torch.zeros(len(planned.kv_lens) + 1, dtype=torch.int32, device="cpu")
    indptr[1:] = counts.cumsum(0)
    table = planned.batch.page_table
    row = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts.long())
    column = torch.arange(int(indptr[-1]), device="cpu") - indptr[:-1].long()[row]
    at = (row * table.shape[1] + column).to(table.device, non_blocking=True)
    # A sequence without keys has a last page of 1 token among 0 pages.
    last = torch.where(lens > 0, (lens - 1) % page_size + 1, 1).int()
    return indptr, table.reshape(-1)[at].int(), last
