"""A model's shape from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError
from quire.plan.models import CAPPED, SINKS, ModelShape, model_named

_FULL_LAYER, _WINDOW_LAYER = "full_attention", "sliding_attention"
"""The entries of `layer_types` that a plan knows."""
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_DTYPE_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, None: 16.0}
_QUANTISED_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 16.0}
"""Bits of a weight outside the experts, by quantisation method."""
_EXPERT_BITS = {"mxfp4": 4.25}
UNKNOWN = 0.0
"""The bits of a weight if the configuration names a quantisation method that is not listed here."""


def model_of(given: str) -> ModelShape:
    """The model that `--model` means: a name of the table, a config.json, or a folder that has one.

    Raises:
        ArgumentError: there is no such model or file, or the file does not describe attention that Quire computes.
    """
    path = Path(given)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ArgumentError("--model", repr(given), "a folder with a config.json")
    if not path.is_file():
        if path.suffix == ".json":
            raise ArgumentError("--model", repr(given), "a file that exists, or the name of a model")
        return model_named(given)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError("--model", repr(given), f"a config.json of a model ({error})") from None
    if not isinstance(config, dict):
        raise ArgumentError("--model", repr(given), "a config.json of a model: one JSON object")
    return shape_of(config, path.resolve().parent.name if path.name == "config.json" else path.stem)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a configuration describes; of its `text_config`, if it has one."""
    outer, config = config, config.get("text_config") or config
    missing = [key for key in _NEEDED if key not in config]
    if missing:
        raise ArgumentError("--model", f"{name}: a configuration without {', '.join(missing)}", f"one with {', '.join(_NEEDED)}")
    if config.get("kv_lora_rank"):
        raise ArgumentError("--model", f"{name}: multi-head latent attention (kv_lora_rank)", "attention with keys and values")
    q_heads, hidden, layers = (_whole(config, key, name) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = _whole(config, "num_key_value_heads", name) if config.get("num_key_value_heads") else q_heads
    if q_heads % kv_heads:
        raise ArgumentError("--model", f"{name}: {q_heads} query heads over {kv_heads} key heads", "a multiple of the key heads")
    head_dim = _whole(config, "head_dim", name) if config.get("head_dim") else hidden // q_heads
    experts = next((config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), 0)
    window, windowed = _windows(config, layers, name)
    weight_bits, expert_bits = _bits(outer, config)
    return ModelShape(
        name,
        hidden,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        int((experts and config.get("moe_intermediate_size")) or config.get("intermediate_size") or 4 * hidden),
        int(config.get("vocab_size", 0)),
        int(experts),
        window,
        1 if windowed or window is None else 0,
        features=_features(config),
        tied=bool(
            config.get("tie_word_embeddings", outer.get("tie_word_embeddings", str(config.get("model_type")).startswith("gemma")))
        ),
        weight_bits=weight_bits,
        expert_bits=expert_bits,
        windowed=windowed,
    )


def _whole(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError("--model", f"{name}: {key} {value!r}", "a whole number of 1 or more, the same for every layer")
    return value


def _features(config: Mapping[str, Any]) -> tuple[str, ...]:
    has = {CAPPED: config.get("attn_logit_softcapping"), SINKS: config.get("model_type") == "gpt_oss"}
    return tuple(name for name, present in has.items() if present)


def _bits(outer: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float]:
    """Bits of a weight, and of an expert's (0: the same)."""
    quantised = outer.get("quantization_config") or config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method")
        return float(_QUANTISED_BITS.get(method) or quantised.get("bits") or UNKNOWN), _EXPERT_BITS.get(method, 0.0)
    names = (place.get(key) for place in (config, outer) for key in ("dtype", "torch_dtype"))
    return _DTYPE_BITS.get(next((name for name in names if name), None), UNKNOWN), 0.0


def _windows(config: Mapping[str, Any], layers: int, name: str) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers have it; empty if all do."""
    types = config.get("layer_types")
    if types:
        other = [one for one in types if one not in (_FULL_LAYER, _WINDOW_LAYER)]
        if other:
            raise ArgumentError(
                "--model", f"{name}: a layer of type {other[0]!r}", f"layers of type {_FULL_LAYER} or {_WINDOW_LAYER}"
            )
        if len(types) != layers:
            raise ArgumentError("--model", f"{name}: {len(types)} layer_types for {layers} layers", "one for each layer")
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None, ()
    if types:
        return int(window), tuple(one == _WINDOW_LAYER for one in types)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    pattern = pattern or {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gpt_oss": 2}.get(config.get("model_type", ""))
    if pattern:
        return int(window), tuple((i + 1) % int(pattern) != 0 for i in range(layers))
    first = config.get("max_window_layers")
    if first is not None and config.get("use_sliding_window"):
        return int(window), tuple(i >= int(first) for i in range(layers))
    return int(window), ()
