"""Real engines: greedy tokens and their probabilities with `attention_backend="quire"`, against the same model in float64.

The budget of a log-probability is twice the error of transformers in fp32, and the chosen token is the most probable one in float64
unless the gap to it is within the budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clients.sglang.models import MODELS

TOKENS = 24
PREFIX = [(i * 37 + 11) % 256 for i in range(40)]
ROUNDS = [
    [[*PREFIX, *((i * 53 + seed) % 256 for i in range(count))] for seed, count in ((1, 3), (2, 20), (3, 50))] + [[5, 6, 7]],
    [[*PREFIX, 9], [1, 2], [200]],
]
"""The second round finds the prefix of the first in the cache."""
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, chunked and mixed": (
        "llama",
        {"max_total_tokens": 300, "chunked_prefill_size": 16, "enable_mixed_chunk": True, "max_running_requests": 4},
    ),
    "qwen3, pages of 16": ("qwen3", {"max_total_tokens": 640, "page_size": 16}),
    "gemma2, softcap and window": ("gemma2", {"max_total_tokens": 640}),
}


def generate(folder: Path, model: Path, backend: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    asked, answer = folder / "asked.json", folder / "answer.json"
    settings = {"model_path": str(model), "attention_backend": backend, **settings}
    asked.write_text(json.dumps({"settings": settings, "tokens": TOKENS, "rounds": ROUNDS}))
    script = str(Path(__file__).with_name("generate.py"))
    done = subprocess.run((sys.executable, "-W", "ignore", script, asked, answer), capture_output=True, text=True, timeout=400)
    assert answer.exists(), (done.stdout + done.stderr)[-4000:]
    return json.loads(answer.read_text())


@torch.no_grad()
def log_probabilities(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of each token of an answer, given those before it: `[tokens, vocabulary]`."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("name, settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_and_probabilities(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    model = tmp_path / name
    MODELS[name](model)
    made = generate(tmp_path, model, "quire", settings)
    load = transformers.AutoModelForCausalLM.from_pretrained
    single, double = (load(model, dtype=dtype, attn_implementation="eager") for dtype in (torch.float32, torch.float64))
    errors, budget = [], 0.0
    gaps = []
    for prompts, result in zip(ROUNDS, made, strict=True):
        for prompt, tokens, logprobs in zip(prompts, result["tokens"], result["logprobs"], strict=True):
            assert len(tokens) == TOKENS
            right, plain = (log_probabilities(m, prompt, tokens) for m in (double, single))
            chosen = right.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            budget = max(budget, 2 * float((plain - right).abs().max()))
            errors.append(float((torch.tensor(logprobs, dtype=torch.float64) - chosen).abs().max()))
            gaps.append(float((right.max(1).values - chosen).max()))
    print(f"largest error {max(errors):.2e}, largest gap {max(gaps):.2e}, budget {budget:.2e}")
    assert max(errors) <= budget
    assert max(gaps) <= 2 * budget
    assert made[1]["cached"][0] >= len(PREFIX) // settings.get("page_size", 1) * settings.get("page_size", 1)
    assert len({token for answer in made[0]["tokens"] for token in answer}) > len(ROUNDS[0])  # not one token for every prompt


def test_the_example_runs(tmp_path: Path) -> None:
    MODELS["llama"](tmp_path / "llama")
    example = Path(__file__).parents[3] / "examples" / "integrations" / "sglang_engine.py"
    command = (sys.executable, "-W", "ignore", example, tmp_path / "llama", "cpu")
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("tokens")]
    assert len(lines) == 2 and lines[0] != lines[1], done.stdout + done.stderr
