"""The backend as vLLM sees it: what it supports, and its classes. vLLM's own validation refuses everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from quire.integrations.vllm.cache_view import CACHE_TYPES, SCALE_BYTES
from quire.integrations.vllm.impl import QuireImpl
from quire.integrations.vllm.metadata import QuireMetadataBuilder
from quire.integrations.vllm.registration import NAME

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.kv_cache_interface import KVCacheSpec

ATTENTION_TYPES = (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)
OLDEST_CAPABILITY = 80
"""The oldest NVIDIA GPU that Quire's kernels are compiled for."""


class QuireBackend(AttentionBackend):
    """The backend QUIRE. Layouts are not restricted: Quire reads pages in any order of memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_TYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[QuireImpl]:
        return QuireImpl

    @staticmethod
    def get_builder_cls() -> type[QuireMetadataBuilder]:
        return QuireMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        # Every size works. Where vLLM may choose it takes the largest, a multiple of 16.
        return [MultipleOf(16), 8, 4, 2, 1]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability is None or capability.to_int() >= OLDEST_CAPABILITY

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """With scales per token and head, a slot also holds the two scales."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        elements = spec.head_size + spec.head_size_v
        return cast(AttentionSpec, replace(spec, state_content_bytes=elements * spec.dtype.itemsize + 2 * SCALE_BYTES))


class QuireInPlaceOfCpuAttn(QuireBackend):
    """Quire under the name of vLLM's CPU backend."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """All of them, first those in which the slots of a head follow each other: see `cache_view.halves`."""
        by_head = KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC, KVCacheLayout.LHBNC
        return *by_head, KVCacheLayout.LBNHC, KVCacheLayout.BLNHC


class QuireInPlaceOfRocmAttn(QuireBackend):
    """Quire under the name of vLLM's ROCm backend."""

    @staticmethod
    def get_name() -> str:
        return "ROCM_ATTN"


class QuireInPlaceOfTritonAttn(QuireBackend):
    """Quire under the name of vLLM's Triton backend."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"
