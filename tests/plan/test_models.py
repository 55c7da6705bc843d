"""The table of models, and shapes from configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ArgumentError
from quire.plan.config import model_of, shape_of
from quire.plan.models import MODELS, LayerKind, model_named

# Billions of parameters as the models' authors publish them.
PUBLISHED = {
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3-405b": 405.9,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "mistral-7b-v0.1": 7.24,
    "mistral-7b-v0.3": 7.25,
    "mistral-small-24b": 23.6,
    "mistral-large-123b": 122.6,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.8,
    "gemma-3-27b": 27.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_give_the_published_number_of_parameters(name: str) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.015)
    assert MODELS[name].q_heads % MODELS[name].kv_heads == 0
    assert sum(kind.layers for kind in MODELS[name].kinds) == MODELS[name].layers


def test_weights_of_gpt_oss_are_those_of_its_files() -> None:
    """Its checkpoint has 65 GB, that of the small one 14: experts in MXFP4, the rest in bf16."""
    assert MODELS["gpt-oss-120b"].weight_bytes / 1e9 == pytest.approx(65.2, rel=0.01)
    assert MODELS["gpt-oss-20b"].weight_bytes / 1e9 == pytest.approx(13.8, rel=0.01)


def test_window_layers() -> None:
    assert MODELS["gemma-3-27b"].kinds == (LayerKind(52, 1024), LayerKind(10, None))
    assert MODELS["gemma-2-9b"].kinds == (LayerKind(21, 4096), LayerKind(21, None))
    assert MODELS["gpt-oss-20b"].kinds == (LayerKind(12, 128), LayerKind(12, None))
    assert MODELS["mistral-7b-v0.1"].kinds == (LayerKind(32, 4096),)
    assert MODELS["llama-3-8b"].kinds == (LayerKind(32, None),)


@pytest.mark.parametrize("given", ["Llama-3-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct", "llama_3_8b", "llama-3.1-8b"])
def test_spellings(given: str) -> None:
    assert model_named(given) is MODELS["llama-3-8b"]


def test_a_wrong_name_gets_a_suggestion() -> None:
    with pytest.raises(ArgumentError, match=r"--model: given 'qwen3-33b'; .* did you mean qwen3-32b\?"):
        model_named("qwen3-33b")


def write(folder: Path, config: dict[str, Any], name: str = "config.json") -> str:
    (folder / name).write_text(json.dumps(config))
    return str(folder / name)


def test_a_configuration_is_the_table_entry(tmp_path: Path) -> None:
    found = model_of(write(tmp_path, LLAMA))
    table = MODELS["llama-3-8b"]
    assert found.name == tmp_path.name and model_of(str(tmp_path)) == found
    for name in ("hidden", "layers", "q_heads", "kv_heads", "head_dim", "kinds", "parameters", "weight_bytes"):
        assert getattr(found, name) == getattr(table, name), name


def test_gpt_oss_configuration() -> None:
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    found, table = shape_of(config, "x"), MODELS["gpt-oss-20b"]
    assert (
        found.kinds == table.kinds and found.features == table.features == ("sinks",) and found.weight_bytes == table.weight_bytes
    )
    assert shape_of({**config, "layer_types": None}, "x").kinds == table.kinds


def test_types_of_layers() -> None:
    types = ["sliding_attention"] * 20 + ["full_attention"] * 12
    assert shape_of({**LLAMA, "sliding_window": 9, "layer_types": types}, "x").kinds == (LayerKind(20, 9), LayerKind(12, None))


def test_nested_configuration_with_pattern() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6}
    assert shape_of({"text_config": text}, "x").kinds == (LayerKind(22, 512), LayerKind(4, None))


@pytest.mark.parametrize(
    "change, window",
    [
        ({"sliding_window": 4096}, LayerKind(32, 4096)),
        ({"sliding_window": None}, LayerKind(32, None)),
        ({"sliding_window": 4096, "use_sliding_window": False}, LayerKind(32, None)),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32}, LayerKind(32, None)),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, LayerKind(32, 4096)),
    ],
)
def test_one_window_for_all(change: dict[str, Any], window: LayerKind) -> None:
    assert shape_of({**LLAMA, **change}, "x").kinds == (window,)


@pytest.mark.parametrize(
    "change, bits",
    [
        ({"torch_dtype": "float32"}, 32),
        ({"quantization_config": {"quant_method": "fp8"}}, 8),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 4),
        ({"quantization_config": {"quant_method": "unheard of"}}, 0),
    ],
)
def test_bits_of_weights(change: dict[str, Any], bits: float) -> None:
    assert shape_of({**LLAMA, **change}, "x").weight_bits == bits


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_attention_heads": 33}, "33 query heads over 8 key heads"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers '32'"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"layer_types": ["linear_attention"] * 32}, "a layer of type 'linear_attention'"),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 3}, "3 layer_types for 32 layers"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads \[8, 4\]"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        shape_of({**LLAMA, **change}, "x")


FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
    "alibi": False,
    "vocab_size": 65024,
}
FALCON_40B = {**FALCON_7B, "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8}
FALCON_40B |= {"new_decoder_architecture": True}
CHATGLM = {
    "model_type": "chatglm",
    "hidden_size": 4096,
    "num_layers": 28,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "ffn_hidden_size": 13696,
    "padded_vocab_size": 65024,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "tie_word_embeddings": False,
}
MPT = {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4, "vocab_size": 50432}
STARCODER = {
    "model_type": "gpt_bigcode",
    "n_embd": 6144,
    "n_layer": 40,
    "n_head": 48,
    "n_inner": 24576,
    "multi_query": True,
    "vocab_size": 49152,
}
DBRX = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_layers": 40,
    "n_heads": 48,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "vocab_size": 100352,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    "config, heads, head_dim, layers, billions",
    [
        (FALCON_7B, (71, 1), 64, 32, 6.92),
        (FALCON_40B, (128, 8), 64, 60, 41.3),
        ({**FALCON_7B, "multi_query": False}, (71, 71), 64, 32, None),
        (CHATGLM, (32, 2), 128, 28, 6.24),
        ({**CHATGLM, "multi_query_attention": False}, (32, 32), 128, 28, None),
        (MPT, (32, 32), 128, 32, 6.65),
        ({**MPT, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 8}}, (32, 8), 128, 32, None),
        ({**MPT, "attn_config": {"attn_type": "multiquery_attention"}}, (32, 1), 128, 32, None),
        (STARCODER, (48, 1), 128, 40, 15.5),
        ({**STARCODER, "multi_query": False}, (48, 48), 128, 40, None),
        (DBRX, (48, 8), 128, 40, 131.6),
    ],
)
def test_other_names_of_the_same_numbers(
    config: dict[str, Any], heads: tuple[int, int], head_dim: int, layers: int, billions: float | None
) -> None:
    found = shape_of(config, "x")
    assert ((found.q_heads, found.kv_heads), found.head_dim, found.layers) == (heads, head_dim, layers)
    if billions is not None:
        assert found.parameters / 1e9 == pytest.approx(billions, rel=0.015)


def test_alibi_is_a_feature() -> None:
    assert shape_of({**MPT, "attn_config": {"alibi": True}}, "x").features == ("alibi",)
    assert shape_of({**FALCON_7B, "alibi": True}, "x").features == ("alibi",) and shape_of(FALCON_7B, "x").features == ()


@pytest.mark.parametrize(
    "config, message",
    [
        ({**LLAMA, "attention_chunk_size": 8192}, "attention_chunk_size 8192"),
        ({"text_config": {**LLAMA, "attention_chunk_size": 8192}}, "attention_chunk_size 8192"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder True"),
        ({"is_encoder_decoder": True, "text_config": LLAMA}, "is_encoder_decoder True"),
        ({**LLAMA, "num_kv_shared_layers": 10}, "num_kv_shared_layers 10"),
        ({**LLAMA, "cross_attention_layers": [3, 8]}, "cross_attention_layers"),
        ({**LLAMA, "hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({**LLAMA, "swa_num_key_value_heads": 4}, "swa_num_key_value_heads 4"),
        ({**LLAMA, "num_gqa_groups": 4, "gqa": 4}, "gqa"),
        ({**LLAMA, "v_head_dim": 64}, "v_head_dim 64; allowed: 128"),
        ({**LLAMA, "n_layer": 31}, "num_hidden_layers 32, n_layer 31"),
        ({**LLAMA, "multi_query": True}, "num_key_value_heads 8, multi_query 1"),
        ({**LLAMA, "hidden_size": 4100}, "32 heads of a hidden size of 4100"),
        ({**LLAMA, "sliding_window": 64, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG'"),
        ({**CHATGLM, "multi_query_attention": None}, "multi_query_group_num 2"),
        ({**CHATGLM, "multi_query_group_num": None}, "multi_query_group_num None"),
        ({**MPT, "attn_config": {"attn_type": "other"}}, "attn_config.attn_type 'other'"),
        ({**MPT, "attn_config": {"attn_type": "grouped_query_attention"}}, "grouped_query_attention with kv_n_heads"),
        ({**MPT, "attn_config": {"sliding_window_size": 512}}, "attn_config.sliding_window_size 512"),
        ({**STARCODER, "multi_query": None}, "gpt_bigcode without multi_query"),
    ],
)
def test_keys_that_would_change_the_plan_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        shape_of(config, "x")


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a folder with a config\.json"):
        model_of(str(tmp_path))
    with pytest.raises(ArgumentError, match="without hidden_size, num_hidden_layers, num_attention_heads"):
        model_of(write(tmp_path, {"a": 1}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"a config\.json of a model"):
        model_of(str(tmp_path))
    with pytest.raises(ArgumentError, match="a file that exists"):
        model_of(str(tmp_path / "other.json"))
    with pytest.raises(ArgumentError, match="one JSON object"):
        model_of(write(tmp_path, [], "list.json"))  # type: ignore[arg-type]
