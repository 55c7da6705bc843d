"""What replays a stream: Quire's own kernels, what a user of torch would write without it, and the peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

import quire
from quire.batch import Batch
from quire.bench.stream.setup import Planned, Setup, StreamLayers

StreamImplementation = Callable[[Setup, Batch | None], StreamLayers]
"""Binds a setup. The batch, if there is one, has fixed buffers: all plans are made for it, in place, so that a captured graph of
the layers stays right."""


class QuireLayers:
    """`quire.step`, every check that it always makes included."""

    is_peer = False

    def __init__(self, setup: Setup, fixed: Batch | None = None, kernel: str | None = None):
        self.caches, self.kernel = setup.caches(), kernel
        self.batch = fixed

    def plan(self, planned: Planned) -> None:
        self.batch = planned.batch

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        assert self.batch is not None
        quire.step(q, k, v, self.caches[layer], self.batch, out=out, kernel=self.kernel)


class GatherSdpa:
    """For each sequence: gather its pages with index_select, pack the group as query rows, call torch's SDPA. Masks and page lists
    are part of the plan."""

    is_peer = True

    def __init__(self, setup: Setup, fixed: Batch | None = None):
        self.model, self.caches = setup.model, setup.caches()
        self.rows: list[tuple[slice, int, int, torch.Tensor, torch.Tensor | None]] = []
        self.slots: torch.Tensor | None = None

    def plan(self, planned: Planned) -> None:
        copy_pages(self.caches, planned.batch)
        table, size = planned.batch.page_table.long(), self.model.page_size
        group = self.model.q_heads // self.model.kv_heads
        self.rows, self.slots, token = [], planned.slots, 0
        for ids, q_len, kv_len in zip(table, planned.q_lens, planned.kv_lens):
            seen = None
            if q_len > 1:
                seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=table.device).tril(kv_len - q_len).repeat(group, 1)
            self.rows.append((slice(token, token + q_len), q_len, kv_len, ids[: -(-kv_len // size)], seen))
            token += q_len

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        cache, kv_heads, dim = self.caches[layer], self.model.kv_heads, self.model.head_dim
        for pages, new in ((cache.k, k), (cache.v, v)):
            pages.view(-1, kv_heads, dim)[self.slots] = new
        for tokens, q_len, kv_len, ids, seen in self.rows:
            keys, values = (
                pages.index_select(0, ids).view(-1, kv_heads, dim)[:kv_len].transpose(0, 1) for pages in (cache.k, cache.v)
            )
            packed = q[tokens].view(q_len, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
            o = torch.nn.functional.scaled_dot_product_attention(packed, keys[None], values[None], attn_mask=seen)
            out[tokens] = o.view(kv_heads, -1, q_len, dim).permute(2, 0, 1, 3).reshape(q_len, -1, dim)


def copy_pages(caches: list[quire.KVCache], batch: Batch) -> None:
    """Copy-on-write for implementations whose writer does not do it."""
    if batch.copies:
        for cache in caches:
            cache.copy_pages(batch.copies)


def _peer(module: str, setup: Setup, fixed: Batch | None) -> StreamLayers:
    """A peer on the CPU, imported when it is used."""
    layers: StreamLayers = import_module(f"quire.bench.peers.{module}").stream()(setup, fixed)
    return layers


CPU_IMPLEMENTATIONS: dict[str, StreamImplementation] = {
    "quire": QuireLayers,
    "quire torch": partial(QuireLayers, kernel="torch"),
    "gather + SDPA": GatherSdpa,
    "vLLM": partial(_peer, "vllm_cpu"),
}
