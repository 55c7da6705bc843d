"""The solutions: functions with the inputs of FlashInfer's definitions, on `quire.attend`."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.errors import ArgumentError, describe
from quire.integrations.flashinfer.calls import WrapperCall, function_call
from quire.options import Options

_BATCHES: WeakKeyDictionary[Any, tuple[tuple[tuple[torch.Tensor, int], ...], Batch]] = WeakKeyDictionary()
"""The batch of each wrapper's last plan: all layers of a pass use it."""
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def paged_decode(**given: Any) -> Result:
    """`gqa_paged_decode`: one new token for each sequence."""
    call = WrapperCall.current(given)
    arrays = {
        "kv_indptr": call.plan["indptr"],
        "kv_indices": call.plan["indices"],
        "kv_last_page_len": call.plan["last_page_len"],
    }
    return _run(call, given, _cache(call, given), _paged_batch(call, given, arrays), causal=True)


def paged_prefill(**given: Any) -> Result:
    """`gqa_paged_prefill`: new tokens of each sequence, over pages that hold them already."""
    call = WrapperCall.current(given)
    arrays = {
        "kv_indptr": call.plan["paged_kv_indptr"],
        "kv_indices": call.plan["paged_kv_indices"],
        "kv_last_page_len": call.plan["paged_kv_last_page_len"],
        "qo_indptr": call.plan["qo_indptr"],
    }
    return _run(call, given, _cache(call, given), _paged_batch(call, given, arrays), causal=bool(call.plan.get("causal", False)))


def ragged_prefill(**given: Any) -> Result:
    """`gqa_ragged`: new tokens of each sequence over keys without pages. Each key is a page of its own."""
    call = WrapperCall.current(given)
    device = given["q"].device
    q_starts, k_starts = (call.plan[name].to(device) for name in ("qo_indptr", "kv_indptr"))
    lens = k_starts.diff()
    width = int(call.plan["kv_indptr"].diff().max()) if lens.numel() else 0
    table = k_starts[:-1, None] + torch.arange(max(width, 1), dtype=k_starts.dtype, device=device)
    cache = KVCache.wrap(given["k"].unsqueeze(1), given["v"].unsqueeze(1), layout="nhd")
    return _run(call, given, cache, Batch(table, lens, q_starts), causal=bool(call.plan.get("causal", False)))


def function_decode(**given: Any) -> torch.Tensor:
    """`trtllm_batch_decode`: one new token for each sequence, by a function without a plan."""
    call = function_call()
    lens = call["seq_lens"]
    q_starts = torch.arange(lens.shape[0] + 1, dtype=lens.dtype, device=lens.device)
    if call["cum_seq_lens_q"] is not None or call["query"].shape[0] != lens.shape[0]:
        raise ArgumentError("query", describe(call["query"]), f"one row for each of the {lens.shape[0]} sequences")
    return _run_function(call, q_starts, 1, call["max_seq_len"], causal=True)


def function_context(**given: Any) -> torch.Tensor:
    """`trtllm_batch_context`: new tokens of each sequence, by a function without a plan."""
    call = function_call()
    return _run_function(call, call["cum_seq_lens_q"], call["max_q_len"], call["max_kv_len"], causal=bool(call["causal"]))


def _run_function(call: dict[str, Any], q_starts: torch.Tensor, max_q: int, max_kv: int, causal: bool) -> torch.Tensor:
    """Nothing is read from a GPU: the arrays are used as they are, so a CUDA graph can capture it."""
    query, pages = call["query"], call["kv_cache"]
    scale, of_values = call["bmm1_scale"], call["bmm2_scale"]
    for name, value in (("bmm1_scale", scale), ("bmm2_scale", of_values)):
        if isinstance(value, torch.Tensor):
            raise ArgumentError(name, describe(value), "a number")
    if query.element_size() == 1:
        raise ArgumentError("query", describe(query), "fp16, bf16 or fp32")
    if call["out_dtype"] not in (None, query.dtype):
        raise ArgumentError("out_dtype", describe(call["out_dtype"]), f"None or that of query, {query.dtype}")
    if pages.dim() != 5 or pages.shape[1] != 2:
        raise ArgumentError("kv_cache", describe(pages), "[pages, 2, ...], keys and values")
    scales: dict[str, Any] = {}
    if pages.element_size() == 1:
        scales = {"k_scale": 1.0, "v_scale": float(of_values)}  # the scale of the keys is part of bmm1_scale
    elif of_values != 1:
        raise ArgumentError("bmm2_scale", describe(of_values), f"1 for a cache of {pages.dtype}")
    cache = KVCache.wrap(pages[:, 0], pages[:, 1], layout=call["kv_layout"].lower(), **scales)
    batch = Batch(call["block_tables"], call["seq_lens"], q_starts, max_q_len=int(max_q), max_kv_len=int(max_kv))
    return attend(query, cache, batch, Options(window=_sides(call["window_left"], causal), causal=False, scale=float(scale)))


def _sides(left: int | None, causal: bool) -> tuple[int | None, int | None] | None:
    """The window. Causality is one without keys to the right: it is defined for sequences with more queries than keys, too."""
    sides = (None if left is None or left < 0 else int(left), 0 if causal else None)
    return None if sides == (None, None) else sides


def _cache(call: WrapperCall, given: dict[str, Any]) -> KVCache:
    k, v = given["k_cache"], given["v_cache"]
    scales: dict[str, Any] = {name: call.run.get(name) for name in ("k_scale", "v_scale")}
    if k.element_size() > 1:
        for name, value in scales.items():
            if value is not None and not (isinstance(value, (int, float)) and value == 1):
                raise ArgumentError(name, describe(value), f"None or 1 for a cache of {k.dtype}")
        scales = {}
    else:
        scales = {name: 1.0 if value is None else value for name, value in scales.items()}
    return KVCache.wrap(k, v, layout=call.wrapper._kv_layout.lower(), **scales)


def _paged_batch(call: WrapperCall, given: dict[str, Any], arrays: dict[str, torch.Tensor]) -> Batch:
    """The batch of the wrapper's plan. It is kept until the wrapper is planned with other tensors, or their values change."""
    known = tuple((tensor, tensor._version) for tensor in arrays.values())
    kept = _BATCHES.get(call.wrapper)
    if kept is not None and len(kept[0]) == len(known) and all(a is b and m == n for (a, m), (b, n) in zip(kept[0], known)):
        return kept[1]
    device = given["q"].device
    # Read where the plan's arrays are: on the host, as FlashInfer recommends, nothing waits for the device.
    counts = arrays["kv_indptr"].diff()
    width = int(counts.max()) if counts.numel() else 0
    made = Batch.from_flashinfer(
        **{name: tensor.to(device) for name, tensor in arrays.items()}, page_size=int(call.plan["page_size"]), pages_per_seq=width
    )
    _BATCHES[call.wrapper] = known, made
    return made


def _run(call: WrapperCall, given: dict[str, Any], cache: KVCache, batch: Batch, causal: bool) -> Result:
    q, wanted = given["q"], call.plan.get("o_data_type")
    if wanted is not None and wanted not in (q.dtype, str(q.dtype).removeprefix("torch.")):
        raise ArgumentError("o_data_type", describe(wanted), f"that of q, {q.dtype}")
    left = call.run.get("window_left")
    left = call.plan.get("window_left", -1) if left is None else left
    options = Options(
        window=_sides(left, causal),
        causal=False,
        softcap=call.plan.get("logits_soft_cap") or None,
        scale=given.get("sm_scale", call.plan.get("sm_scale")),
        batch_invariant=bool(call.plan.get("disable_split_kv") or (call.plan.get("fixed_split_size") or 0) > 0),
    )
    if not given.get("return_lse"):
        return attend(q, cache, batch, options)
    out, lse = attend(q, cache, batch, options, lse=True)
    # FlashInfer's LSE is to base 2.
    return out, lse / math.log(2)
