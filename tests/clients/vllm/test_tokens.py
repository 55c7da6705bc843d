"""Quire in place of vLLM's CPU backend: the same tokens, and logits within the error budget, in hundreds of mixed steps with prefix
caching, chunked prefill, preemption and n-gram speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import VOCABULARY
from running import Run, compare, start, start_both

STEPS = 200
"""Steps in which some sequences prefill while others decode."""


def mixed_request(model: Path, **engine: Any) -> dict[str, Any]:
    """Many requests, in steps of few tokens and with few pages."""
    return {
        "engine": {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 32,
            "block_size": 32,
            "num_gpu_blocks_override": 27,
            "enable_prefix_caching": True,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1},
        }
        | engine,
        "requests": 48,
        "longest": 300,
        "max_tokens": 24,
        "every": 4,
        "seed": 3,
        "vocabulary": VOCABULARY,
    }


def happened(run: Run) -> None:
    """A comparison shows nothing unless the engine did all of this."""
    for event in ("chunks", "preemptions", "cached", "drafts", "accepted"):
        assert run.counts.get(event, 0) > 0, f"no {event}: {run.counts}"
    assert run.counts["mixed"] >= STEPS, run.counts


def quire_ran(run: Run, layers: int) -> None:
    """Every layer of every step was written and attended by Quire."""
    assert run.counts["backend quire.integrations.vllm.backend.QuireInPlaceOfCpuAttn"] == layers
    assert run.counts["attend"] == run.counts["write"] == layers * run.counts["steps"]


LONGER = {"bloom": 64}
"""Tokens to generate for models whose drafts are mostly accepted: with fewer, no sequence needs another page while others run."""
LAYERS = {"llama": 3, "qwen3": 3, "gemma2": 4, "gpt_oss": 4, "bloom": 3}


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_equal_those_of_the_stock_backend(name: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path(name)
    request = mixed_request(model)
    request["max_tokens"] = LONGER.get(name, request["max_tokens"])
    stock, quire = start_both(tmp_path, name, request)
    happened(stock)
    happened(quire)
    quire_ran(quire, LAYERS[name])
    assert not any("quire" in event for event in stock.counts)
    found = compare(stock, quire, model)
    print(name, found, quire.counts)
    assert found.agrees, found
    # Logits far from the reference would make the budget meaningless: fp32 has 24 bits.
    assert found.stock_error < 2**-10, found
    assert found.compared > 0.9 * quire.counts["generated"]


@pytest.mark.parametrize(("name", "fault"), [("gemma2", "narrow window"), ("llama", "wrong scale"), ("gpt_oss", "no sinks")])
def test_a_wrong_plugin_is_noticed(name: str, fault: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path(name)
    request = mixed_request(model) | {"requests": 6}
    stock = start(tmp_path, "stock", request)
    wrong = start(tmp_path, "wrong", request | {"fault": fault}, QUIRE_VLLM_OVERRIDE="CPU_ATTN")
    found = compare(stock.wait(), wrong.wait(), model)
    print(fault, found)
    assert found.quire_error > found.budget
