"""What vLLM may ask of a layer and Quire does not have. vLLM validates backends on GPUs only, so the layer checks everything again
when the engine starts."""

from __future__ import annotations

from typing import Any

from quire.integrations.engines import EngineError
from quire.integrations.vllm.cache_view import CACHE_TYPES, PLAIN

UNSUPPORTED = "is not supported by Quire; start vLLM with another attention backend"


def refuse_layer(impl: Any, extra: dict[str, Any], config: Any) -> None:
    """Raises if the layer needs something that Quire does not have.

    Args:
        impl: The layer, with its attributes set.
        extra: The further arguments that vLLM gave the layer.
        config: vLLM's configuration, or None outside of an engine.

    Raises:
        EngineError: It names what was given and what is allowed.
    """
    if extra.pop("chunk_lookback", -1) != -1:
        raise EngineError(f"chunked attention with lookback (chunk_lookback) {UNSUPPORTED}")
    if extra:
        raise EngineError(f"the layer's arguments {', '.join(sorted(extra))}: {UNSUPPORTED}".replace("is not", "not"))
    if impl.kv_cache_dtype not in CACHE_TYPES:
        raise EngineError(f"--kv-cache-dtype: got {impl.kv_cache_dtype}; Quire supports {', '.join(CACHE_TYPES)}")
    if not 1 <= impl.head_size <= 512:
        raise EngineError(f"head size: got {impl.head_size}; Quire supports 1 to 512")
    if impl.num_heads % impl.num_kv_heads:
        raise EngineError(f"heads: got {impl.num_heads} over {impl.num_kv_heads} KV heads; allowed is a multiple of the KV heads")
    if impl.sinks is not None and impl.sinks.shape[0] != impl.num_heads:
        raise EngineError(f"sinks: got {list(impl.sinks.shape)}; allowed is one for each of {impl.num_heads} heads")
    if impl.is_encoder and impl.kv_cache_dtype not in PLAIN:
        # An encoder has no cache: its keys and values are used as they are, so the setting has no effect on it.
        impl.kv_cache_dtype = "auto"
    if config is not None:
        _refuse_model(config)
        if impl.settings.checked:
            _refuse_checking(config)


def _refuse_model(config: Any) -> None:
    model = config.model_config
    if model is None:
        return
    if getattr(model, "is_mm_prefix_lm", False):
        raise EngineError(f"bidirectional attention among the tokens of an image (mm_prefix) {UNSUPPORTED}")
    if getattr(model, "rswa_window", None) is not None:
        raise EngineError(f"reference sliding window attention (R-SWA) {UNSUPPORTED}")
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise EngineError(f"prefill context parallelism {UNSUPPORTED}")


def _refuse_checking(config: Any) -> None:
    """Checks read values on the host, which a CUDA graph cannot, and a ledger must see every write."""
