"""Small models with generated weights, in the format of a checkpoint: a config and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 256
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 48

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "qwen3": ("Qwen3", COMMON),
    "gemma2": (
        "Gemma2",
        COMMON
        | {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 32,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gemma3": (
        "Gemma3Text:Gemma3",
        COMMON | {"num_hidden_layers": 4, "tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 32},
    ),
    "gpt_oss": (
        "GptOss",
        COMMON
        | {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131072,
        },
    ),
    "bloom": (
        "Bloom",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "n_layer": 3,
            "n_head": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "bert": (
        "Bert:BertModel",
        {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        | {"max_position_embeddings": 256, "pad_token_id": 0},
    ),
}
"""By name: the class of transformers (config:model where they differ; a name that ends in Model is the class) and its config."""

ATTENTION_GAIN = 2.0
"""How many times larger the weights of queries and keys are than those of an untrained model: with those attention is nearly
uniform, and a wrong mask or scale changes little."""


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Writes a model to `folder / name` and returns that path."""
    kind, values = MODELS[name]
    config_kind, _, model_kind = kind.partition(":")
    config = getattr(transformers, f"{config_kind}Config")(**values | changes)
    torch.manual_seed(20)
    kind = model_kind if model_kind.endswith("Model") else f"{model_kind or config_kind}ForCausalLM"
    model = getattr(transformers, kind)(config).float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            fill(key, weight, tied=config.tie_word_embeddings)
    path = folder / name
    model.save_pretrained(path)
    if name == "bert":
        write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """A tokenizer, which vLLM needs for encoder models even if prompts are tokens: words are numbers."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0").save_pretrained(path)


def fill(key: str, weight: torch.Tensor, tied: bool) -> None:
    """Weights that keep activations and logits near 1, so that every layer matters to the result. `tied` embeddings are the output
    matrix too; Gemma multiplies them by the root of their size."""
    if "norm" in key.lower() or "ln_" in key:
        if key.endswith("bias"):
            weight.zero_()
        return
    if weight.dim() < 2:
        # Biases, and the sinks of GPT-OSS.
        weight.normal_(0.0, 1.0 if "sinks" in key else 0.1)
        return
    fan_in = weight.shape[-1] if weight.dim() == 2 else weight.shape[-2]
    gain = ATTENTION_GAIN if any(part in key for part in ("q_proj", "k_proj", "query", "key")) else 1.0
    weight.normal_(0.0, 1.0 if "embed" in key and not tied else gain * fan_in**-0.5)


def reference_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """The logits `[tokens, vocabulary]` of a sequence, computed by transformers in float64 without a cache."""
    model = _loaded(str(path))
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double()


_models: dict[str, Any] = {}


def _loaded(path: str) -> Any:
    if path not in _models:
        load = transformers.AutoModelForCausalLM.from_pretrained
        # The other implementations of experts have no float64.
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = _models[path] = load(path, dtype=torch.float64, **eager).eval()
        if model.config.model_type == "bloom":
            # vLLM has the exact GELU here, transformers an approximation by tanh.
            for layer in model.transformer.h:
                layer.mlp.gelu_impl = torch.nn.GELU()
    return _models[path]
