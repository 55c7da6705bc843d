"""`attn_implementation="quire"`: attention over the caches of `generate`, whose keys are `[batch, kv_heads, length, head_dim]`."""

from __future__ import annotations

from typing import Any

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.format import format_of
from quire.cache.kv_cache import KVCache
from quire.cache.layout import LAYOUTS
from quire.errors import ArgumentError, describe
from quire.integrations.transformers.layer_options import layer_options, refuse_unsupported
from quire.integrations.transformers.visible_keys import DenseVisibility, visible_keys_of

SMALLEST_PAGE = 256
"""The smallest page that `repacked` makes."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of "quire": `query` [batch, q_heads, tokens, head_dim] attends to all of `key` and `value` that the
    mask says are visible. Returns [batch, tokens, q_heads, head_dim], and no weights."""
    refuse_unsupported(query, key, value, dropout, others)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    visible = visible_keys_of(attention_mask, query, key, causal)
    options = layer_options(scaling, visible.window, softcap, s_aux, visible.causal)
    return attend_visible(query, key, value, visible, options), None


def attend_visible(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: DenseVisibility, options: Any) -> torch.Tensor:
    """Attention of `q` [batch, q_heads, tokens, head_dim] over dense keys; returns [batch, tokens, q_heads, head_dim]."""
    if k.device.type != "cpu" and not is_stable(k, visible):
        k, v = repacked(k), repacked(v)
    cache, batch = paged(k, v, visible)
    seqs, heads, tokens, _ = q.shape
    rows = q.transpose(1, 2).reshape(seqs * tokens, heads, q.shape[3])
    return attend(rows, cache, batch, options).view(seqs, tokens, heads, v.shape[3])


def paged(k: torch.Tensor, v: torch.Tensor, visible: DenseVisibility) -> tuple[KVCache, Batch]:
    """Dense keys and values as pages, and the batch over them. Nothing is copied, unless K and V have different orders of axes.

    Without padding a sequence is one page. With padding it must begin at any token, so a page is one token: the view has a page for
    every distance from the first token, and heads of one page are tokens of another. Nothing is written through it."""
    if k.dtype is not v.dtype:
        raise ArgumentError("value", describe(v), f"the type of key, {k.dtype}")
    batch = visible.batch() if visible.starts is None else None
    if batch is None:
        if _token_distance(k) is None or _token_distance(k) != _token_distance(v):
            k, v = k.contiguous(), v.contiguous()
        distance = _token_distance(k)
        assert distance is not None
        k, v, batch = _token_pages(k), _token_pages(v), visible.token_batch(distance)
    # Not KVCache.wrap: it rejects memory in which elements overlap, because a write would be ambiguous.
    return KVCache(k, v, LAYOUTS["hnd"], format_of(k.dtype, None), None, None, None, False), batch


def _token_distance(keys: torch.Tensor) -> int | None:
    """The distance between two sequences in tokens; None if it is no whole number."""
    batch, _, token, _ = keys.stride()
    return batch // token if token and batch % token == 0 else None


def _token_pages(keys: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, dim] as [pages, heads, 1, dim], where page `i` begins `i` tokens after the first."""
    (seqs, heads, length, dim), (batch, head, token, last) = keys.shape, keys.stride()
    pages = (seqs - 1) * (batch // token) + length
    return keys.as_strided((pages, heads, 1, dim), (token, head, token, last))


def is_stable(keys: torch.Tensor, visible: DenseVisibility) -> bool:
    """Whether keys of the next forward pass have the same shape. GPU kernels are compiled for strides and the size of a page, and a
    `DynamicCache` has others for every token."""
    length = keys.shape[2]
    full = visible.window if isinstance(visible.window, int) else None
    return visible.is_static or length == full or (length >= SMALLEST_PAGE and length & (length - 1) == 0)


def repacked(keys: torch.Tensor) -> torch.Tensor:
    """A copy whose length is a power of two, so that a growing cache needs few kernels. What follows the keys is not read."""
    seqs, heads, length, dim = keys.shape
    size = max(SMALLEST_PAGE, 1 << (length - 1).bit_length())
    copy = torch.empty((seqs, heads, size, dim), dtype=keys.dtype, device=keys.device)
    copy[:, :, :length].copy_(keys)
    return copy
