"""Faults of visibility: windows and causality."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import TILES, with_sink, with_visibility
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import BatchSequence, Stages, Work


def _window(change: Any, ahead: int = 0) -> Stages:
    return with_visibility(lambda w, sequence, distances: oracle.visible_at(w, sequence, distances, change(*w.call.window), ahead))


def _left(by: int) -> Stages:
    return _window(lambda left, right: (None if left is None else max(left + by, -1), right))


def _right(by: int) -> Stages:
    return _window(lambda left, right: (left, None if right is None else right + by))


def _has_left(call: KernelCall) -> bool:
    return call.window[0] is not None


def _looks_right(call: KernelCall) -> bool:
    """Whether the window limits some query on the right."""
    causal = bool(call.causal.all()) if isinstance(call.causal, torch.Tensor) else call.causal
    return call.window[1] is not None and not causal


def _left_by_tile(tile: int) -> Stages:
    """The left edge of the window is rounded down to a tile: keys of the same tile left of the window are not masked."""

    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        left, right = w.call.window
        assert left is not None
        visible = oracle.visible_at(w, sequence, distances, (None, right))
        keys = torch.arange(distances.shape[1])
        q_pos = distances[:, :1] if distances.shape[1] else distances.new_zeros(distances.shape[0], 1)
        first = (q_pos - left).clamp(min=0) // tile * tile
        return visible & (keys[None, :] >= first)

    return with_visibility(change)


def _causal_by_tile(tile: int) -> Stages:
    """Later keys of the query's own tile are not masked."""

    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        visible = oracle.visible_at(w, sequence, distances, w.call.window)
        keys = torch.arange(distances.shape[1])
        q_pos = distances[:, :1] if distances.shape[1] else distances.new_zeros(distances.shape[0], 1)
        return visible | ((keys // tile)[None, :] == q_pos // tile) & (distances < 0)

    return with_visibility(change)


def _is_causal(call: KernelCall) -> bool:
    return call.causal is True and call.mask is call.spans is None


def _has_causal(call: KernelCall) -> bool:
    return call.mask is call.spans is None and (bool(call.causal.any()) if isinstance(call.causal, torch.Tensor) else call.causal)


def _ahead(by: int) -> Stages:
    return with_visibility(
        lambda w, sequence, distances: oracle.visible_at(
            w, sequence, distances, w.call.window, by if oracle.is_causal(w, sequence) else 0
        )
    )


def _top_left() -> Stages:
    """Query i sees keys up to position i, regardless of the context."""

    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        return oracle.visible_at(w, sequence, distances - sequence.context, w.call.window)

    return with_visibility(change)


def _all_causal(value: bool) -> Stages:
    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        left, right = w.call.window
        visible = torch.ones(distances.shape, dtype=torch.bool)
        if left is not None:
            visible &= distances <= left
        if right is not None:
            visible &= distances >= -right
        return visible & (distances >= 0) if value else visible

    return with_visibility(change)


def _cut_sink(w: Work, sinks: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A query whose window does not include the first key gets no sink."""
    if not logits.shape[-1]:
        return sinks
    return sinks.expand(*logits.shape[:2], 1).masked_fill(logits[..., :1] == -torch.inf, -torch.inf)


MASK = (
    Fault(
        "window-left-off",
        "window",
        "the window has one or two keys too many or too few on the left",
        "the window size includes the query's own key in one convention and not in the other",
        lambda by: _left(by),
        _has_left,
        ({"by": -1}, {"by": 1}, {"by": -2}, {"by": 2}),
        issues=("vLLM ROCM_ATTN passes W-1", "transformers #41184", "vLLM #3385"),
    ),
    Fault(
        "window-right-off",
        "window",
        "the window has one or two keys too many or too few on the right",
        "two-sided windows are rare, and their right edge is rarely tested",
        lambda by: _right(by),
        _looks_right,
        ({"by": -1}, {"by": 1}, {"by": -2}, {"by": 2}),
    ),
    Fault(
        "window-ignored",
        "window",
        "all keys to the left are visible",
        "the option is not passed, or -1 has another meaning in the called function",
        lambda: _window(lambda left, right: (None, right)),
        _has_left,
        issues=("pytorch #173469", "AITER #3158", "mistral.rs #2094", "vLLM 0.24.0 _fwd_kernel_alibi"),
    ),
    Fault(
        "window-right-ignored",
        "window",
        "all keys to the right are visible",
        "the kernel supports only the left side of a window",
        lambda: _window(lambda left, right: (left, None)),
        _looks_right,
    ),
    Fault(
        "window-one-sided",
        "window",
        "no key to the right is visible",
        "a two-sided window is treated as a causal one",
        lambda: with_visibility(lambda w, sequence, distances: oracle.visible_at(w, sequence, distances, (w.call.window[0], 0))),
        _looks_right,
    ),
    Fault(
        "window-left-by-tile",
        "window",
        "keys left of the window are visible if they are in the same tile as its left edge",
        "tiles outside the window are skipped, but the first remaining tile is not masked",
        lambda tile: _left_by_tile(tile),
        _has_left,
        tuple({"tile": n} for n in TILES),
        issues=("mistral.rs #2094",),
    ),
    Fault(
        "window-cuts-sink",
        "window",
        "queries whose window does not include the first key lose the sink",
        "the sink is added with the first tile, which the window skips",
        lambda: with_sink(_cut_sink),
        lambda call: call.sinks is not None and _has_left(call),
    ),
    Fault(
        "causal-off-by-one",
        "causality",
        "each query sees the next key, or does not see its own",
        "< instead of <=, or the reverse",
        lambda by: _ahead(by),
        _has_causal,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "causal-top-left",
        "causality",
        "queries after a context see only its first keys",
        "the causal mask is aligned to the first key instead of the last",
        _top_left,
        _has_causal,
        issues=("FlashAttention 2.1 changed the alignment",),
    ),
    Fault(
        "causal-ignored",
        "causality",
        "queries of a prefill see later keys",
        "the flag is not passed",
        lambda: _all_causal(False),
        _has_causal,
    ),
    Fault(
        "causal-always",
        "causality",
        "queries of non-causal sequences see no later keys",
        "the kernel supports only causal attention and does not report it",
        lambda: _all_causal(True),
        lambda call: call.causal is not True and call.mask is None,
        issues=("AITER unified_attention is causal only",),
    ),
    Fault(
        "causal-by-tile",
        "causality",
        "queries see later keys of their own tile",
        "the diagonal tile is not masked",
        lambda tile: _causal_by_tile(tile),
        _is_causal,
        tuple({"tile": n} for n in TILES),
    ),
)
