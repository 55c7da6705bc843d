"""Attention for continuous batching: reads and writes the pages of `PagedAttentionCache` where they are.

transformers' own function writes the new tokens, gathers all keys and values of every request into new tensors, and attends to
those. It has a path without the gather for decode steps on CUDA, but not for models with a sliding window. Here no step gathers:

    full attention, any step     write the new tokens, then attend to the pages
    window, decode step          the same; a request's pages are a ring that holds what the query sees
    window, other steps          attend to the context and the new tokens (context form), then write: the new tokens replace
                                 tokens of the ring that their first ones still see
"""

from __future__ import annotations

import inspect
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
from quire.integrations.engines import EngineError
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
_BATCHING = PagedAttentionCache.__module__.rpartition(".")[0]
"""The package of `generate_batch`."""
INSTEAD = "use generate, with attn_implementation='quire'"


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
    transformers' function calls the functions of `quire.integrations.transformers.flash`.

    Raises:
        EngineError: `generate_batch` runs, and the cache does not arrive here, or is made for keys of other sizes.
        ArgumentError: An argument asks for something that Quire does not compute.
    """
    if not isinstance(cache, PagedAttentionCache):
        if is_in_generate_batch():
            raise EngineError(
                f"{_layer_name(module)} cannot be computed in generate_batch: the model's layers do not pass their keyword "
                f"arguments on to attention, so the paged cache does not arrive; {INSTEAD}"
            )
        others = {"scaling": scaling, "dropout": dropout, "cache": cache, **arguments}
        return flash_attention_forward(module, query, key, value, attention_mask, **others)
    refuse_unsupported(query, key, value, dropout, {"output_attentions": arguments.get("output_attentions")})
    if attention_mask is not None:
        raise ArgumentError("attention_mask", describe(attention_mask), "None: a paged cache has no padding")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    allocator = cache.layer_to_allocator[layer]
    _require_sizes(module, key, value, allocator)
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


def is_in_generate_batch() -> bool:
    """Whether this call comes from a forward pass of `generate_batch`.

    The callers are the only sign of it that every model leaves. Some models drop the arguments of a step between their layers and
    attention; what remains, one row of tokens of all requests, is what a `generate` of one sequence passes too."""
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_BATCHING):
            return True
        frame = frame.f_back
    return False


def _require_sizes(module: torch.nn.Module, k: torch.Tensor, v: torch.Tensor, allocator: Any) -> None:
    """Raises unless new keys and values [1, kv_heads, tokens, head_dim] have the sizes for which transformers made its cache."""
    made_for = tuple(allocator.cache_tensor.shape[-2:])
    for name, rows in (("keys", k), ("values", v)):
        heads, dim = rows.shape[1], rows.shape[3]
        if (heads, dim) != made_for:
            raise EngineError(
                f"{_layer_name(module)} is not supported in generate_batch: its {name} have {heads} heads of {dim}, and "
                f"transformers' paged cache is made for {made_for[0]} of {made_for[1]}; {INSTEAD}"
            )


def _layer_name(module: torch.nn.Module) -> str:
    """A layer with its class and its model, for messages."""
    kind = getattr(getattr(module, "config", None), "model_type", "an unknown model")
    return f"layer {getattr(module, 'layer_idx', '?')} of {kind} ({type(module).__name__})"
