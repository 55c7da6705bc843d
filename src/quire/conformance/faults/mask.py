"""Faults of the mask: windows and causality."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import TILES, with_sink, with_visibility
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import BatchSequence, Stages, Work


def _window(change: Any, now: int = 0) -> Stages:
    return with_visibility(lambda w, sequence, far: x.within(w, sequence, far, change(*w.call.window), now))


def _left(by: int) -> Stages:
    return _window(lambda left, right: (None if left is None else max(left + by, -1), right))


def _right(by: int) -> Stages:
    return _window(lambda left, right: (left, None if right is None else right + by))


def _has_left(call: KernelCall) -> bool:
    return call.window[0] is not None


def _looks_right(call: KernelCall) -> bool:
    """Whether some row's right edge is the window's."""
    causal = bool(call.causal.all()) if isinstance(call.causal, torch.Tensor) else call.causal
    return call.window[1] is not None and not causal


def _left_by_tile(tile: int) -> Stages:
    """The window's left edge is that of a tile: keys of the same tile left of it are not masked."""

    def change(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        left, right = w.call.window
        assert left is not None
        visible = x.within(w, sequence, far, (None, right))
        keys = torch.arange(far.shape[1])
        q_at = far[:, :1] if far.shape[1] else far.new_zeros(far.shape[0], 1)
        first = (q_at - left).clamp(min=0) // tile * tile
        return visible & (keys[None, :] >= first)

    return with_visibility(change)


def _causal_by_tile(tile: int) -> Stages:
    """Keys of the query's own tile are not masked."""

    def change(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        visible = x.within(w, sequence, far, w.call.window)
        keys = torch.arange(far.shape[1])
        q_at = far[:, :1] if far.shape[1] else far.new_zeros(far.shape[0], 1)
        return visible | ((keys // tile)[None, :] == q_at // tile) & (far < 0)

    return with_visibility(change)


def _is_causal(call: KernelCall) -> bool:
    return call.causal is True and call.mask is None


def _has_causal(call: KernelCall) -> bool:
    return call.mask is None and (bool(call.causal.any()) if isinstance(call.causal, torch.Tensor) else call.causal)


def _now(by: int) -> Stages:
    return with_visibility(
        lambda w, sequence, far: x.within(w, sequence, far, w.call.window, by if x.is_causal(w, sequence) else 0)
    )


def _top_left() -> Stages:
    """Query i sees keys up to i, whatever context there is."""

    def change(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        return x.within(w, sequence, far - sequence.context, w.call.window)

    return with_visibility(change)


def _all_causal(value: bool) -> Stages:
    def change(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        left, right = w.call.window
        visible = torch.ones(far.shape, dtype=torch.bool)
        if left is not None:
            visible &= far <= left
        if right is not None:
            visible &= far >= -right
        return visible & (far >= 0) if value else visible

    return with_visibility(change)


def _cut_sink(w: Work, sinks: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A query whose window does not reach the first key gets no sink."""
    if not logits.shape[-1]:
        return sinks
    return sinks.expand(*logits.shape[:2], 1).masked_fill(logits[..., :1] == -torch.inf, -torch.inf)


MASK = (
    Fault(
        "window-left-off",
        "window",
        "one key too many or too few at the left edge",
        "W counts the query's own key in one convention and not in the other",
        lambda by: _left(by),
        _has_left,
        ({"by": -1}, {"by": 1}, {"by": -2}, {"by": 2}),
        issues=("vLLM ROCM_ATTN passes W-1", "transformers #41184", "vLLM #3385"),
    ),
    Fault(
        "window-right-off",
        "window",
        "one key too many or too few at the right edge",
        "two-sided windows are rare, and their right edge is tested by nobody",
        lambda by: _right(by),
        _looks_right,
        ({"by": -1}, {"by": 1}, {"by": -2}, {"by": 2}),
    ),
    Fault(
        "window-ignored",
        "window",
        "everything to the left is seen",
        "an option that is not passed, or -1 that means something else elsewhere",
        lambda: _window(lambda left, right: (None, right)),
        _has_left,
        issues=("pytorch #173469", "AITER #3158", "mistral.rs #2094", "vLLM 0.24.0 _fwd_kernel_alibi"),
    ),
    Fault(
        "window-right-ignored",
        "window",
        "everything to the right is seen",
        "a kernel whose window has only a left side",
        lambda: _window(lambda left, right: (left, None)),
        _looks_right,
    ),
    Fault(
        "window-one-sided",
        "window",
        "nothing to the right is seen",
        "a two-sided window is taken for a causal one",
        lambda: with_visibility(lambda w, sequence, far: x.within(w, sequence, far, (w.call.window[0], 0))),
        _looks_right,
    ),
    Fault(
        "window-left-by-tile",
        "window",
        "keys left of the window are seen if they share a tile with its edge",
        "tiles outside the window are skipped, and the first one is not masked",
        lambda tile: _left_by_tile(tile),
        _has_left,
        tuple({"tile": n} for n in TILES),
        issues=("mistral.rs #2094",),
    ),
    Fault(
        "window-cuts-sink",
        "window",
        "rows whose window does not begin at the first key lose their sink",
        "the sink is put in with the first tile, which the window skips",
        lambda: with_sink(_cut_sink),
        lambda call: call.sinks is not None and _has_left(call),
    ),
    Fault(
        "causal-off-by-one",
        "causality",
        "each query sees the next key, or not its own",
        "< where <= was meant, or the other way round",
        lambda by: _now(by),
        _has_causal,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "causal-top-left",
        "causality",
        "queries behind a context see almost nothing of it",
        "the mask is aligned to the first key instead of the last",
        _top_left,
        _has_causal,
        issues=("FlashAttention 2.1 changed the alignment",),
    ),
    Fault(
        "causal-ignored",
        "causality",
        "a prefill sees its own future",
        "a flag that is not passed",
        lambda: _all_causal(False),
        _has_causal,
    ),
    Fault(
        "causal-where-not-asked",
        "causality",
        "an encoder's queries see nothing to the right",
        "a kernel that knows only causal attention, and does not say so",
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
