"""Models that compute attention in their own code, not through transformers' `AttentionInterface`: Bloom, with ALiBi."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

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
        options = layer_options(self.inv_norm_factor, visible.window, None, None, visible.causal, _slopes(self, q))
        rows = attend_visible(q, k, v, visible, options).reshape(batch, tokens, width)
        return residual + self.dense(rows), None


def use_quire(model: PreTrainedModel) -> PreTrainedModel:
    """Lets Quire compute the attention of a model that does not use transformers' `AttentionInterface`: Bloom. Load the model with
    `attn_implementation="quire"` first. Models that use the interface need only that.

    Args:
        model: A Bloom model. Its attention layers change their class, in place; their weights stay.

    Returns:
        The model.

    Raises:
        EngineError: No layer of the model is one that Quire knows, or a layer has settings that it does not compute.
    """
    layers = [module for module in model.modules() if isinstance(module, BloomAttention)]
    if not layers:
        what = f"{type(model).__name__} has no attention layer of Bloom"
        raise EngineError(f"{what}; for models that use transformers' AttentionInterface attn_implementation='quire' is enough")
    for layer in layers:
        if layer.pretraining_tp > 1 and layer.slow_but_exact:
            raise EngineError("Bloom with pretraining_tp above 1 and slow_but_exact is not supported: set slow_but_exact to False")
        if type(layer) not in (BloomAttention, QuireBloomAttention):
            raise ArgumentError("model", describe(layer), "Bloom's own attention layers, not a subclass")
        layer.__class__ = QuireBloomAttention
    changed_configs[id(model.config)] = weakref.ref(model.config)
    return model


def _slopes(layer: QuireBloomAttention, q: torch.Tensor) -> torch.Tensor:
    """The ALiBi slopes [heads] of a layer: what Bloom adds to the logit of the second key."""
    known: torch.Tensor | None = layer.__dict__.get("quire_slopes")
    if known is None or known.device != q.device:
        two = torch.ones(1, 2, dtype=torch.long, device=q.device)
        known = build_alibi_tensor(two, layer.num_heads, torch.float32)[:, 0, 1].contiguous()
        layer.__dict__["quire_slopes"] = known
    return known
