"""The functions of FlashAttention, computed by Quire: what a kernel of the Hub offers to transformers.

transformers passes the arguments that it finds in the signatures. `deterministic` is accepted because results are deterministic
anyway; everything else has its effect or is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.errors import ArgumentError, describe
from quire.integrations.transformers.layer_options import layer_options
from quire.options import Options
from quire.step import step

Sides = tuple[int | None, int | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention of `q` [batch, tokens, q_heads, head_dim] over `k` and `v` [batch, length, kv_heads, head_dim]. Causal queries are
    the last tokens."""
    options = _options(softmax_scale, causal, window_size, softcap, s_aux, dropout_p)
    seqs, tokens = q.shape[:2]
    batch = Batch(
        torch.arange(seqs, device=q.device)[:, None],
        torch.full((seqs,), k.shape[1], device=q.device),
        torch.arange(seqs + 1, device=q.device) * tokens,
        max_q_len=tokens,
        max_kv_len=k.shape[1],
    )
    out = attend(q.reshape(seqs * tokens, *q.shape[2:]), KVCache.wrap(k, v, layout="nhd"), batch, options)
    return out.view(seqs, tokens, *out.shape[1:])


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    deterministic: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed `q` [tokens, q_heads, head_dim]. The keys are packed too, [tokens, kv_heads, head_dim] at `cu_seqlens_k`;
    or, with a `block_table`, pages [pages, page_size, kv_heads, head_dim] of `seqused_k` tokens for each sequence."""
    options = _options(softmax_scale, causal, window_size, softcap, s_aux, dropout_p)
    hints: dict[str, Any] = {"max_q_len": _length("max_seqlen_q", max_seqlen_q)}
    hints["max_kv_len"] = _length("max_seqlen_k", max_seqlen_k)
    if block_table is not None:
        kv_lens = seqused_k if seqused_k is not None else _lengths(cu_seqlens_k)
        return attend(q, KVCache.wrap(k, v, layout="nhd"), Batch(block_table, kv_lens, cu_seqlens_q, **hints), options)
    if cu_seqlens_k is None or seqused_k is not None:
        raise ArgumentError("cu_seqlens_k", describe(cu_seqlens_k), "the starts of the keys, without seqused_k and block_table")
    # A page is a token: packed sequences begin anywhere.
    longest = k.shape[0] if hints["max_kv_len"] is None else hints["max_kv_len"]
    table = cu_seqlens_k[:-1, None] + torch.arange(longest, device=k.device, dtype=cu_seqlens_k.dtype)
    cache = KVCache.wrap(k.unsqueeze(1), v.unsqueeze(1), layout="nhd")
    return attend(q, cache, Batch(table, _lengths(cu_seqlens_k), cu_seqlens_q, **hints), options)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | int | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `q` [batch, tokens, q_heads, head_dim] over a cache: pages [pages, page_size, kv_heads, head_dim] of a
    `block_table`, or rows [batch, length, kv_heads, head_dim]. New `k` and `v` [batch, tokens, kv_heads, head_dim] are written
    after the `cache_seqlens` tokens of each sequence first; without them these are all tokens. A sequence of -1 tokens, as in
    padded batches of transformers, is skipped: its rows are zeros."""
    options = _options(softmax_scale, causal, window_size, softcap, s_aux)
    seqs, tokens = q.shape[:2]
    cache = KVCache.wrap(k_cache, v_cache, layout="nhd")
    if (k is None) != (v is None):
        raise ArgumentError("v" if v is None else "k", None, "a tensor: new keys and values come together")
    if isinstance(cache_seqlens, int) or cache_seqlens is None:
        before = k_cache.shape[1] - (0 if k is None else tokens) if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((seqs,), before, device=q.device, dtype=torch.int32)
    if block_table is None:
        block_table = torch.arange(seqs, device=q.device, dtype=torch.int32)[:, None]
    live = (cache_seqlens >= 0).to(cache_seqlens.dtype)
    kv_lens = (cache_seqlens + (0 if k is None else tokens)) * live
    q_starts = torch.zeros(seqs + 1, dtype=cache_seqlens.dtype, device=q.device)
    torch.cumsum(live * tokens, 0, out=q_starts[1:])
    batch = Batch(block_table, kv_lens, q_starts, max_q_len=tokens, page_size=cache.page_size)
    rows = q.reshape(seqs * tokens, *q.shape[2:])
    if k is None or v is None:
        out = attend(rows, cache, batch, options)
    else:
        out = step(rows, k.reshape(seqs * tokens, *k.shape[2:]), v.reshape(seqs * tokens, *v.shape[2:]), cache, batch, options)
    return out.view(seqs, tokens, *out.shape[1:])


def _options(
    scale: float | None, causal: bool, sides: Sides, softcap: float | None, sinks: torch.Tensor | None, dropout: float = 0.0
) -> Options:
    """The options of a call. A side of a window that is negative is unbounded; a softcap of 0 is none."""
    if dropout:
        raise ArgumentError("dropout_p", dropout, "0: Quire computes inference")
    if len(sides) != 2:
        raise ArgumentError("window_size", describe(sides), "a pair (left, right), -1 for no bound")
    left, right = (None if side is None or side < 0 else int(side) for side in sides)
    window = None if left is None and right is None else (left, right)
    return layer_options(scale, window, softcap or None, sinks, bool(causal))


def _lengths(starts: torch.Tensor | None) -> torch.Tensor:
    if starts is None:
        raise ArgumentError("cu_seqlens_k", None, "the starts of the keys of each sequence")
    return starts[1:] - starts[:-1]


def _length(name: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return int(value)
    raise ArgumentError(name, describe(value), "an int, or None: a tensor on a device would have to be read")
