"""The options of an attention layer, from the arguments with which transformers calls an attention function."""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ArgumentError, describe
from quire.options import Options, Window

REFUSED = ("position_bias", "attention_bias", "alibi", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")
"""Arguments that change a result and that this function has no use for."""
_known: dict[tuple[Any, ...], tuple[torch.Tensor | None, torch.Tensor | None, Options]] = {}
_MOST = 4096


def layer_options(
    scale: float | None,
    window: Window,
    softcap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
    alibi: torch.Tensor | None = None,
) -> Options:
    """The options of a layer; equal arguments give the same object, so that a layer is described once."""
    key = (scale, window, softcap, id(sinks), causal, id(alibi))
    found = _known.get(key)
    if found is None or found[0] is not sinks or found[1] is not alibi:
        options = Options(
            scale=None if scale is None else float(scale),
            window=window,
            softcap=None if softcap is None else float(softcap),
            # A parameter shares its memory with what detach returns: changed weights are seen.
            sinks=None if sinks is None else sinks.detach(),
            alibi=alibi,
            causal=causal,
        )
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[key] = sinks, alibi, options
    return found[2]


def refuse_unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, others: dict[str, Any]) -> None:
    """Raises for everything that would change the result and that Quire does not compute.

    Raises:
        ArgumentError: Dropout, attention weights, a bias, packed sequences, or gradients are asked for.
    """
    if dropout:
        raise ArgumentError("dropout", dropout, "0: Quire computes inference; call model.eval()")
    if others.get("output_attentions"):
        allowed = "False: Quire does not store attention weights; use attn_implementation='eager' for them"
        raise ArgumentError("output_attentions", True, allowed)
    for name in REFUSED:
        if others.get(name) is not None:
            raise ArgumentError(name, describe(others[name]), "None: attn_implementation='quire' does not support it")
    if q.requires_grad or k.requires_grad or v.requires_grad:
        raise ArgumentError("query", "a tensor that requires gradients", "inference: call the model inside torch.no_grad()")
