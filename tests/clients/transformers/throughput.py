"""Measures transformers with Quire against its own implementations on this machine's CPU, in alternating runs.

    python tests/clients/transformers/throughput.py [SETTING ...] [--runs N] [--threads N] [--json FILE]

Every setting has a model with random weights, and prompts of random tokens. A run generates the same tokens with each
implementation in turn; the table has the median time of the runs, and its quotient. CPU seconds, of all threads, are less disturbed
by other programs. The model is narrow, so that attention dominates in long contexts; the settings with short ones show the rest.
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
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
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


def run(model: LlamaForCausalLM, setting: Setting, prompts: list[list[int]]) -> tuple[tuple[float, float], list[list[int]]]:
    """Seconds and CPU seconds, and the tokens generated."""
    began, cpu = time.perf_counter(), time.process_time()
    tokens = generate(model, setting, prompts)
    return (time.perf_counter() - began, time.process_time() - cpu), tokens


def generate(model: LlamaForCausalLM, setting: Setting, prompts: list[list[int]]) -> list[list[int]]:
    generation = GenerationConfig(max_new_tokens=setting.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if setting.call == "generate":
        ids = torch.tensor(prompts)
        generation.eos_token_id = None
        if setting.cache == "static":
            generation.cache_implementation = "static"
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        return out[:, setting.prompt :].tolist()
    tokens = setting.requests * (setting.prompt + setting.new + setting.page_size)
    batching = ContinuousBatchingConfig(
        page_size=setting.page_size,
        num_blocks=tokens // setting.page_size + 1,
        max_batch_tokens=setting.batch_tokens,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    out = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False)
    return [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rsplit("_", 1)[1]))]


def measure(name: str, runs: int) -> dict[str, object]:
    """One row of the table."""
    setting = SETTINGS[name]
    quire_name = "quire" if setting.call == "generate" else quire.integrations.transformers.FLASH
    models = {implementation: model_of(setting, implementation) for implementation in ("sdpa", quire_name)}
    prompts = torch.randint(5, 2000, (setting.requests, setting.prompt), generator=torch.Generator().manual_seed(1)).tolist()
    times: dict[str, list[tuple[float, float]]] = {implementation: [] for implementation in models}
    tokens = {}
    for _ in range(runs):
        for implementation, model in models.items():
            taken, tokens[implementation] = run(model, setting, prompts)
            times[implementation].append(taken)
    row: dict[str, object] = {"setting": name}
    for i, kind in enumerate(("wall", "cpu")):
        stock, ours = (statistics.median(taken[i] for taken in times[implementation]) for implementation in models)
        row |= {f"sdpa_{kind}_s": stock, f"quire_{kind}_s": ours, f"{kind}_ratio": stock / ours}
    same = sum(a == b for a, b in zip(*tokens.values()))
    return row | {"equal_requests": f"{same}/{setting.requests}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"by default all: {', '.join(SETTINGS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="also write the rows to this file")
    asked = parser.parse_args()
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    torch.set_num_threads(asked.threads)
    rows = []
    heads = ("sdpa s", "quire s", "ratio", "sdpa CPU", "quire CPU", "ratio")
    print(f"{'setting':28}" + "".join(f"{head:>11}" for head in heads) + "  same tokens", flush=True)
    for name in asked.settings or SETTINGS:
        row = measure(name, asked.runs)
        rows.append(row)
        figures = [value for value in row.values() if isinstance(value, float)]
        print(f"{name:28}" + "".join(f"{figure:11.2f}" for figure in figures) + f"  {row['equal_requests']}", flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
