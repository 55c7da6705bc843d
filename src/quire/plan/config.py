"""A model's shape from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ArgumentError
from quire.plan.config_keys import HEAD_DIM, HEADS, HIDDEN, LAYERS, kv_heads_of, one_of, refuse_unknown
from quire.plan.models import ALIBI, CAPPED, SINKS, ModelShape, model_named

_FULL_LAYER, _WINDOW_LAYER = "full_attention", "sliding_attention"
"""The entries of `layer_types` that a plan knows."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_WIDTHS = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
_UNGATED = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2")
"""Model types whose MLP has two matrices."""
_TIED = ("gemma", "bloom", "falcon", "gpt2", "gpt_bigcode", "mpt", "opt")
"""Model types whose output layer shares the weights of the embedding, if the configuration does not say it."""
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
    for place in (outer, config):
        refuse_unknown(place, name)
    hidden, layers, q_heads = _sizes(config, name)
    kv_heads = kv_heads_of(config, q_heads, name)
    if q_heads % kv_heads:
        raise ArgumentError("--model", f"{name}: {q_heads} query heads over {kv_heads} key heads", "a multiple of the key heads")
    inner: Mapping[str, Any] = config.get("ffn_config") or {}
    experts = next((place[key] for place in (config, inner) for key in _EXPERTS if place.get(key)), 0)
    window, windowed = _windows(config, layers, name)
    weight_bits, expert_bits = _bits(outer, config)
    family = str(config.get("model_type"))
    return ModelShape(
        name,
        hidden,
        layers,
        q_heads,
        kv_heads,
        _head_dim(config, hidden, q_heads, name),
        _intermediate(config, inner, hidden, bool(experts)),
        int(config.get("vocab_size") or config.get("padded_vocab_size") or 0),
        int(experts),
        window,
        1 if windowed or window is None else 0,
        features=_features(config),
        tied=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings", family.startswith(_TIED)))),
        weight_bits=weight_bits,
        expert_bits=expert_bits,
        windowed=windowed,
        mlp_matrices=2 if family in _UNGATED else 3,
    )


def _sizes(config: Mapping[str, Any], name: str) -> list[int]:
    """The hidden size, layers and query heads."""
    found = {keys[0]: one_of(config, keys, name) for keys in (HIDDEN, LAYERS, HEADS)}
    missing = [key for key, value in found.items() if value is None]
    if missing:
        raise ArgumentError("--model", f"{name}: a configuration without {', '.join(missing)}", f"one with {', '.join(found)}")
    return [value for value in found.values() if value is not None]


def _head_dim(config: Mapping[str, Any], hidden: int, q_heads: int, name: str) -> int:
    head_dim = one_of(config, HEAD_DIM, name)
    if head_dim is None:
        if hidden % q_heads:
            raise ArgumentError(
                "--model", f"{name}: {q_heads} heads of a hidden size of {hidden}", "head_dim, or heads that divide it"
            )
        head_dim = hidden // q_heads
    if (config.get("v_head_dim") or head_dim) != head_dim:
        raise ArgumentError("--model", f"{name}: v_head_dim {config['v_head_dim']}", f"{head_dim}, the head_dim of keys")
    return head_dim


def _intermediate(config: Mapping[str, Any], inner: Mapping[str, Any], hidden: int, experts: bool) -> int:
    """The width of the MLP, or of one expert; four times the hidden size if the configuration does not say it."""
    widths = [config.get(key) for key in (*(("moe_intermediate_size",) if experts else ()), *_WIDTHS)]
    ratio = config.get("expansion_ratio")
    return int(next((width for width in (*widths, inner.get("ffn_hidden_size")) if width), (ratio or 4) * hidden))


def _features(config: Mapping[str, Any]) -> tuple[str, ...]:
    inner = config.get("attn_config") or {}
    has = {
        CAPPED: config.get("attn_logit_softcapping"),
        SINKS: config.get("model_type") == "gpt_oss",
        ALIBI: config.get("alibi") or inner.get("alibi") or config.get("model_type") == "bloom",
    }
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
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise ArgumentError("--model", f"{name}: sliding_window_pattern {pattern!r}", "a whole number, or layer_types")
        return int(window), tuple((i + 1) % pattern != 0 for i in range(layers))
    first = config.get("max_window_layers")
    if first is not None and config.get("use_sliding_window"):
        return int(window), tuple(i >= int(first) for i in range(layers))
    return int(window), ()
