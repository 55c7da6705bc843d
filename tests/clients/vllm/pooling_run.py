"""Runs prompts through an encoder model and writes its vectors, with those of transformers in float64:

python pooling_run.py REQUEST.json RESULT.pt
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from engine_run import count_calls
from vllm import LLM, PoolingParams


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The vector of the first token of each prompt, not normalised."""
    counts: Counter[str] = Counter()
    if "QUIRE_VLLM_OVERRIDE" in os.environ:
        count_calls(counts)
    llm = LLM(
        request["model"],
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        pooler_config={"pooling_type": "CLS", "use_activation": False},
    )
    rng = random.Random(request["seed"])
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in request["lengths"]]
    outputs = llm.embed(
        [{"prompt_token_ids": prompt} for prompt in prompts], pooling_params=PoolingParams(use_activation=False), use_tqdm=False
    )
    import transformers

    model = transformers.AutoModel.from_pretrained(request["model"], dtype=torch.float64, attn_implementation="eager").eval()
    results = []
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs):
            right = model(torch.tensor([prompt])).last_hidden_state[0, 0]
            results.append({"vector": torch.tensor(output.outputs.embedding, dtype=torch.float64), "reference": right})
    return {"results": results, "counts": dict(counts)}


if __name__ == "__main__":
    torch.save(run(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
