"""The keys of a model configuration: one meaning under several names, and keys that no plan understands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ArgumentError

HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HEAD_DIM = ("head_dim", "kv_channels")
"""Names of the same number in public configurations, the usual one first."""
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "num_query_groups")
_OTHER_KV_KEYS = ("multi_query", "multi_query_attention", "multi_query_group_num")
_KV_WORDS = re.compile(r"key_value_(heads|groups)|(^|_)kv_(n_)?heads?|heads?_kv|query_groups?|multi_query|(^|_)[mg]qa(_|$)")
"""What the name of a key about key heads looks like."""
_ONE_OR_ALL = ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode")
"""Model types with one key head or with all: the configuration must say which."""

_REFUSED = {
    "kv_lora_rank": "multi-head latent attention",
    "is_encoder_decoder": "an encoder and cross-attention",
    "add_cross_attention": "cross-attention",
    "cross_attention_layers": "layers with cross-attention",
    "attention_chunk_size": "attention in chunks",
    "attention_types": "layers of several types",
    "attention_window_size": "recurrent layers beside attention with a window",
    "attn_layer_period": "layers without attention",
    "attn_type_list": "layers of several types",
    "block_configs": "layers of different shapes",
    "block_types": "layers of several types",
    "layers_block_type": "layers of several types",
    "hybrid_override_pattern": "layers without attention",
    "full_attention_interval": "layers with linear attention",
    "mamba_d_state": "layers with a state",
    "mamba_d_ssm": "layers with a state",
    "ssm_state_size": "layers with a state",
    "state_size": "layers with a state",
    "blocksparse_block_size": "block-sparse attention",
    "index_topk": "sparse attention",
    "use_cla": "layers that share keys",
    "num_kv_shared_layers": "layers that share keys",
    "global_head_dim": "layers of different shapes",
    "swa_head_dim": "layers of different shapes",
    "d_kv": "a size of heads under another name than head_dim",
    "d_head": "a size of heads under another name than head_dim",
}
"""Keys that change what attention costs, and what they mean. Absent, null, false and 0 are allowed."""


def refuse_unknown(config: Mapping[str, Any], name: str) -> None:
    """Raises `ArgumentError` for a key that would change the plan and is not understood."""
    for key, meaning in _REFUSED.items():
        if config.get(key):
            raise ArgumentError(
                "--model",
                f"{name}: {meaning} ({key} {config[key]!r})",
                f"a decoder whose layers all have self-attention of one shape: without {key}",
            )
    for key, value in config.items():
        if value is not None and _KV_WORDS.search(key) and key not in (*_KV_HEADS, *_OTHER_KV_KEYS):
            allowed = f"key heads under one of the names {', '.join((*_KV_HEADS, *_OTHER_KV_KEYS))}, attn_config.kv_n_heads"
            raise ArgumentError("--model", f"{name}: {key} {value!r}", allowed)


def whole(config: Mapping[str, Any], key: str, name: str) -> int:
    """A number of a configuration that counts something."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError("--model", f"{name}: {key} {value!r}", "a whole number of 1 or more, the same for every layer")
    return value


def one_of(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int | None:
    """The number that a configuration has under one or several of the names; None if under none."""
    found = {key: whole(config, key, name) for key in keys if config.get(key) is not None}
    return agreed(found, name)


def agreed(found: Mapping[str, int], name: str) -> int | None:
    """The one value of several keys; None if there is no key."""
    if len(set(found.values())) > 1:
        given = ", ".join(f"{key} {value}" for key, value in found.items())
        raise ArgumentError("--model", f"{name}: {given}", "the same number under each of these names")
    return next(iter(found.values()), None)


def kv_heads_of(config: Mapping[str, Any], q_heads: int, name: str) -> int:
    """The key heads, from any of the ways to write them; as many as query heads if the configuration says nothing about them."""
    many = config.get("multi_query")
    if config.get("model_type") in _ONE_OR_ALL and many is None and not any(config.get(key) for key in _KV_HEADS):
        raise ArgumentError(
            "--model", f"{name}: model_type {config['model_type']} without multi_query", "a configuration with multi_query"
        )
    if "new_decoder_architecture" in config or config.get("model_type") == "falcon":
        # Falcon ignores num_kv_heads if one head is for all queries; Falcon-7B has another number there.
        if many and not config.get("new_decoder_architecture"):
            return 1
        return one_of(config, _KV_HEADS, name) or q_heads
    found = {key: whole(config, key, name) for key in _KV_HEADS if config.get(key)}
    if many is not None:
        found["multi_query"] = 1 if many else q_heads
    found |= _groups(config, q_heads, name)
    found |= _nested(config, q_heads, name)
    return agreed(found, name) or q_heads


def _groups(config: Mapping[str, Any], q_heads: int, name: str) -> dict[str, int]:
    """As ChatGLM writes it: the number of groups holds only if there are groups."""
    grouped, groups = config.get("multi_query_attention"), config.get("multi_query_group_num")
    if grouped is None and groups is None:
        return {}
    if grouped is None or (grouped and groups is None):
        given = f"multi_query_attention {grouped}, multi_query_group_num {groups}"
        raise ArgumentError("--model", f"{name}: {given}", "both, or neither")
    return (
        {"multi_query_group_num": whole(config, "multi_query_group_num", name)} if grouped else {"multi_query_attention": q_heads}
    )


def _nested(config: Mapping[str, Any], q_heads: int, name: str) -> dict[str, int]:
    """As MPT and DBRX write it, in `attn_config`."""
    inner = config.get("attn_config")
    if not isinstance(inner, Mapping):
        return {}
    window = inner.get("sliding_window_size", -1)
    if window not in (-1, None):
        raise ArgumentError("--model", f"{name}: attn_config.sliding_window_size {window!r}", "-1: no window")
    found = {}
    if inner.get("kv_n_heads") is not None:
        found["attn_config.kv_n_heads"] = whole(inner, "kv_n_heads", name)
    kind = inner.get("attn_type")
    known = {"multihead_attention": q_heads, "multiquery_attention": 1}
    if kind in known:
        found["attn_config.attn_type"] = known[kind]
    elif kind not in (None, "grouped_query_attention") or (kind and not found):
        raise ArgumentError(
            "--model", f"{name}: attn_config.attn_type {kind!r}", f"{', '.join(known)}, or grouped_query_attention with kv_n_heads"
        )
    return found
