"""Names of other libraries, and what users type by habit: it works, or the error points to the right way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import quire


@pytest.fixture
def given() -> dict[str, Any]:
    pool = quire.PagePool(pages=8, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
    q, k, v = torch.randn(3, 5, 1, 8)
    return {"q": q, "k": k, "v": v, "cache": cache, "batch": pool.step({pool.sequence(): 5})}


def attend(given: dict[str, Any], **more: Any) -> Any:
    return quire.attend(given["q"], given["cache"], given["batch"], **more)


def step(given: dict[str, Any], **more: Any) -> Any:
    return quire.step(*(given[name] for name in ("q", "k", "v", "cache", "batch")), **more)


def write(given: dict[str, Any], **more: Any) -> Any:
    return quire.write(*(given[name] for name in ("k", "v", "cache", "batch")), **more)


def batch(given: dict[str, Any], **more: Any) -> Any:
    return quire.Batch(kv_lens=given["batch"].kv_lens, q_starts=given["batch"].q_starts, **more)


@pytest.mark.parametrize(
    "call, name, pointer",
    [
        (attend, "softcap", "an option of the layer: options=quire.Options(softcap=...)"),
        (attend, "logits_soft_cap", "options=quire.Options(softcap=...)"),
        (attend, "softmax_scale", "options=quire.Options(scale=...)"),
        (attend, "block_tables", "a part of the batch: quire.Batch(page_table=...)"),
        (step, "sliding_window", "options=quire.Options(window=...)"),
        (step, "return_lse", "the argument is called lse: quire.step(lse=...)"),
        (write, "slot_mapping", "the argument is called slots: quire.write(slots=...)"),
        (
            write,
            "colour",
            "quire.write has no such argument; it has k, v, cache, batch, slots, rope, q, q_out, positions, kernel, check",
        ),
        (batch, "block_tables", "the argument is called page_table: quire.Batch(page_table=...)"),
        (batch, "max_seqlen_q", "the argument is called max_q_len"),
    ],
)
def test_an_unknown_name_is_answered(given: dict[str, Any], call: Callable[..., Any], name: str, pointer: str) -> None:
    before = given["cache"].k.clone()
    with pytest.raises(quire.ArgumentError) as refused:
        call(given, **{name: torch.zeros(2, 3)})
    assert str(refused.value).startswith(f"{name}: given float32[2, 3] on cpu; allowed: ") and pointer in str(refused.value)
    assert torch.equal(given["cache"].k, before), "nothing was written"


def explain(given: dict[str, Any], **more: Any) -> Any:
    return quire.explain(given["q"], given["cache"], given["batch"], **more)


def check(given: dict[str, Any], **more: Any) -> Any:
    return quire.check(given["q"], given["cache"], given["batch"], **more)


@pytest.mark.parametrize(
    "call, pointer",
    [
        (lambda x, given: quire.KVCache.wrap(x), "layout: given nothing (None); allowed: nhd, hnd, vllm_x, vllm_joint, aiter"),
        (lambda x, given: quire.KVCache.wrap(kv_cache=x), "the argument is called k_pages: quire.KVCache.wrap(k_pages=...)"),
        (lambda x, given: quire.KVCache.wrap(x, kv_layout="nhd"), "the argument is called layout: quire.KVCache.wrap(layout=...)"),
        (lambda x, given: quire.PagePool(num_blocks=8, page_size=4), "the argument is called pages: quire.PagePool(pages=...)"),
        (lambda x, given: quire.PagePool(8, block_size=4), "the argument is called page_size: quire.PagePool(page_size=...)"),
        (lambda x, given: quire.PagePool(8), "page_size: given nothing (None); allowed: an int of 1 or more"),
        (
            lambda x, given: quire.KVCache.allocate(quire.PagePool(8, 4), num_kv_heads=1, head_dim=8),
            "the argument is called kv_heads: quire.KVCache.allocate(kv_heads=...)",
        ),
        (lambda x, given: quire.Options(sliding_window=8), "the argument is called window: quire.Options(window=...)"),
        (lambda x, given: quire.Options(soft_cap=8.0), "the argument is called softcap: quire.Options(softcap=...)"),
        (lambda x, given: explain(given, softcap=30.0), "an option of the layer: options=quire.Options(softcap=...)"),
        (lambda x, given: check(given, softcap=30.0), "an option of the layer: options=quire.Options(softcap=...)"),
    ],
)
def test_caches_pools_options_and_questions_answer_too(
    given: dict[str, Any], call: Callable[[torch.Tensor, dict[str, Any]], Any], pointer: str
) -> None:
    with pytest.raises(quire.ArgumentError) as refused:
        call(torch.zeros(2, 8, 4, 1, 8), given)
    assert pointer in str(refused.value)


def test_signatures_are_those_that_were_written() -> None:
    import inspect

    assert list(inspect.signature(quire.PagePool).parameters) == ["pages", "page_size", "device", "shard"]
    assert "softcap" in inspect.signature(quire.Options).parameters and "layout" in inspect.signature(quire.KVCache.wrap).parameters


def test_a_batch_without_a_table_names_it(given: dict[str, Any]) -> None:
    with pytest.raises(quire.ArgumentError, match=r"page_table: given nothing \(None\)"):
        batch(given)


@pytest.mark.parametrize("name", ["NHD", "Hnd", "VLLM_JOINT"])
def test_layouts_in_any_case(name: str) -> None:
    cache = quire.KVCache.allocate(quire.PagePool(pages=8, page_size=4), kv_heads=1, head_dim=8, layout=name)
    assert cache.layout.name == name.lower()


@pytest.mark.parametrize("axis", [0, 1], ids=["vLLM", "FlashInfer"])
def test_a_stacked_cache_is_wrapped_without_a_copy(axis: int) -> None:
    k, v = torch.randn(2, 7, 4, 3, 8)
    stacked = torch.stack((k, v), axis)
    cache = quire.KVCache.wrap(stacked, layout="nhd")
    assert torch.equal(cache.k, k) and torch.equal(cache.v, v)
    stacked.zero_()
    assert not cache.k.any() and not cache.v.any()


@pytest.mark.parametrize(
    "shape, layout, pointer",
    [
        ((2, 2, 4, 3, 8), "nhd", "K and V stacked as [2, page, slot, head, dim] or [page, 2, slot, head, dim], or two tensors"),
        ((7, 3, 4, 3, 8), "hnd", "K and V stacked as [2, page, head, slot, dim]"),
        ((2, 7, 3, 1, 4, 8), "vllm_x", "allowed: two tensors: wrap(pages[0], pages[1], layout='vllm_x')"),
    ],
    ids=["ambiguous", "no pair", "split layout"],
)
def test_a_stacked_cache_that_is_not_clear(shape: tuple[int, ...], layout: str, pointer: str) -> None:
    with pytest.raises(quire.ArgumentError) as refused:
        quire.KVCache.wrap(torch.zeros(shape), layout=layout)
    assert pointer in str(refused.value)
