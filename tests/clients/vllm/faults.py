"""Faults for tests that have to fail: of the plugin, to see that comparisons notice them, and of an engine, to see that checked
mode names them. Each takes the engine of this process."""

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


def with_scales(engine: Any) -> None:
    """No fault: the layers have scales, as if they came with a checkpoint."""
    for layer in layers_of(engine):
        layer._k_scale.fill_(0.04)
        layer._v_scale.fill_(0.02)


def dropped_scales(engine: Any) -> None:
    """The engine writes the keys of one layer without its scales, and reads them with the scales."""
    with_scales(engine)
    layer = layers_of(engine)[1]
    update, scale, one = layer.impl.do_kv_cache_update, layer._k_scale, layer._k_scale.new_ones(())

    def write_without_scale(*arguments: Any) -> None:
        layer._k_scale = one
        update(*arguments)
        layer._k_scale = scale

    layer.impl.do_kv_cache_update = write_without_scale


def cache_never_written(engine: Any) -> None:
    """The engine forgets to write the cache of one layer."""
    layers_of(engine)[1].impl.do_kv_cache_update = lambda *arguments: None


FAULTS: dict[str, Callable[[Any], None]] = {
    "narrow window": narrow_window,
    "wrong scale": wrong_scale,
    "no sinks": no_sinks,
    "none, with scales": with_scales,
    "dropped scales": dropped_scales,
    "cache never written": cache_never_written,
}
