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
DRAWS = 4
"""How often the errors of K and V are drawn."""


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


class RoundingCache:
    """Attention of a model in which K and V are rounded as a cache rounds them, in the order of its calls.

    Args:
        cache_type: How K and V are rounded; None rounds nothing.
        errors: For each call, the largest error of K and of V before they are rounded; each element gets a random one.
    """

    def __init__(self, cache_type: str | None, errors: list[tuple[float, float]] | None = None):
        self.cache_type, self.errors = cache_type, errors
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        if self.errors is not None:
            k, v = (x + e * (2 * torch.rand_like(x) - 1) for x, e in zip((k, v), self.errors[len(self.seen)]))
        self.seen.append((k, v))
        group = q.shape[1] // k.shape[1]
        k, v = (rounded(x, self.cache_type).repeat_interleave(group, 1) for x in (k, v))
        later = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(2, 3) * scaling).masked_fill(later, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2), None


def logits_of(model: Path, run: Run, attention: RoundingCache, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The logits from which each token of each request should have been taken, with this attention."""
    transformers.AttentionInterface.register("rounding", attention)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="rounding", dtype=dtype).eval()
    with torch.inference_mode():
        return [
            loaded(torch.tensor([result["prompt"] + result["tokens"]]), use_cache=False)
            .logits[0, len(result["prompt"]) - 1 : -1]
            .double()
            for result in run.results
        ]


def largest(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def error_budget(model: Path, run: Run, cache_type: str, right: list[torch.Tensor]) -> float:
    """What fp32 costs with such a cache: the error of a straightforward computation, and that of K and V which round to the other
    neighbour because they have an error before. How large that is, is measured without the rounding, in fp32 and float64; which
    elements it concerns is chance, so all elements get errors up to the largest, several times."""
    single, double = RoundingCache(None), RoundingCache(None)
    logits_of(model, run, single, torch.float32)
    logits_of(model, run, double)
    errors = [
        (float((k - exact_k).abs().max()), float((v - exact_v).abs().max()))
        for (k, v), (exact_k, exact_v) in zip(single.seen, double.seen, strict=True)
    ]
    torch.manual_seed(7)
    found = [logits_of(model, run, RoundingCache(cache_type, errors)) for _ in range(DRAWS)]
    found.append(logits_of(model, run, RoundingCache(cache_type), torch.float32))
    return SAFETY_FACTOR * max(largest(logits, right) for logits in found)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_logits_are_those_of_a_rounded_cache(cache_type: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path("llama")
    engine = {"model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_dtype": cache_type}
    request = {"engine": engine, "requests": 12, "longest": 300, "max_tokens": 24, "every": 2, "seed": 3, "vocabulary": VOCABULARY}
    run = start(tmp_path, cache_type, request, QUIRE_VLLM_OVERRIDE="CPU_ATTN").wait()
    right = logits_of(model, run, RoundingCache(cache_type))
    budget = error_budget(model, run, cache_type, right)
    error = largest([result["logits"] for result in run.results], right)
    rounding = largest(logits_of(model, run, RoundingCache(None)), right)
    print(cache_type, "error", error, "budget", budget, "rounding", rounding)
    assert error <= budget
    # Otherwise a cache that is not rounded at all, or rounded otherwise, could pass.
    assert budget < rounding, "the rounding of the cache has to be larger than the budget"
