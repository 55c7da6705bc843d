"""The metadata of a step: vLLM's index tensors as a `quire.Batch`. Nothing is read on the host and nothing is copied, so a captured
CUDA graph sees the lengths and pages of later steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec

from quire.batch import Batch
from quire.integrations.engines import EngineError
from quire.integrations.vllm.spans import LayerView, image_ranges, spans_of


@dataclass
class QuireMetadata(AttentionMetadata):
    """One step of the layers of a cache group."""

    batch: Batch
    """The sequences."""
    num_actual_tokens: int
    """Rows of q that belong to the step."""
    slot_mapping: torch.Tensor
    """The slot of each new token; vLLM's cross attention replaces it by the slots of the encoder's tokens."""
    causal: bool | torch.Tensor = True
    """Whether queries see only earlier keys; a bool tensor decides for each sequence."""
    images: torch.Tensor | None = None
    """The images of the sequences, whose tokens see each other: `image_ranges`."""
    _seen: dict[tuple[LayerView, bool], Batch] = field(default_factory=dict)

    def batch_for(self, view: LayerView) -> Batch:
        """The batch for layers of which each query sees this: with spans if causality and a window do not say it."""
        if self.images is None and view.lookback < 0:
            return self.batch
        if self.causal is not True:
            raise EngineError("causal: got a step that is not causal, with images or chunks; Quire supports only causal ones")
        # Spans that are computed during a capture belong to the graph.
        key = (view, self.batch.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        if key not in self._seen:
            self._seen[key] = self.batch.with_spans(spans_of(self.batch, self.num_actual_tokens, self.images, view))
        return self._seen[key]


class QuireMetadataBuilder(AttentionMetadataBuilder[QuireMetadata]):
    """Makes the metadata of a step from vLLM's common metadata."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    # The batch aliases vLLM's persistent buffers: there is nothing to update.
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.is_cross = isinstance(kv_cache_spec, CrossAttentionSpec)
        self.is_encoder = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        ranks, rank = get_dcp_world_size_and_rank(getattr(kv_cache_spec, "dcp_sharded", False))
        self.shard = (rank, ranks, vllm_config.parallel_config.cp_kv_cache_interleave_size) if ranks > 1 else None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Every batch, except for cross attention, where prompts of several tokens get tensors of their own, and for models with
        images whose tokens see each other: a step without images is captured, and with one new token of each sequence they make
        no difference."""
        model = vllm_config.model_config
        if isinstance(kv_cache_spec, CrossAttentionSpec) or (model is not None and model.is_mm_prefix_lm):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> QuireMetadata:
        """The metadata of a step. `common_prefix_len` is always 0 in the supported versions of vLLM."""
        common = common_attn_metadata
        refuse_unsupported(common)
        if self.is_cross:
            batch = cross_batch(common)
        else:
            table = common.block_table_tensor
            if self.is_encoder:
                # Keys and values come with the call; there are no pages.
                table = table.new_empty((common.num_reqs, 0), dtype=torch.int32)
            extra: dict[str, Any] = {} if self.shard is None else {"shard": self.shard}
            batch = Batch(
                table,
                common.seq_lens,
                common.query_start_loc,
                max_q_len=common.max_query_len,
                max_kv_len=common.max_seq_len,
                **extra,
            )
        images = None if self.is_cross or self.is_encoder else image_ranges(common)
        return QuireMetadata(batch, common.num_actual_tokens, common.slot_mapping, common.causal, images)

    def update_block_table(self, metadata: QuireMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> QuireMetadata:
        """The metadata of another cache group, which differs in its pages."""
        old = metadata.batch
        extra: dict[str, Any] = {} if self.shard is None else {"shard": self.shard}
        batch = Batch(blk_table, old.kv_lens, old.q_starts, max_q_len=old.max_q_len, max_kv_len=old.max_kv_len, **extra)
        return QuireMetadata(batch, metadata.num_actual_tokens, slot_mapping, metadata.causal, metadata.images)

    def update_draft_decode_metadata(self, metadata: QuireMetadata) -> None:
        """Nothing to do: the batch aliases the buffers that vLLM updates."""


def refuse_unsupported(common: CommonAttentionMetadata) -> None:
    """Raises if a step asks for something that would be ignored otherwise. vLLM's validation and the layer's constructor refuse
    these when the engine starts."""
    if common.rswa_prefix_lens is not None:
        raise EngineError("rswa_prefix_lens: got a value; Quire supports only None (start vLLM with another attention backend)")


def cross_batch(common: CommonAttentionMetadata) -> Batch:
    """The batch of cross attention, where keys are the encoder's tokens and queries are not among them. Each query is then a
    sequence of its own: `Batch` otherwise requires as many keys as new tokens."""
    table, lens, starts = common.block_table_tensor, common.seq_lens, common.query_start_loc
    if common.max_query_len > 1:
        tokens, seqs = common.num_actual_tokens, lens.shape[0]
        at = torch.arange(tokens + 1, dtype=starts.dtype, device=starts.device)
        seq = torch.searchsorted(starts[1:].contiguous(), at[:-1], right=True).clamp(max=seqs - 1)
        table, lens, starts = table[seq], lens[seq], at
    return Batch(table, lens, starts, max_q_len=1, max_kv_len=common.max_seq_len)
