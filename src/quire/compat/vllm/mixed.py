"""The mixed batch: prefills and decodes in one call, over the x-packed caches."""

from __future__ import annotations

import torch

from quire.cache.kv_cache import Scale
from quire.compat.vllm.attention import EVERY, PREFILL, attend, batch_of, new_tokens
from quire.compat.vllm.caches import number, x_packed
from quire.compat.vllm.translation import operator
from quire.errors import ArgumentError, describe
from quire.options import Options, Window


@operator()
def chunked_prefill_paged_decode(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    output: torch.Tensor,
    kv_cache_dtype: str,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    max_query_len: int,
    k_scale: Scale,
    v_scale: Scale,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    sm_scale: float | None = None,
    output_scale: Scale = None,
    sinks: torch.Tensor | None = None,
    is_block_table_ptr: bool = False,
    causal: bool = True,
    *,
    strict: bool = False,
) -> None:
    """Writes `output`. Sequences with several new tokens read them from `key` and `value` and their context from the cache.
    Sequences with one new token, and all sequences if `key` and `value` are None, read all tokens from the cache. The output of
    sequences without new tokens is not written.

    `strict` (not vLLM's) checks that the cache holds the new token of each decode sequence as in `key` and `value`, and raises a
    ContractError that names the sequence, position, page and slot of a missing one. It reads values on the host."""
    cache = x_packed(kv_cache_dtype, key_cache, value_cache, k_scale, v_scale)
    batch = batch_of(block_table, seq_lens, query_start_loc, max_query_len, max_seq_len, key_cache if is_block_table_ptr else None)
    options = Options(
        window=window_of(sliding_window),
        alibi=alibi_slopes,
        sinks=sinks,
        scale=sm_scale,
        causal=causal,
        out_scale=number("out_scale", output_scale),
    )
    attend(query, cache, batch, options, new_tokens(key, value), output, context_from=2, strict=strict)


@operator(
    {
        "q": "q",
        "new[0]": "k",
        "new[1]": "v",
        "out": "o",
        "page_table": "b_loc",
        "kv_lens": "b_seq_len",
        "q_starts": "b_start_loc",
        "max_q_len": "max_input_len",
        "out_scale": "fp8_out_scale",
        "k_pages": "k_cache",
        "v_pages": "v_cache",
    }
)
def context_attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    o: torch.Tensor,
    kv_cache_dtype: str,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    b_loc: torch.Tensor,
    b_start_loc: torch.Tensor,
    b_seq_len: torch.Tensor,
    max_seq_len: int,
    max_input_len: int,
    k_scale: Scale,
    v_scale: Scale,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    sm_scale: float | None = None,
    skip_decode: bool = False,
    fp8_out_scale: Scale = None,
    sinks: torch.Tensor | None = None,
    is_block_table_ptr: bool = False,
    causal: bool = True,
) -> None:
    """Writes `o`. Every sequence reads its new tokens from `k` and `v` and its context from the cache; all tokens from the cache if
    `k` and `v` are None. With `skip_decode`, the output of sequences with one new token is not written."""
    if k is None and alibi_slopes is not None:
        raise NotImplementedError(
            "context_attention_fwd: alibi_slopes with k=None is not supported, as in vLLM; unified_attention supports it"
        )
    cache = x_packed(kv_cache_dtype, k_cache, v_cache, k_scale, v_scale)
    batch = batch_of(b_loc, b_seq_len, b_start_loc, max_input_len, max_seq_len, k_cache if is_block_table_ptr else None)
    options = Options(
        window=window_of(sliding_window),
        alibi=alibi_slopes,
        sinks=sinks,
        scale=sm_scale,
        causal=causal,
        out_scale=number("out_scale", fp8_out_scale),
    )
    attend(q, cache, batch, options, new_tokens(k, v), o, only=PREFILL if skip_decode else EVERY)


def window_of(sliding_window: int | None) -> Window:
    """The window of `sliding_window` keys, including the query's own; 0 or less means no window. It only limits keys to the left,
    also in non-causal calls."""
    if sliding_window is not None and not isinstance(sliding_window, int):
        raise ArgumentError("window", describe(sliding_window), "a number of keys, the query's own included, or None")
    return None if sliding_window is None or sliding_window <= 0 else (sliding_window - 1, None)
