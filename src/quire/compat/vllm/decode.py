"""Decode only: sequences with one new token, all tokens in the x-packed caches."""

from __future__ import annotations

from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import Scale
from quire.compat.vllm.attention import DECODE, attend, batch_of
from quire.compat.vllm.caches import number, x_packed
from quire.compat.vllm.mixed import window_of
from quire.compat.vllm.translation import operator
from quire.errors import ArgumentError, describe
from quire.options import Options
from quire.problem import is_fp8


@operator(
    {
        "q": "query_ptr",
        "out": "output_ptr",
        "page_table": "block_tables_ptr",
        "kv_lens": "seq_lens_ptr",
        "q_starts": "query_start_len_ptr",
        "alibi": "alibi_slopes_ptr",
        "sinks": "sink_ptr",
        "window": "SLIDING_WINDOW",
        "scale": "scale",
        "out_scale": "out_scale_inv",
        "k_pages": "key_cache_ptr",
        "v_pages": "value_cache_ptr",
    }
)
def kernel_paged_attention_2d(
    output_ptr: torch.Tensor,
    query_ptr: torch.Tensor,
    key_cache_ptr: torch.Tensor,
    value_cache_ptr: torch.Tensor,
    sink_ptr: torch.Tensor | None,
    block_tables_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    alibi_slopes_ptr: torch.Tensor | None,
    scale: float,
    k_scale: Scale,
    v_scale: Scale,
    out_scale_inv: Scale = 1.0,
    num_query_heads: int | None = None,
    num_queries_per_kv: int | None = None,
    num_queries_per_kv_padded: int | None = None,
    block_table_stride: int | None = None,
    query_stride_0: int | None = None,
    query_stride_1: int | None = None,
    output_stride_0: int | None = None,
    output_stride_1: int | None = None,
    BLOCK_SIZE: int | None = None,
    PHYSICAL_BLOCK_SIZE: int | None = None,
    HEAD_SIZE: int | None = None,
    HEAD_SIZE_PADDED: int | None = None,
    USE_ALIBI_SLOPES: bool | None = None,
    SLIDING_WINDOW: int = 0,
    x: int | None = None,
    stride_k_cache_0: int | None = None,
    stride_k_cache_1: int | None = None,
    stride_k_cache_2: int | None = None,
    stride_k_cache_3: int | None = None,
    stride_k_cache_4: int | None = None,
    stride_v_cache_0: int | None = None,
    stride_v_cache_1: int | None = None,
    stride_v_cache_2: int | None = None,
    stride_v_cache_3: int | None = None,
    filter_by_query_len: bool = False,
    query_start_len_ptr: torch.Tensor | None = None,
    USE_SINKS: bool | None = None,
    USE_FP8: bool | None = None,
    FP8_MIN: float | None = None,
    FP8_MAX: float | None = None,
) -> None:
    """Writes the output of decode sequences. The arguments are those of vLLM's kernel without its launch grid. Sizes and strides
    are optional, and must be those of the tensors if given. Tile sizes are accepted and not used.

    With `filter_by_query_len`, only sequences with one new token are computed, and `query_start_len_ptr` gives their rows; without,
    row i of the query belongs to sequence i."""
    for name, tensor in (("q", query_ptr), ("out", output_ptr)):
        if tensor.dim() != 3:
            raise ArgumentError(name, describe(tensor), "a tensor [tokens, heads, head_size]")
    if block_tables_ptr.dim() != 2:
        raise ArgumentError("page_table", describe(block_tables_ptr), "a tensor [seqs, blocks]")
    cache = x_packed("auto", key_cache_ptr, value_cache_ptr, k_scale, v_scale)
    fp8 = is_fp8(output_ptr.dtype)
    check_sizes(
        num_query_heads=(num_query_heads, query_ptr.shape[1]),
        num_queries_per_kv=(num_queries_per_kv, query_ptr.shape[1] // cache.kv_heads),
        block_table_stride=(block_table_stride, block_tables_ptr.stride(0)),
        query_stride_0=(query_stride_0, query_ptr.stride(0)),
        query_stride_1=(query_stride_1, query_ptr.stride(1)),
        output_stride_0=(output_stride_0, output_ptr.stride(0)),
        output_stride_1=(output_stride_1, output_ptr.stride(1)),
        PHYSICAL_BLOCK_SIZE=(PHYSICAL_BLOCK_SIZE, cache.page_size),
        HEAD_SIZE=(HEAD_SIZE, cache.head_dim),
        x=(x, key_cache_ptr.shape[4]),
        stride_k_cache_0=(stride_k_cache_0, key_cache_ptr.stride(0)),
        stride_k_cache_1=(stride_k_cache_1, key_cache_ptr.stride(1)),
        stride_k_cache_2=(stride_k_cache_2, key_cache_ptr.stride(2)),
        stride_k_cache_3=(stride_k_cache_3, key_cache_ptr.stride(3)),
        stride_k_cache_4=(stride_k_cache_4, key_cache_ptr.stride(4)),
        stride_v_cache_0=(stride_v_cache_0, value_cache_ptr.stride(0)),
        stride_v_cache_1=(stride_v_cache_1, value_cache_ptr.stride(1)),
        stride_v_cache_2=(stride_v_cache_2, value_cache_ptr.stride(2)),
        stride_v_cache_3=(stride_v_cache_3, value_cache_ptr.stride(3)),
        USE_FP8=(USE_FP8, fp8),
        FP8_MIN=(FP8_MIN, torch.finfo(output_ptr.dtype).min if fp8 else FP8_MIN),
        FP8_MAX=(FP8_MAX, torch.finfo(output_ptr.dtype).max if fp8 else FP8_MAX),
    )
    if filter_by_query_len and query_start_len_ptr is None:
        raise ArgumentError("query_start_len_ptr", None, "a tensor: filter_by_query_len reads the query lengths")
    inverse = number("out_scale", out_scale_inv)
    options = Options(
        window=window_of(SLIDING_WINDOW),
        alibi=alibi_slopes_ptr if USE_ALIBI_SLOPES is not False else None,
        sinks=sink_ptr if USE_SINKS is not False else None,
        scale=scale,
        out_scale=1.0 / inverse if fp8 and inverse is not None else None,
    )
    starts = query_start_len_ptr if filter_by_query_len else None
    batch = decodes(block_tables_ptr, seq_lens_ptr, starts, None)
    attend(query_ptr, cache, batch, options, None, output_ptr, only=DECODE)


@operator(
    {"out": "out", "page_table": "block_tables", "scale": "scale", "out_scale": "fp8_out_scale"},
)
def paged_attention_rocm(
    out: torch.Tensor,
    exp_sum: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    tmp_out: torch.Tensor | None,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    fp8_out_scale: Scale = None,
    mfma_type: str = "f16",
) -> None:
    """Writes the output of decode sequences: row i for sequence i, or with `query_start_loc` the rows of the sequences with one new
    token. The workspaces `exp_sum`, `max_logits` and `tmp_out`, and `mfma_type`, are accepted and not used."""
    if mfma_type not in ("f16", "fp8"):
        raise ArgumentError("mfma_type", repr(mfma_type), "'f16' or 'fp8'")
    cache = x_packed(kv_cache_dtype, key_cache, value_cache, k_scale, v_scale)
    check_sizes(num_kv_heads=(num_kv_heads, cache.kv_heads), block_size=(block_size, cache.page_size))
    options = Options(alibi=alibi_slopes, scale=scale, out_scale=number("out_scale", fp8_out_scale))
    batch = decodes(block_tables, seq_lens, query_start_loc, max_seq_len)
    attend(query, cache, batch, options, None, out, only=DECODE)


def decodes(
    block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor | None, max_seq_len: int | None
) -> Batch:
    """The batch of these sequences; without starts, row i of the query belongs to sequence i."""
    if query_start_loc is None and seq_lens.dim() != 1:
        raise ArgumentError("kv_lens", describe(seq_lens), "a tensor [seqs] of int32 or int64")
    if query_start_loc is None:
        query_start_loc = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    return batch_of(block_table, seq_lens, query_start_loc, 1, max_seq_len)


def check_sizes(**sizes: tuple[Any, Any]) -> None:
    """Raises if a size or stride that is given differs from that of the tensor."""
    for name, (given, actual) in sizes.items():
        if given is not None and given != actual:
            raise ArgumentError(name, given, f"{actual}, the value of the tensor")
