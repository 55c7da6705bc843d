"""Quantised caches in a running engine, compared with transformers in float64 with K and V rounded as the cache rounds them. The
stock CPU backend is no reference here: its own errors are larger than those of the rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY
from running import SAFETY_FACTOR, Run, start

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CACHE_TYPES = (*FP8, "fp8_per_token_head", "int8_per_token_head")


def rounded(x: torch.Tensor, cache_type: str | None) -> torch.Tensor:
    """The values that a cache returns, with a scale of the layer of 1; None rounds nothing."""
    if cache_type is None:
        return x
    if cache_type in FP8:
        limit = torch.finfo(FP8[cache_type]).max
        return x.float().clamp(-limit, limit).to(FP8[cache_type]).to(x.dtype)
    largest = 127.0 if cache_type == "int8_per_token_head" else 448.0
    scale = x.abs().amax(-1, keepdim=True) / largest
    units = x / scale
    units = units.round() if cache_type == "int8_per_token_head" else units.float().to(torch.float8_e4m3fn).to(x.dtype)
    return units * scale


def attention(cache_type: str | None) -> Any:
    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        k, v = (rounded(x, cache_type).repeat_interleave(group, 1) for x in (k, v))
        later = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(2, 3) * scaling).masked_fill(later, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2), None

    return attend


def reference(model: Path, cache_type: str | None) -> Any:
    name = f"rounded_{cache_type}"
    transformers.AttentionInterface.register(name, attention(cache_type))
    return transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation=name, dtype=torch.float64).eval()


def logits_of(model: Any, run: Run) -> list[torch.Tensor]:
    """The logits from which each token of each request should have been taken."""
    with torch.inference_mode():
        return [
            model(torch.tensor([result["prompt"] + result["tokens"]]), use_cache=False)
            .logits[0, len(result["prompt"]) - 1 : -1]
            .double()
            for result in run.results
        ]


def largest(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_logits_are_those_of_a_rounded_cache(cache_type: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path("llama")
    engine = {"model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_dtype": cache_type}
    request = {"engine": engine, "requests": 12, "longest": 300, "max_tokens": 24, "every": 2, "seed": 3, "vocabulary": VOCABULARY}
    run = start(tmp_path, cache_type, request, QUIRE_VLLM_OVERRIDE="CPU_ATTN").wait()
    right = logits_of(reference(model, cache_type), run)
    # In fp32 a value of K or V that is near the middle of two rounds to the other one. Such values are rare: what they change
    # is less than half of what rounding all of them changes.
    budget = largest(logits_of(reference(model, None), run), right)
    error = largest([result["logits"] for result in run.results], right)
    print(cache_type, "error", error, "budget", budget)
    assert error < budget / SAFETY_FACTOR
