"""What SGLang may ask for and Quire does not have: refused when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MHATokenToKVPoolFP4
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule

from quire.integrations.engines import EngineError
from quire.integrations.sglang.layer import LAYOUTS


def require_supported(runner: Any) -> None:
    """Raises `EngineError` with everything that is not supported, of settings, memory pool and layers."""
    found = [*_settings(runner), *_pools(runner.token_to_kv_pool), *_layers(runner)]
    if found:
        lines = "".join(f"\n  {line}" for line in dict.fromkeys(found))
        raise EngineError(f"the attention backend 'quire' cannot serve this model with these settings:{lines}")


def _settings(runner: Any) -> Iterator[str]:
    if runner.use_mla_backend:
        yield "multi-head latent attention (MLA): the cache has no separate keys and values; choose a backend for MLA"
    parallel = get_parallel()
    for name, size in (("decode context parallelism", parallel.attn_dcp_size), ("context parallelism", parallel.attn_cp_size)):
        if size > 1:
            yield f"{name} of size {size}: only 1 is supported"
    if get_exec().dllm.dllm_algorithm is not None:
        yield f"the diffusion language model algorithm {get_exec().dllm.dllm_algorithm}"
    if runner.kv_index_translator.is_translating:
        yield "enable_unified_memory: slot ids would have to be translated"
    if check_cuda_graph_backend(Phase.PREFILL, Backend.FULL):
        yield "CUDA graphs of the whole prefill (backend 'full'): use 'breakable' or 'disabled' for prefill; decode may have them"
    if getattr(runner, "prefill_aware_swa", False):
        yield "prefill-aware sliding windows"
    if runner.model_config.is_encoder_decoder and runner.page_size > 1:
        yield f"page_size {runner.page_size} for an encoder-decoder model: the decoder starts inside a page; use page_size 1"


def _pools(pool: Any) -> Iterator[str]:
    if isinstance(pool, SWAKVPool):
        yield from _pools(pool.full_kv_pool)
        yield from _pools(pool.swa_kv_pool)
    elif isinstance(pool, HybridLinearKVPool):
        yield from _pools(pool.full_kv_pool)
    elif not isinstance(pool, MHATokenToKVPool):
        yield f"the KV pool {type(pool).__name__}: supported are MHATokenToKVPool, SWAKVPool and HybridLinearKVPool over it"
    elif isinstance(pool, MHATokenToKVPoolFP4) or pool.is_quantized_kv_cache:
        yield f"the 4-bit KV pool {type(pool).__name__}: use kv_cache_dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2"
    elif pool.kv_cache_layout not in LAYOUTS:
        yield f"the KV layout {pool.kv_cache_layout!r}: supported are {', '.join(LAYOUTS)}"


def _layers(runner: Any) -> Iterator[str]:
    for layer in runner.model.modules():
        if isinstance(layer, RadixAttention):
            for reason in _layer(layer, runner):
                yield f"layer {layer.layer_id}: {reason}"


def _layer(layer: RadixAttention, runner: Any) -> Iterator[str]:
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield f"logit_capping_method {layer.logit_capping_method!r}: only 'tanh' is supported"
    if layer.xai_temperature_len > 0:
        yield f"xai_temperature_len {layer.xai_temperature_len}: scales that depend on the position are not supported"
    if layer.pos_encoding_mode != "NONE":
        yield f"pos_encoding_mode {layer.pos_encoding_mode!r}: only 'NONE' is supported"
    if layer.use_irope and runner.attention_chunk_size is not None:
        yield f"attention in chunks of {runner.attention_chunk_size} (use_irope)"
    if max(layer.qk_head_dim, layer.v_head_dim) > 512:
        yield f"heads of {layer.qk_head_dim} and {layer.v_head_dim}: at most 512"
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL and get_schedule().chunked_prefill_size != -1:
        yield "attention to both sides (DECODER_BIDIRECTIONAL) with chunked prefill: set chunked_prefill_size to -1"
