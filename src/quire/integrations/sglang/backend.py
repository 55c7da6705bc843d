"""The attention backend of SGLang: metadata of a pass, CUDA graphs, and the calls of the layers."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec

from quire.attend import attend
from quire.errors import ArgumentError, describe
from quire.integrations.sglang.graph_buffers import GraphBuffers
from quire.integrations.sglang.layer import LayerCaches, LayerOptions
from quire.integrations.sglang.metadata import PassMetadata, RequestTable, build


class QuireAttnBackend(AttentionBackend):
    """Attention by `quire.attend` over the engine's own memory, in full form: the new tokens are stored first, by the engine's
    own pool. Every mode of a forward pass is one call per layer."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any):
        super().__init__()
        pool = runner.token_to_kv_pool
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = runner.kv_index_translator
        self.page_size: int = runner.page_size or 1
        self.window_pool = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None
        self.table = RequestTable(runner.req_to_token_pool.req_to_token, self.page_size, self.window_pool)
        self.caches = LayerCaches(pool, self.page_size)
        self.options = LayerOptions(batch_invariant=get_exec().deterministic.enable_deterministic_inference)
        self.forward_metadata: PassMetadata | None = None
        self.graphs: GraphBuffers | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The metadata of a pass outside of CUDA graphs."""
        self.forward_metadata = build(forward_batch, self.table)
        self.forward_metadata.window_slots = self._window_slots(forward_batch)

    def _window_slots(self, forward_batch: Any) -> torch.Tensor | None:
        if self.window_pool is None or forward_batch.out_cache_loc is None:
            return None
        planned = self.kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)
        return self.window_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc) if planned is None else planned

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the buffers that captured graphs read."""
        self.graphs = GraphBuffers(self.table, max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a padding sequence: its one new token."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture: makes the metadata over the graph's buffers. Before a capture or replay: fills what needs the sizes
        of this batch. Page tables and lengths are filled inside the graph."""
        if self.graphs is None:
            raise ArgumentError("init_cuda_graph_state", "not called", "a call before the first capture")
        if in_capture:
            self.forward_metadata = self.graphs.metadata(forward_batch)
        self.graphs.fill_outside(forward_batch, None if in_capture else self._window_slots(forward_batch))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recorded in the graph: reads the request table and the lengths as they are when the graph is replayed."""
        if self.graphs is not None:
            self.graphs.fill_inside(forward_batch)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> Any:
        """One new token for each sequence."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, features)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> Any:
        """Prefill, prefill after a cached prefix, both mixed with decode, and speculative verification."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, features)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool,
        features: dict[str, Any],
    ) -> Any:
        metadata = self.forward_metadata
        assert metadata is not None
        sinks, with_lse = features.pop("sinks", None), bool(features.pop("return_lse", False) or forward_batch.mha_return_lse)
        for name, value in features.items():
            if value is not None:
                raise ArgumentError(name, describe(value), "None: the attention backend 'quire' does not have this feature")
        if save_kv_cache and k is not None and v is not None:
            self._store(layer, forward_batch, k, v, metadata)
        if layer.is_cross_attention:
            batch = metadata.cross
            if batch is None:
                raise ArgumentError("encoder_lens", "None", f"the encoder's lengths: layer {layer.layer_id} attends to an encoder")
        else:
            batch = metadata.window if self._is_in_window_pool(layer) else metadata.full
        tree = None if layer.is_cross_attention or metadata.mask is None else (metadata.mask, forward_batch.positions)
        options = self.options.of(layer, forward_batch.forward_mode.is_decode(), sinks, tree)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        given = getattr(forward_batch, "_attn_output", None)
        out = None if given is None else given.view(-1, layer.tp_q_head_num, layer.v_head_dim)[: rows.shape[0]]
        if with_lse:
            return attend(rows, self.caches.of(layer), batch, options, out=out, lse=True)
        return attend(rows, self.caches.of(layer), batch, options, out=out).flatten(1)

    def _is_in_window_pool(self, layer: RadixAttention) -> bool:
        return self.window_pool is not None and bool(self.window_pool.layers_mapping[layer.layer_id][1])

    def _store(self, layer: RadixAttention, forward_batch: Any, k: torch.Tensor, v: torch.Tensor, metadata: PassMetadata) -> None:
        """Stores the new tokens by the engine's pool, which quantises them in place: the caller's tensors are copied then."""
        where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.window_slots)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        if layer.k_scale is None:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale)
