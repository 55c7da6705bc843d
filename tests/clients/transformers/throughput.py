"""Measures transformers with Quire against its own implementations on this machine's CPU, in alternating runs.

    python tests/clients/transformers/throughput.py [SETTING ...] [--runs N] [--json FILE]

Every setting has a model with random weights, and prompts of random tokens. A run generates the same tokens with each
implementation in turn; the table has the median time of the runs and its quotient.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

import quire.integrations.transformers

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 65536,
}


class Setting(NamedTuple):
    """A model, its prompts, and the implementations to compare."""

    call: str
    requests: int
    prompt: int
    new: int
    window: int | None = None
    cache: str = "dynamic"
    page_size: int = 256
    batch_tokens: int = 512
    dtype: torch.dtype = torch.float32


SETTINGS = {
    "batch-8x2048": Setting("generate_batch", 8, 2048, 32),
    "batch-4x8192": Setting("generate_batch", 4, 8192, 32),
    "batch-16x512": Setting("generate_batch", 16, 512, 64),
    "batch-32x64": Setting("generate_batch", 32, 64, 64),
    "batch-8x2048-page16": Setting("generate_batch", 8, 2048, 32, page_size=16),
    "batch-8x4096-window1024": Setting("generate_batch", 8, 4096, 32, window=1024),
    "batch-8x2048-bf16": Setting("generate_batch", 8, 2048, 32, dtype=torch.bfloat16),
    "generate-4x4096": Setting("generate", 4, 4096, 32),
    "generate-4x4096-static": Setting("generate", 4, 4096, 32, cache="static"),
    "generate-1x8192": Setting("generate", 1, 8192, 32),
    "generate-8x256": Setting("generate", 8, 256, 64),
}


def model_of(setting: Setting, implementation: str) -> LlamaForCausalLM:
    """The model of a setting; the same weights for every implementation."""
    torch.manual_seed(0)
    if setting.window is None:
        config, kind = LlamaConfig(**SIZES, dtype=setting.dtype), LlamaForCausalLM
    else:
        config, kind = MistralConfig(**SIZES, sliding_window=setting.window, dtype=setting.dtype), MistralForCausalLM
    model = kind(config).to(setting.dtype).eval()
    model.set_attn_implementation(implementation)
    return model


def run(model: LlamaForCausalLM, setting: Setting, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens generated."""
    generation = GenerationConfig(max_new_tokens=setting.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    if setting.call == "generate":
        ids = torch.tensor(prompts)
        generation.eos_token_id = None
        if setting.cache == "static":
            generation.cache_implementation = "static"
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        return time.perf_counter() - began, out[:, setting.prompt :].tolist()
    tokens = setting.requests * (setting.prompt + setting.new + setting.page_size)
    batching = ContinuousBatchingConfig(
        page_size=setting.page_size,
        num_blocks=tokens // setting.page_size + 1,
        max_batch_tokens=setting.batch_tokens,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    out = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    seconds = time.perf_counter() - began
    return seconds, [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rsplit("_", 1)[1]))]


def measure(name: str, runs: int) -> dict[str, object]:
    """One row of the table."""
    setting = SETTINGS[name]
    quire_name = "quire" if setting.call == "generate" else quire.integrations.transformers.FLASH
    models = {implementation: model_of(setting, implementation) for implementation in ("sdpa", quire_name)}
    prompts = torch.randint(5, 2000, (setting.requests, setting.prompt), generator=torch.Generator().manual_seed(1)).tolist()
    seconds: dict[str, list[float]] = {implementation: [] for implementation in models}
    tokens = {}
    for _ in range(runs):
        for implementation, model in models.items():
            taken, tokens[implementation] = run(model, setting, prompts)
            seconds[implementation].append(taken)
    stock, ours = (statistics.median(seconds[implementation]) for implementation in models)
    same = sum(a == b for a, b in zip(*tokens.values()))
    return {"setting": name, "sdpa_s": stock, "quire_s": ours, "ratio": stock / ours, "equal_requests": f"{same}/{setting.requests}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"by default all: {', '.join(SETTINGS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", help="also write the rows to this file")
    asked = parser.parse_args()
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    rows = []
    print(f"{'setting':28}{'sdpa s':>10}{'quire s':>10}{'ratio':>8}  same tokens", flush=True)
    for name in asked.settings or SETTINGS:
        row = measure(name, asked.runs)
        rows.append(row)
        figures = f"{row['sdpa_s']:10.2f}{row['quire_s']:10.2f}{row['ratio']:8.2f}"
        print(f"{name:28}{figures}  {row['equal_requests']}", flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
