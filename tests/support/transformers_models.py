"""Tiny models of transformers with generated weights, and what Quire launches while they run."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import generation

import quire.integrations.transformers as integration
from quire.integrations.transformers import page_tables, paged
from quire.kernels.native import attend as native
from quire.kernels.torch import attend as plain

transformers.logging.set_verbosity_error()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
# Tiny models: threads would only wait for each other.
torch.set_num_threads(1)
WINDOW = 24
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW, "head_dim": 16}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **MIXED, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **MIXED, query_pre_attn_scalar=16),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **MIXED, num_local_experts=4, num_experts_per_tok=2),
    "bloom": lambda: transformers.BloomConfig(hidden_size=96, n_layer=3, n_head=6, vocab_size=300),
    "mpt": lambda: transformers.MptConfig(
        d_model=96, n_heads=6, n_layers=3, vocab_size=300, attn_config={"clip_qkv": 4.0, "softmax_scale": 0.3}, use_cache=True
    ),
}
OWN_CODE = ("bloom", "mpt")
"""Models that compute attention in their own code, and that `use_quire` changes."""
SLIDING = ("mistral", "gemma2", "gemma3", "gpt_oss")
LAYERS = 3


class Launch(NamedTuple):
    """One attention kernel that ran."""

    kernel: str
    tokens: int
    page_size: int
    table: tuple[int, ...]
    """The shape of the page table."""
    context_form: bool


class Launches(list[Launch]):
    """The attention kernels that ran, and the kinds of steps of continuous batching."""

    steps: list[tuple[str, page_tables.PagedStep]]


@contextlib.contextmanager
def launches() -> Iterator[Launches]:
    """Records every attention kernel of Quire that runs on the CPU."""
    seen = Launches()
    seen.steps = []

    def recording(name: str, launch: Any) -> Any:
        def recorded(q: Any, cache: Any, batch: Any, options: Any, new: Any, *rest: Any, **how: Any) -> None:
            seen.append(Launch(name, q.shape[0], cache.page_size, tuple(batch.page_table.shape), new is not None))
            launch(q, cache, batch, options, new, *rest, **how)

        return recorded

    def step_of(allocator: Any, arguments: Any) -> page_tables.PagedStep:
        made = page_tables.step_of(allocator, arguments)
        seen.steps.append((allocator.layer_type, made))
        return made

    with contextlib.ExitStack() as stack:
        for name, module in (("native", native), ("torch", plain)):
            stack.enter_context(mock.patch.object(module, "launch", recording(name, module.launch)))
        stack.enter_context(mock.patch.object(paged, "step_of", step_of))
        yield seen


def model(name: str, implementation: str, seed: int = 0) -> Any:
    """A model with generated weights, which depend on name and seed alone. They are large enough that attention decides tokens."""
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation).eval()
    with torch.no_grad():
        for label, parameter in sorted(made.named_parameters()):
            numbers = torch.Generator().manual_seed(seed + len(label) + sum(map(ord, label)))
            parameter.normal_(0, 0.15, generator=numbers)
            if "norm" in label:
                parameter.add_(1.0)
    return integration.use_quire(made) if name in OWN_CODE and implementation == "quire" else made


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 295, (length,), generator=numbers).tolist() for length in lengths]


def padded(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts as a batch with padding at the left."""
    rows, longest = prompts(*lengths, seed=seed), max(lengths)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, inputs: dict[str, torch.Tensor], new: int = 40, **how: Any) -> list[list[int]]:
    """The tokens of `generate`, without the prompts."""
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | how
    out = model.generate(**inputs, **how)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def one_by_one(model: Any, requests: list[list[int]], new: int = 40) -> list[list[int]]:
    """The tokens of `generate` for each request alone."""
    rows = [torch.tensor([request]) for request in requests]
    return [generated(model, {"input_ids": row, "attention_mask": torch.ones_like(row)}, new)[0] for row in rows]


def batched(model: Any, requests: list[list[int]], new: int = 40, **settings: Any) -> list[list[int]]:
    """The tokens of `generate_batch`."""
    settings = {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 64, "auto_switch_to_flash": False} | settings
    how = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(
        copy.deepcopy(requests),
        generation_config=how,
        continuous_batching_config=generation.ContinuousBatchingConfig(**settings),
        progress_bar=False,
    )
    assert not [request.error for request in out.values() if request.error]
    return [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rsplit("_", 1)[1]))]
