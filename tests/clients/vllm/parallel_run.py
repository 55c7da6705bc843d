"""Runs prompts through an engine with several ranks, each in a process of its own, and writes what came out:

python parallel_run.py REQUEST.json RESULT.pt
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from engine_run import logits_of, prompts_of
from vllm import LLM, SamplingParams


def layers_that_ran(model: torch.nn.Module) -> list[str]:
    """The classes of the attention layers of this rank that have used a cache, and the heads that each has."""
    found = [module for module in model.modules() if hasattr(module, "impl") and hasattr(module, "get_attn_backend")]
    return [f"{type(m.impl).__name__} {m.impl.num_heads}" for m in found if getattr(m.impl, "_cache", None) is not None]


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Generates from all prompts at once."""
    llm = LLM(**request["engine"], skip_tokenizer_init=True, logprobs_mode="raw_logits", max_logprobs=-1)
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, logprobs=-1, max_tokens=request["max_tokens"])
    prompts = prompts_of(request["requests"], request["longest"], request["seed"])
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    results = [
        {
            "prompt": prompt,
            "tokens": list(output.outputs[0].token_ids),
            "logits": logits_of(output.outputs[0], request["vocabulary"]),
        }
        for prompt, output in zip(prompts, outputs)
    ]
    return {"results": results, "counts": {"ran": llm.apply_model(layers_that_ran)}}


if __name__ == "__main__":
    torch.save(run(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
