"""Faults for tests that have to fail: of the plugin, to see that comparisons notice them, and of an engine, to see that checked mode
names them. Each takes the engine of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def layers_of(engine: Any) -> list[Any]:
    """The attention layers of the engine's model."""
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "get_attn_backend")]


def narrow_window(engine: Any) -> None:
    """Every window is one key too narrow."""
    for layer in layers_of(engine):
        if layer.impl.sliding_window is not None:
            layer.impl.sliding_window -= 1


def wrong_scale(engine: Any) -> None:
    """The logits of one layer are one thousandth too large."""
    layers_of(engine)[1].impl.scale *= 1.001


def no_sinks(engine: Any) -> None:
    """The sinks are dropped."""
    for layer in layers_of(engine):
        layer.impl.sinks = None


FAULTS: dict[str, Callable[[Any], None]] = {
    "narrow window": narrow_window,
    "wrong scale": wrong_scale,
    "no sinks": no_sinks,
}
