"""The attention layers of known models by kind, for `quire explain --like`."""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import ArgumentError
from quire.keywords import suggestion
from quire.plan.models import MODELS, ModelShape, known_name


class AttentionLayers(NamedTuple):
    """Layers of a model whose attention has the same shape."""

    layers: int
    """How many there are."""
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Keys that a query sees, its own included; None for all."""
    chunk: int | None = None
    """Keys of a chunk, if a query sees only keys of its own chunk: each chunk is then a sequence of its own."""
    features: tuple[str, ...] = ()
    """As `quire.Options` names them."""
    v_in_k: int = 0
    """V is the first so many elements of K (multi-head latent attention, absorbed); 0 if it is not."""

    def __str__(self) -> str:
        count = f"{self.layers} layer{'' if self.layers == 1 else 's'}"
        if self.chunk is not None:
            return f"{count} with chunks of {self.chunk}, each of which is a sequence of its own"
        return f"{count} without a window" if self.window is None else f"{count} with a window of {self.window}"


FAMILIES = {
    "deepseek": "deepseek-v3",
    "gemma-2": "gemma-2-27b",
    "gemma-3": "gemma-3-27b",
    "gemma-4": "gemma-4-31b",
    "gpt-oss": "gpt-oss-120b",
    "llama-3": "llama-3-70b",
    "llama-4": "llama-4-maverick",
    "mistral": "mistral-small-24b",
    "mixtral": "mixtral-8x22b",
    "qwen-3": "qwen3-32b",
    "qwen-3-moe": "qwen3-235b-a22b",
}
"""Families, and the member that stands for each."""


def _llama4() -> tuple[AttentionLayers, ...]:
    return AttentionLayers(36, 40, 8, 128, chunk=8192), AttentionLayers(12, 40, 8, 128)


def _latent(layers: int, q_heads: int) -> tuple[AttentionLayers, ...]:
    return (AttentionLayers(layers, q_heads, 1, 576, v_in_k=512),)


_UNEVEN = {
    "deepseek-v2-lite": _latent(27, 16),
    "deepseek-v2": _latent(60, 128),
    "deepseek-v3": _latent(61, 128),
    "deepseek-r1": _latent(61, 128),
    "kimi-k2": _latent(61, 64),
    "gemma-4-26b-a4b": (AttentionLayers(25, 16, 8, 256, window=1024), AttentionLayers(5, 16, 2, 512)),
    "gemma-4-31b": (AttentionLayers(50, 32, 16, 256, window=1024), AttentionLayers(10, 32, 4, 512)),
    "llama-4-scout": _llama4(),
    "llama-4-maverick": _llama4(),
}
"""Models whose layers differ by more than a window, or cache latents: `quire plan` has no cost for them."""
NAMES = (*FAMILIES, *_UNEVEN, *MODELS)


def layers_like(name: str) -> tuple[str, tuple[AttentionLayers, ...]]:
    """The name of the model that a name means, and its attention layers by kind.

    Raises:
        ArgumentError: No model has this name; the message suggests one.
    """
    known = known_name(name, NAMES)
    if known is None:
        raise ArgumentError("--like", repr(name), f"one of {', '.join(NAMES)}{suggestion(name.rpartition('/')[2], NAMES)}")
    found = FAMILIES.get(known, known)
    return found, _UNEVEN[found] if found in _UNEVEN else _even(MODELS[found])


def _even(model: ModelShape) -> tuple[AttentionLayers, ...]:
    """The layers of a model of the table, which differ by their window alone."""
    shape = (model.q_heads, model.kv_heads, model.head_dim)
    return tuple(AttentionLayers(kind.layers, *shape, window=kind.window, features=model.features) for kind in model.kinds)
