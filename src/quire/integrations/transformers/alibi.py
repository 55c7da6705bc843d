"""Models that compute attention in their own code, not through transformers' `AttentionInterface`: Bloom and MPT, with ALiBi."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from quire.errors import ArgumentError, describe
from quire.integrations.engines import EngineError
from quire.integrations.transformers.dense import attend_visible
from quire.integrations.transformers.layer_options import layer_options, refuse_unsupported
from quire.integrations.transformers.visible_keys import changed_configs, visible_keys_of


class QuireBloomAttention(BloomAttention):
    """Bloom's attention layer, with attention computed by Quire."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """As in `BloomAttention`; `alibi` is not used: Quire computes the bias from the slopes. Returns no weights."""
        batch, tokens, width = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(batch, tokens, self.num_heads, 3, self.head_dim)
        q, k, v = (part.transpose(1, 2) for part in fused.unbind(3))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        refuse_unsupported(q, k, v, dropout, {**others, "output_attentions": output_attentions})
        visible = visible_keys_of(attention_mask, q, k, causal=True)
        options = layer_options(self.inv_norm_factor, visible.window, None, None, visible.causal, _slopes(self, q, _bloom_slopes))
        rows = attend_visible(q, k, v, visible, options).reshape(batch, tokens, width)
        return residual + self.dense(rows), None


class QuireMptAttention(MptAttention):
    """MPT's attention layer, with attention computed by Quire."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """As in `MptAttention`; `position_bias` is not used: Quire computes the bias from the slopes. Returns no weights."""
        batch, tokens, width = hidden_states.shape
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (part.view(batch, tokens, self.n_heads, self.head_dim).transpose(1, 2) for part in fused.chunk(3, dim=2))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        refuse_unsupported(q, k, v, self.attn_dropout_p if self.training else 0.0, others)
        visible = visible_keys_of(attention_mask, q, k, causal=True)
        options = layer_options(self.softmax_scale, visible.window, None, None, visible.causal, _slopes(self, q, _mpt_slopes))
        return self.out_proj(attend_visible(q, k, v, visible, options).reshape(batch, tokens, width)), None


LAYERS: dict[type, type] = {BloomAttention: QuireBloomAttention, MptAttention: QuireMptAttention}
"""Attention layers that `use_quire` changes, and what they become."""


def use_quire(model: PreTrainedModel) -> PreTrainedModel:
    """Lets Quire compute the attention of a model that does not use transformers' `AttentionInterface`: Bloom or MPT. Load the
    model with `attn_implementation="quire"` first. Models that use the interface need only that.

    Args:
        model: A Bloom or MPT model. Its attention layers change their class, in place; their weights stay.

    Returns:
        The model.

    Raises:
        EngineError: No layer of the model is one that Quire knows, or a layer has settings that it does not compute.
        ArgumentError: A layer is of a subclass of such a layer.
    """
    layers = [module for module in model.modules() if isinstance(module, tuple(LAYERS))]
    if not layers:
        what = f"{type(model).__name__} has no attention layer of Bloom or MPT"
        raise EngineError(f"{what}; for models that use transformers' AttentionInterface attn_implementation='quire' is enough")
    for layer in layers:
        if isinstance(layer, BloomAttention) and layer.pretraining_tp > 1 and layer.slow_but_exact:
            raise EngineError("Bloom with pretraining_tp above 1 and slow_but_exact is not supported: set slow_but_exact to False")
        if type(layer) not in (*LAYERS, *LAYERS.values()):
            raise ArgumentError("model", describe(layer), "the attention layers of Bloom or MPT themselves, not a subclass")
    for layer in layers:
        layer.__class__ = LAYERS.get(type(layer), type(layer))
    changed_configs[id(model.config)] = weakref.ref(model.config)
    return model


def _slopes(layer: torch.nn.Module, q: torch.Tensor, compute: Callable[[int, torch.device], torch.Tensor]) -> torch.Tensor:
    """The ALiBi slopes [heads] of a layer, computed once for a device."""
    known: torch.Tensor | None = layer.__dict__.get("quire_slopes")
    if known is None or known.device != q.device:
        known = layer.__dict__["quire_slopes"] = compute(q.shape[1], q.device).contiguous()
    return known


def _bloom_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """What Bloom adds to the logit of the second key."""
    return build_alibi_tensor(torch.ones(1, 2, dtype=torch.long, device=device), heads, torch.float32)[:, 0, 1]


def _mpt_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """What MPT subtracts from the logit of the key before the last."""
    return -build_mpt_alibi_tensor(heads, 2, device=device)[:, 0, 0]
