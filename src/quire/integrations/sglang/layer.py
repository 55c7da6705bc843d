"""A layer of SGLang in Quire's terms: its cache and its options."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from quire.cache.kv_cache import KVCache
from quire.options import Options

LAYOUTS = {"nhd": "nhd", "hnd": "hnd", "vectorized_5d": "aiter"}
"""SGLang's names of layouts, and Quire's."""


Tree = tuple[torch.Tensor, torch.Tensor] | None
"""Mask and positions of a verification's draft tokens."""


class LayerCaches:
    """The caches of all layers: each a view of the engine's memory, made once."""

    def __init__(self, pool: Any, page_size: int):
        self.pool, self.page_size = pool, page_size
        self._made: dict[int, tuple[tuple[Any, ...], KVCache]] = {}

    def of(self, layer: RadixAttention) -> KVCache:
        """The cache of a layer, made again if the engine has given it other memory or other scales."""
        # The getters wait for a transfer of the layer, if there is one.
        k, v = self.pool.get_kv_buffer(layer.layer_id)
        known = (k.data_ptr(), v.data_ptr(), k.shape, layer.k_scale, layer.v_scale)
        made = self._made.get(layer.layer_id)
        if made is None or made[0][:3] != known[:3] or made[0][3] is not known[3] or made[0][4] is not known[4]:
            made = self._made[layer.layer_id] = known, self._wrap(k, v, layer)
        return made[1]

    def _wrap(self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention) -> KVCache:
        layout = LAYOUTS[_layout_of(self.pool, layer.layer_id)]
        if layout == "nhd":
            k, v = (t[: t.shape[0] // self.page_size * self.page_size].unflatten(0, (-1, self.page_size)) for t in (k, v))
        scales: dict[str, Any] = {}
        if k.element_size() == 1:
            scales = {"k_scale": _scale(layer.k_scale), "v_scale": _scale(layer.v_scale)}
        return KVCache.wrap(k, v, layout=layout, **scales)


def _layout_of(pool: Any, layer_id: int) -> str:
    if hasattr(pool, "layers_mapping"):  # full attention and sliding windows in separate pools
        pool = pool.swa_kv_pool if pool.layers_mapping[layer_id][1] else pool.full_kv_pool
    return getattr(pool, "full_kv_pool", pool).kv_cache_layout


def _scale(scale: torch.Tensor | float | None) -> torch.Tensor | float:
    """A layer's scale as Quire takes it: an fp32 number or tensor []. Without one SGLang stores the numbers as they are."""
    if isinstance(scale, torch.Tensor):
        return scale.detach().reshape(()).float()
    return 1.0 if scale is None else float(scale)


class LayerOptions:
    """The options of all layers, each made once; those of a speculative verification in every pass, since its mask is new."""

    def __init__(self, batch_invariant: bool):
        self.batch_invariant = batch_invariant
        self._made: dict[tuple[int, bool], tuple[torch.Tensor | None, Options]] = {}

    def of(self, layer: RadixAttention, decode: bool, sinks: torch.Tensor | None, tree: Tree) -> Options:
        """The options of a layer in a forward pass.

        Args:
            layer: The layer.
            decode: Whether every sequence has one new token.
            sinks: The sinks of the layer `[q_heads]`.
            tree: Mask and positions of the draft tokens of a verification.
        """
        if tree is not None:
            return self._make(layer, decode, sinks, tree)
        made = self._made.get((layer.layer_id, decode))
        if made is None or made[0] is not sinks:
            made = self._made[layer.layer_id, decode] = sinks, self._make(layer, decode, sinks, None)
        return made[1]

    def _make(self, layer: RadixAttention, decode: bool, sinks: torch.Tensor | None, tree: Tree) -> Options:
        # A token that decodes is the last of its sequence: attention to both sides is causal there.
        causal = not layer.is_cross_attention and (decode or layer.attn_type == AttentionType.DECODER)
        # SGLang's window counts the keys besides the query's own.
        reach = None if layer.is_cross_attention or layer.sliding_window_size is None else layer.sliding_window_size
        window = None if reach is None or reach < 0 else (reach, reach)
        mask, positions = (None, None) if tree is None else tree
        return Options(
            window=window,
            softcap=layer.logit_cap or None,
            sinks=sinks,
            scale=layer.scaling,
            causal=causal,
            mask=mask,
            positions=None if window is None else positions,
            batch_invariant=self.batch_invariant,
        )
