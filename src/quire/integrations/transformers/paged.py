"""Attention for continuous batching: reads and writes the pages of `PagedAttentionCache` where they are.

transformers' own function writes the new tokens, gathers all keys and values of every request into new tensors, and attends to
those. It has a path without the gather for decode steps on CUDA, but not for models with a sliding window. Here no step gathers:

    full attention, any step     write the new tokens, then attend to the pages
    window, decode step          the same; a request's pages are a ring that holds what the query sees
    window, other steps          attend to the context and the new tokens (context form), then write: the new tokens replace
                                 tokens of the ring that their first ones still see
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.integrations.flash_attention import flash_attention_forward

from quire.attend import attend
from quire.cache.format import format_of
from quire.cache.kv_cache import KVCache
from quire.cache.layout import LAYOUTS
from quire.errors import ArgumentError, describe
from quire.integrations.transformers.layer_options import layer_options, refuse_unsupported
from quire.integrations.transformers.page_tables import PagedStep, step_of
from quire.step import step
from quire.write import write


class PagedLayers:
    """The layers of one `PagedAttentionCache`, and what they share in a forward pass."""

    def __init__(self) -> None:
        self.pages: dict[int, KVCache] = {}
        """By layer: a page is a block of transformers' allocator."""
        self.tokens: dict[int, KVCache] = {}
        """By layer: the same memory, where a page is a token. It is only read."""
        self.batch_of: list[Any] | None = None
        self.steps: dict[int, PagedStep] = {}
        """By allocator: the batch of the forward pass that `batch_of` identifies."""

    def step(self, allocator: Any, arguments: dict[str, Any]) -> PagedStep:
        """The batch of an allocator's layers, made by the first of them."""
        if self.batch_of is not arguments["read_index"]:
            # transformers makes this list once in a forward pass. It is kept, so that no other list can have its identity.
            self.batch_of, self.steps = arguments["read_index"], {}
        if allocator.index not in self.steps:
            self.steps[allocator.index] = step_of(allocator, arguments)
        return self.steps[allocator.index]

    def caches(self, allocator: Any, layer: int) -> tuple[KVCache, KVCache]:
        """The pages of a layer: by block, and by token."""
        if layer not in self.pages:
            size, place = allocator.tokens_per_page, allocator.layer_indices.index(layer)
            # [tokens, 2, kv_heads, head_dim], in which the keys and the values of a page follow each other.
            rows = allocator.cache_tensor.flatten(0, 1)
            blocks = rows.view(-1, len(allocator.layer_indices), 2, size, *rows.shape[1:])
            self.pages[layer] = KVCache.wrap(blocks[:, place, 0], blocks[:, place, 1], layout="nhd")
            k, v = (rows[(2 * place + part) * size :].unsqueeze(1) for part in (0, 1))
            # Not KVCache.wrap: it rejects K and V that share memory, because a write would be ambiguous.
            form = format_of(rows.dtype, None)
            self.tokens[layer] = KVCache(k[: len(v)], v, LAYOUTS["nhd"], form, None, None, None, False)
        return self.pages[layer], self.tokens[layer]


_layers: WeakKeyDictionary[Any, PagedLayers] = WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cache: Any = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of "quire/flash-attn2": `query` [1, q_heads, tokens, head_dim] of all requests of a step, and their
    new keys and values. Returns [1, tokens, q_heads, head_dim], and no weights. Without a paged cache, as in `generate`,
    transformers' function calls the functions of `quire.integrations.transformers.flash`."""
    if not isinstance(cache, PagedAttentionCache):
        others = {"scaling": scaling, "dropout": dropout, "cache": cache, **arguments}
        return flash_attention_forward(module, query, key, value, attention_mask, **others)
    refuse_unsupported(query, key, value, dropout, {"output_attentions": arguments.get("output_attentions")})
    if attention_mask is not None:
        raise ArgumentError("attention_mask", describe(attention_mask), "None: a paged cache has no padding")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    allocator = cache.layer_to_allocator[layer]
    layers = _layers.setdefault(cache, PagedLayers())
    now, (pages, tokens) = layers.step(allocator, arguments), layers.caches(allocator, layer)
    window = getattr(allocator, "sliding_window", arguments.get("sliding_window"))
    causal = arguments.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    more = arguments.get("softcap"), arguments.get("s_aux"), causal
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    if now.context_first:
        out = attend(q, tokens, now.batch, layer_options(scaling, window, *more), new=(k, v))
        write(k, v, pages, slots=now.slots)
    else:
        out = step(q, k, v, pages, now.batch, layer_options(scaling, None if now.is_ring else window, *more))
    return out.unsqueeze(0), None
