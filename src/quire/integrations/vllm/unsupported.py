"""What vLLM may ask of a layer and Quire does not have. vLLM validates backends on GPUs only, so the layer checks everything again
when the engine starts."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from quire.integrations.engines import EngineError
from quire.integrations.vllm.cache_view import CACHE_TYPES
from quire.integrations.vllm.settings import CHECKED

ELSEWHERE = "not supported by Quire; start vLLM with another attention backend"


def refuse_layer(impl: Any, extra: dict[str, Any], config: Any) -> None:
    """Raises if the layer needs something that Quire does not have.

    Args:
        impl: The layer, with its attributes set.
        extra: The further arguments that vLLM gave the layer.
        config: vLLM's configuration, or None outside of an engine.

    Raises:
        EngineError: It names what was given and what is allowed.
    """
    if impl.sliding_window is not None and impl.chunk_lookback >= impl.sliding_window:
        given = f"{impl.chunk_lookback} with a window of {impl.sliding_window}"
        raise EngineError(f"chunk_lookback: got {given}; allowed is less than the window, of which a chunk is a part")
    if extra:
        raise EngineError(f"{', '.join(sorted(extra))}, given for the layer: {ELSEWHERE}")
    if impl.kv_cache_dtype not in CACHE_TYPES:
        raise EngineError(f"--kv-cache-dtype: got {impl.kv_cache_dtype}; Quire supports {', '.join(CACHE_TYPES)}")
    if not 1 <= impl.head_size <= 512:
        raise EngineError(f"head size: got {impl.head_size}; Quire supports 1 to 512")
    if impl.num_heads % impl.num_kv_heads:
        raise EngineError(f"heads: got {impl.num_heads} over {impl.num_kv_heads} KV heads; allowed is a multiple of the KV heads")
    if impl.sinks is not None and tuple(impl.sinks.shape) != (impl.num_heads,):
        raise EngineError(f"sinks: got {list(impl.sinks.shape)}; allowed is one for each of {impl.num_heads} heads")
    if config is not None:
        refuse_model(config)
        if impl.settings.checked:
            refuse_checking(config)


def refuse_model(config: Any) -> None:
    """Raises if the model or its distribution needs something that Quire does not have."""
    model = config.model_config
    if model is not None and model.rswa_window is not None:
        raise EngineError(f"reference sliding window attention (R-SWA): {ELSEWHERE}")
    if config.kv_transfer_config is not None and current_platform.is_cpu():
        # It would rearrange received blocks for the kernel of CPU_ATTN (`CpuPlatform.pack_kv_cache`), or read the slots of a block.
        raise EngineError(f"a KV connector (--kv-transfer-config) on a CPU: {ELSEWHERE}")
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise EngineError(f"prefill context parallelism: {ELSEWHERE}")


def refuse_checking(config: Any) -> None:
    """Raises if calls cannot be checked: a CUDA graph cannot read values, and a ledger has to see every write."""
    from vllm.config import CUDAGraphMode

    if config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE):
        raise EngineError(f"{CHECKED}: checks read values, which CUDA graphs cannot; start vLLM with --enforce-eager")
    if config.kv_transfer_config is not None:
        raise EngineError(f"{CHECKED}: got a KV connector, whose writes the ledger does not see; start vLLM without one")
    if config.parallel_config.decode_context_parallel_size > 1:
        raise EngineError(f"{CHECKED}: got decode context parallelism; it can be checked on one rank only")
