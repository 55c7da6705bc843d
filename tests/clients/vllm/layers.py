"""Layers of vLLM without an engine: vLLM's own classes for caches, metadata and scales, around Quire's layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, get_kv_quant_mode

from quire.conformance.cases.call import KernelCall
from quire.integrations.vllm.backend import QuireBackend
from quire.integrations.vllm.cache_view import cache_view, format_name
from quire.integrations.vllm.impl import QuireImpl

LAYERS, PAGES, PAGE_SIZE = 3, 48, 16
FP8 = torch.float8_e4m3fn


@dataclass
class Sequences:
    """Lengths of a batch, and of its new tokens."""

    kv_lens: tuple[int, ...] = (37, 5, 64, 1)
    q_lens: tuple[int, ...] = (1, 5, 9, 1)

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)


def layer_with_scales(k_scale: float = 1.0, v_scale: float = 1.0) -> torch.nn.Module:
    """What a layer of vLLM has besides its weights."""
    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer._k_scale.fill_(k_scale)
    layer._v_scale.fill_(v_scale)
    layer.layer_name = "model.layers.1.self_attn.attn"
    return layer


def cache_tensor(layout: KVCacheLayout, spec: FullAttentionSpec, dtype: torch.dtype) -> torch.Tensor:
    """One layer's view of memory in a layout of vLLM, filled with bytes that no result may contain."""
    spec = QuireBackend.customize_spec(spec)
    content = (spec.state_content_bytes or 0) // dtype.itemsize or spec.head_size + spec.head_size_v
    logical = (LAYERS, PAGES, spec.num_kv_heads, spec.block_size, content)
    memory = torch.empty([logical[axis] for axis in layout.stride_order], dtype=dtype)
    memory.view(torch.uint8).fill_(0x7F)
    inverse = [layout.stride_order.index(axis) for axis in range(5)]
    return memory.permute(inverse)[1]


def common_metadata(sequences: Sequences, causal: bool | torch.Tensor = True) -> CommonAttentionMetadata:
    """vLLM's metadata of a step, with its types: int32, and int64 slots."""
    seqs = len(sequences.kv_lens)
    columns = -(-max(sequences.kv_lens) // PAGE_SIZE)
    table = torch.randperm(PAGES)[: seqs * columns].view(seqs, columns).to(torch.int32)
    starts = torch.tensor([0, *torch.tensor(sequences.q_lens).cumsum(0).tolist()], dtype=torch.int32)
    slots = [
        int(table[i, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
        for i, (length, new) in enumerate(zip(sequences.kv_lens, sequences.q_lens))
        for at in range(length - new, length)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(sequences.kv_lens, dtype=torch.int32),
        num_reqs=seqs,
        num_actual_tokens=sequences.tokens,
        max_query_len=max(sequences.q_lens),
        max_seq_len=max(sequences.kv_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        causal=causal,
    )


class Step:
    """One step of one layer: a cache in a layout of vLLM that holds the context, and the new tokens."""

    def __init__(
        self,
        layout: KVCacheLayout = KVCacheLayout.LBHNC,
        cache_type: str = "auto",
        dtype: torch.dtype = torch.float32,
        sequences: Sequences | None = None,
        causal: bool | torch.Tensor = True,
        scales: tuple[float, float] = (1.0, 1.0),
        head_size: int = 32,
        images: dict[int, list[tuple[int, int]]] | None = None,
        clamps: bool = False,
        **features: Any,
    ):
        heads, kv_heads = 4, 2
        sequences = Sequences() if sequences is None else sequences
        self.features, self.causal, self.cache_type = features, causal, cache_type
        stored = dtype if cache_type == "auto" else kv_cache_dtype_str_to_dtype(cache_type, None)
        mode = get_kv_quant_mode(cache_type)
        spec = FullAttentionSpec(PAGE_SIZE, num_kv_heads=kv_heads, head_size=head_size, dtype=stored, kv_quant_mode=mode)
        self.pages = cache_tensor(layout, spec, stored)
        self.layer = layer_with_scales(*scales)
        self.impl = QuireImpl(heads, head_size, head_size**-0.5, kv_heads, kv_cache_dtype=cache_type, **features)
        self.layer.mm_prefix_clamp_sliding_window = clamps
        self.common = common_metadata(sequences, causal).replace(mm_req_doc_ranges=images)
        self.metadata = QuireBackend.get_builder_cls()(spec, ["layer"], VllmConfig(), torch.device("cpu")).build(0, self.common)
        self.q, self.k, self.v = torch.randn(sequences.tokens, heads + 2 * kv_heads, head_size, dtype=dtype).split(
            (heads, kv_heads, kv_heads), dim=1
        )
        self._write_context(sequences, kv_heads, head_size, dtype)

    def _write_context(self, sequences: Sequences, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
        """Writes the earlier tokens, as earlier steps did."""
        before = [length - new for length, new in zip(sequences.kv_lens, sequences.q_lens)]
        table = self.common.block_table_tensor
        slots = [int(table[i, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for i, n in enumerate(before) for at in range(n)]
        k, v = torch.randn(2, len(slots), kv_heads, head_size, dtype=dtype)
        self.impl.do_kv_cache_update(self.layer, k, v, self.pages, torch.tensor(slots, dtype=torch.int64))

    def run(self, **arguments: Any) -> torch.Tensor:
        """Writes the new tokens and attends, as vLLM does."""
        self.impl.do_kv_cache_update(self.layer, self.k, self.v, self.pages, self.metadata.slot_mapping)
        out = torch.full(self.q.shape, float("nan"), dtype=arguments.pop("dtype", self.q.dtype))
        return self.impl.forward(self.layer, self.q, self.k, self.v, self.pages, self.metadata, out, **arguments)

    def call(self) -> KernelCall:
        """The step as a case of the conformance kit, over the bytes that are in the cache now."""
        view = cache_view(self.pages, self.cache_type, self.impl.head_size, (self.layer._k_scale, self.layer._v_scale), FP8)
        window, batch = self.features.get("sliding_window"), self.metadata.batch
        slopes = self.features.get("alibi_slopes")
        return KernelCall(
            self.q,
            view.k.transpose(1, 2),
            view.v.transpose(1, 2),
            batch.page_table,
            batch.kv_lens,
            batch.q_starts,
            torch.empty_like(self.q),
            self.impl.scale,
            format=format_name(self.cache_type, FP8) or view.format.name,
            k_scale=view.k_scale,
            v_scale=view.v_scale,
            causal=self.causal,
            window=(None, None) if window is None else (window - 1, window - 1),
            softcap=self.features.get("logits_soft_cap"),
            alibi=None if slopes is None else torch.tensor(slopes),
            sinks=self.features.get("sinks"),
        )
