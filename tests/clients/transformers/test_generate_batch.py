"""`generate_batch` with "quire/flash-attn2": the tokens of eager attention, without a gather of keys and values."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers.generation.continuous_batching import PagedAttentionCache

import quire.integrations.transformers as integration
from quire.integrations.transformers import page_tables
from support.transformers_models import CONFIGS, LAYERS, OWN_CODE, SLIDING, WINDOW, batched, launches, model, one_by_one, prompts

NAMES = [name for name in CONFIGS if name not in OWN_CODE]
GPT_OSS = "kernels-community/vllm-flash-attn3"
"""The only repository that GPT-OSS accepts here: transformers replaces any other name that contains "flash" by it."""


@pytest.fixture(autouse=True, scope="module")
def stand_in() -> None:
    integration.register(replace=GPT_OSS)


def requests() -> list[list[int]]:
    """Prompts from one token to twice as many as a step takes, two with a common beginning, two equal."""
    rows = prompts(3, 70, 17, 130, 1, 33)
    return [*rows, [*rows[3][:100], 7, 8, 9], rows[3]]


def pages_of(name: str, page_size: int) -> int:
    return {"num_blocks": 4096 // page_size}["num_blocks"]


@pytest.mark.parametrize("page_size", [4, 16, 30, 256])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_eager(name: str, page_size: int) -> None:
    expected = one_by_one(model(name, "eager"), requests())
    made = model(name, integration.FLASH)
    with launches() as seen, mock.patch.object(PagedAttentionCache, "update", side_effect=AssertionError("keys were gathered")):
        assert batched(made, requests(), page_size=page_size, num_blocks=pages_of(name, page_size)) == expected
    steps = {(kind, step.context_first, step.is_ring) for kind, step in seen.steps}
    if name in SLIDING:
        # Decode steps read the pages of the ring; mixed steps attend before they write.
        assert {("sliding_attention", False, True), ("sliding_attention", True, False)} <= steps
        ring = (page_size, -(-WINDOW // page_size))
        assert ring in {(launch.page_size, launch.table[1]) for launch in seen if not launch.context_form}
    if name != "mistral":
        assert ("full_attention", False, False) in steps
        assert page_size in {launch.page_size for launch in seen}
    # Every layer of every step: the steps are counted once for each kind of layer.
    kinds = len({kind for kind, _ in seen.steps})
    assert len(seen) == LAYERS * len(seen.steps) // kinds


def test_shared_prefixes_are_not_computed_again() -> None:
    """A request whose beginning is in the cache already processes the rest alone."""
    first = prompts(96)[0]
    made, reference = model("llama", integration.FLASH), model("llama", "eager")
    rows = [first, *(first[:64] + row for row in prompts(5, 11, seed=3))]
    with launches() as seen:
        assert batched(made, rows, new=8, max_batch_tokens=96, max_requests_per_batch=1) == one_by_one(reference, rows, new=8)
    shared = sum(launch.tokens for launch in seen) // LAYERS
    with launches() as seen:
        batched(made, rows, new=8, max_batch_tokens=96, max_requests_per_batch=1, allow_block_sharing=False)
    alone = sum(launch.tokens for launch in seen) // LAYERS
    assert alone - shared == 2 * 64


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_requests_that_wait_for_pages(name: str) -> None:
    """A cache that holds few of the requests at once: requests wait, and are evicted and computed again."""
    rows = prompts(40, 45, 50, 33, 38, 41)
    made = model(name, integration.FLASH)
    got = batched(made, rows, new=30, page_size=8, num_blocks=20, max_batch_tokens=32)
    assert got == one_by_one(model(name, "eager"), rows, new=30)


def test_generate_works_with_the_same_name() -> None:
    """Without a paged cache transformers calls the functions of FlashAttention, as for any kernel."""
    rows = prompts(21, 33)
    for name in ("llama", "mistral", "gemma2"):
        with launches() as seen:
            assert one_by_one(model(name, integration.FLASH), rows, new=30) == one_by_one(model(name, "eager"), rows, new=30)
        assert seen


def _chronological(*given: Any) -> torch.Tensor:
    """A fault: the pages of a ring from the oldest token on, as if it never wrapped around."""
    read, rows, starts, lens, positions, sizes = given
    return _ring(read, rows, starts, lens, torch.zeros_like(positions), sizes)


def _unshifted(*given: Any) -> torch.Tensor:
    """A fault: every request has the pages of the first."""
    return _taken(*given)[:1].expand(given[1].shape[0] - 1, -1).contiguous()


_ring, _taken = page_tables._ring, page_tables._taken


@pytest.mark.parametrize("fault, name", [("_ring", "mistral"), ("_ring", "gpt_oss"), ("_taken", "llama"), ("_taken", "gemma2")])
def test_these_tests_detect_faults(fault: str, name: str) -> None:
    expected = one_by_one(model(name, "eager"), requests())
    broken = _chronological if fault == "_ring" else _unshifted
    with mock.patch.object(page_tables, fault, broken):
        assert batched(model(name, integration.FLASH), requests(), page_size=16) != expected
