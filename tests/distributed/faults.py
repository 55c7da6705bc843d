"""Faults of parallel code: each is planted, and the layers that it concerns are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from distributed.cases import LAYERS
from distributed.layer import slopes
from quire.distributed import ContextParallel, TensorParallel, exchange
from quire.distributed.context_call import LayerPlan

TIMEOUT = 60.0


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def local_slopes() -> float:
    """Slopes as a model with this rank's number of heads would have them."""
    tp = TensorParallel(q_heads=8, kv_heads=2, timeout=TIMEOUT)
    right = tp.options
    tp.options = lambda options: replace(right(options), alibi=slopes(tp.q_heads))
    return LAYERS["alibi"].on_ranks(tp, None)


def first_sinks() -> float:
    """The first sinks on every rank."""
    tp = TensorParallel(q_heads=8, kv_heads=2, timeout=TIMEOUT)
    tp.options = lambda options: replace(options, sinks=options.sinks[: tp.q_heads])
    return LAYERS["sinks"].on_ranks(tp, None)


def first_scales() -> float:
    """The scales of the first KV heads on every rank."""
    tp = TensorParallel(q_heads=8, kv_heads=2, timeout=TIMEOUT)
    right = tp.scale
    tp.scale = lambda scale: scale[: tp.kv_heads] if scale.dim() == 1 else right(scale)
    return LAYERS["fp8-head"].on_ranks(tp, None)


def sinks_on_all_ranks() -> float:
    cp = ContextParallel(interleave=4, timeout=TIMEOUT)
    right = cp._plan
    cp._plan = lambda options: LayerPlan(replace(options, out_scale=None), right(options).facts)
    return LAYERS["sinks"].on_ranks(None, cp)


def no_sinks() -> float:
    cp = ContextParallel(interleave=4, timeout=TIMEOUT)
    right = cp._plan
    cp._plan = lambda options: LayerPlan(replace(options, sinks=None), right(options).facts)
    return LAYERS["sinks"].on_ranks(None, cp)


def lse_ignored() -> float:
    """Every rank with the same weight."""

    def mean(outs: Any, lses: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack(list(outs)).mean(0), torch.logsumexp(torch.stack(list(lses)), 0)

    with replaced(exchange, "merge", mean):
        return LAYERS["plain"].on_ranks(None, ContextParallel(interleave=4, timeout=TIMEOUT))


def one_rank_missing() -> float:
    """The keys of the last rank are left out."""
    right = exchange.merge
    with replaced(exchange, "merge", lambda outs, lses: right(outs[:-1], lses[:-1])):
        return LAYERS["plain"].on_ranks(None, ContextParallel(interleave=4, timeout=TIMEOUT))


def scaled_twice() -> float:
    """`out_scale` in the partial results, too."""
    cp = ContextParallel(interleave=4, timeout=TIMEOUT)
    right = exchange.merge
    with replaced(exchange, "merge", lambda outs, lses: right([out / 0.01 for out in outs], lses)):
        return LAYERS["fp8-queries"].on_ranks(None, cp)


FAULTS: dict[str, Callable[[], float]] = {
    fault.__name__: fault
    for fault in (
        local_slopes, first_sinks, first_scales, sinks_on_all_ranks, no_sinks, lse_ignored, one_rank_missing, scaled_twice,
    )
}  # fmt: skip
