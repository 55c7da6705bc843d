"""Small models with generated weights, saved as SGLang loads them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "bos_token_id": None,
         "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}  # fmt: skip


def save(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Matrices are large enough that tokens depend on the context: with the usual initial weights a model repeats one token."""
    generator = torch.Generator().manual_seed(11)
    embedded = 0.1 if model.config.tie_word_embeddings else 1.0  # a tied model with large embeddings repeats its input
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                wide = embedded if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * wide)
    model.float().eval().save_pretrained(folder)


def save_llama(folder: Path) -> None:
    save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), folder)


def save_qwen3(folder: Path) -> None:
    save(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)), folder)


def save_gemma2(folder: Path) -> None:
    """Softcap in every layer, and a window of 12 keys in every other."""
    features = {"sliding_window": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 16}
    sizes = {**SIZES, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}  # SGLang reads the older name
    save(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **features)), folder)


MODELS = {"llama": save_llama, "qwen3": save_qwen3, "gemma2": save_gemma2}
