"""Faults of keys that are missed, or counted twice; and of trees."""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import TILES, has, with_visibility
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, BatchSequence, SequenceResult, Stages, Work


def _shallow(fill: float, tile: int, empty: bool) -> Stages:
    """Hidden keys get a finite score in place of their product, and the scale makes it small: they keep a weight. So do the slots
    between a sequence's end and that of its tile, whose values are zero. The scale of the keys is a part of the softmax's. A row
    without a visible score above that one may pass for empty."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        kept = fill * w.call.scale * float(w.call.k_scale)  # type: ignore[arg-type]
        logits = logits.masked_fill(logits == -torch.inf, kept)
        behind = -(-v.shape[0] // tile) * tile - v.shape[0]
        logits = torch.cat((logits, logits.new_full((*logits.shape[:2], behind), kept)), -1)
        part = x.weigh(w, logits, torch.cat((v, v.new_zeros(behind, *v.shape[1:]))), heads)
        seen = (logits.amax(-1) > kept).T.unsqueeze(-1) if empty else torch.ones(())
        return SequenceResult(torch.where(seen > 0, part.out, 0.0), part.lse, part.weighted)

    return PLAIN.replace(weigh=weigh, keep_unseen=True)


def _shrinks_masks(call: KernelCall) -> bool:
    """Whether a product of -50000 would not be hidden: its weight would show beside others."""
    return call.k_scale is not None and call.k_scale.dim() == 0 and 5e4 * call.scale * float(call.k_scale) < 6


def _hidden(which: Any) -> Stages:
    """Some keys are not seen: `which(w, sequence, far)` is True for them."""

    def change(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        return x.within(w, sequence, far, w.call.window) & ~which(w, sequence, far)

    return with_visibility(change)


def _key_at(position: Any) -> Stages:
    def which(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        return (torch.arange(far.shape[1]) == position(sequence))[None, :].expand(far.shape)

    return _hidden(which)


def _keys_between(first: int, last: int) -> Stages:
    def which(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        keys = torch.arange(far.shape[1])
        return ((keys >= first) & (keys < last))[None, :].expand(far.shape)

    return _hidden(which)


def _without_last_tile(tile: int, spared: bool) -> Stages:
    """Only whole tiles are seen; a sequence that is shorter than one may be spared."""

    def which(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        n = far.shape[1]
        end = n if spared and n < tile else n // tile * tile
        return (torch.arange(n) >= end)[None, :].expand(far.shape)

    return _hidden(which)


def _part_tiles(call: KernelCall) -> list[int]:
    """Sizes of tiles that some sequence with queries fills at least one of, and ends within another."""
    asked = call.kv_lens[call.q_starts.diff() > 0].tolist()
    return [tile for tile in TILES if any(n > tile and n % tile for n in asked)]


def _by_distance(distance: int) -> Stages:
    return _hidden(lambda w, sequence, far: far == distance)


def _counted(first: int, last: int, from_end: bool = False) -> Stages:
    """Keys of a range weigh twice."""

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        at = torch.arange(keys)
        lo, hi = (sequence.kv_len - last, sequence.kv_len - first) if from_end else (first, last)
        twice = torch.where((at >= lo) & (at < hi), math.log(2.0), 0.0).to(w.number)
        return x.bias(w, sequence, keys) + twice

    return PLAIN.replace(bias=bias)


def _plain_causal() -> Stages:
    """A tree mask is ignored: the drafts are taken for a line."""
    return with_visibility(lambda w, sequence, far: _line(w, sequence, far))


def _line(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
    q_at, k_at = torch.arange(sequence.context, sequence.kv_len), torch.arange(far.shape[1])
    visible = (q_at[:, None] >= k_at[None, :]).clone()
    left = w.call.window[0]
    return visible if left is None else visible & (far <= left)


def _mask_transposed() -> Stages:
    def change(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        visible = x.within(w, sequence, far, w.call.window)
        tree = w.call.mask[sequence.first : sequence.first + sequence.q_len, : sequence.q_len].cpu()  # type: ignore[index]
        visible[:, sequence.context :] = tree.T
        return visible

    return with_visibility(change)


def _mask_hides_context() -> Stages:
    def change(w: Work, sequence: BatchSequence, far: torch.Tensor) -> torch.Tensor:
        visible = x.within(w, sequence, far, w.call.window)
        visible[:, : sequence.context] = False
        return visible

    return with_visibility(change)


def _new_twice(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
    twice = torch.where(torch.arange(keys) >= sequence.context, math.log(2.0), 0.0).to(w.number)
    return x.bias(w, sequence, keys) + twice


def _counted_bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
    if w.call.alibi is None:
        return 0.0
    q_at = torch.arange(sequence.context, sequence.kv_len)
    return -x.slopes(w) * (q_at[:, None] - torch.arange(keys)[None, :]).abs()


def _counted_see(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
    q_at = torch.arange(sequence.context, sequence.kv_len)
    return x.within(w, sequence, q_at[:, None] - torch.arange(keys)[None, :], w.call.window)


KEYS = (
    Fault(
        "mask-too-shallow",
        "keys",
        "keys beyond the end, and hidden ones, keep a little weight",
        "hidden scores become -50000 before the scale is applied, and a small scale of the keys is in it",
        lambda fill, tile, empty: _shallow(fill, tile, empty),
        _shrinks_masks,
        tuple(
            {"fill": fill, "tile": tile, "empty": empty}
            for fill in (-5e4, -1e4)
            for tile in (128, 64, 32, 16, 1)
            for empty in (True, False)
        ),
        issues=("FlashInfer 0.6.12: math::inf is 5e4, k_scale is folded into sm_scale",),
    ),
    Fault(
        "last-token-missing",
        "keys",
        "the newest key of each sequence is not seen",
        "kv_len - 1 somewhere, or a cache that was not written yet",
        lambda: _key_at(lambda sequence: sequence.kv_len - 1),
        issues=("FlashInfer plan() not re-run: TRT-LLM #18769",),
    ),
    Fault(
        "first-token-missing",
        "keys",
        "the first key of each sequence is not seen",
        "a loop that starts at 1",
        lambda: _key_at(lambda sequence: 0),
    ),
    Fault(
        "own-token-missing",
        "keys",
        "no query sees its own key",
        "the diagonal is masked",
        lambda: _by_distance(0),
    ),
    Fault(
        "token-missing",
        "keys",
        "one key is not seen",
        "a slot that was skipped or never written",
        lambda position: _key_at(lambda sequence: position),
        tries=(),
        solve=solve.missing_token,
        symptom=True,
        plant=lambda call: {"position": int(call.kv_lens.max()) // 2},
    ),
    Fault(
        "token-missing-from-end",
        "keys",
        "the key a few places before the end is not seen",
        "speculative tokens that were accepted and not written",
        lambda back: _key_at(lambda sequence: sequence.kv_len - back),
        tries=(),
        solve=solve.missing_from_end,
        lasting=True,
        plant=lambda call: {"back": 2},
    ),
    Fault(
        "token-missing-at-distance",
        "keys",
        "no query sees the key that lies a certain way to its left",
        "the border between two tiles or two loops",
        lambda distance: _by_distance(distance),
        tries=(),
        solve=solve.missing_at_distance,
        lasting=True,
        plant=lambda call: {"distance": 1},
    ),
    Fault(
        "keys-missing",
        "keys",
        "a run of keys is not seen: a page, a tile, a split, or all beyond some point",
        "a tile that is skipped, a loop that ends too early, a split that is dropped",
        lambda first, last: _keys_between(first, last),
        tries=(),
        solve=solve.missing_keys,
        symptom=True,
        plant=lambda call: {"first": call.page_size, "last": 2 * call.page_size},
        issues=("FlashInfer #3219",),
    ),
    Fault(
        "last-tile-dropped",
        "keys",
        "keys of a tile that a sequence does not fill are not seen",
        "the number of tiles is rounded down; a sequence of less than one tile may be spared, or see nothing",
        lambda tile, spared: _without_last_tile(tile, spared),
        lambda call: bool(_part_tiles(call)),
        tuple({"tile": n, "spared": spared} for n in TILES for spared in (True, False)),
        plant=lambda call: {"tile": _part_tiles(call)[0], "spared": True},
    ),
    Fault(
        "keys-counted-twice",
        "keys",
        "a run of keys weighs twice",
        "tiles of two loops overlap; a page is in two splits",
        lambda first, last: _counted(first, last),
        tries=(),
        solve=solve.doubled_keys,
        symptom=True,
        plant=lambda call: {"first": 0, "last": call.page_size},
    ),
    Fault(
        "last-token-counted-twice",
        "keys",
        "the newest key weighs twice",
        "it is read from the cache and from k as well",
        lambda: _counted(0, 1, from_end=True),
    ),
    Fault(
        "new-tokens-counted-twice",
        "keys",
        "the new keys weigh twice",
        "they are read from the cache and from k as well",
        lambda: PLAIN.replace(bias=_new_twice),
    ),
    Fault(
        "tree-ignored",
        "tree",
        "drafts see their siblings",
        "a mask that is not passed: the drafts are taken for a line",
        _plain_causal,
        has("mask"),
    ),
    Fault(
        "tree-transposed",
        "tree",
        "drafts see their children instead of their parents",
        "rows and columns of the mask change places",
        _mask_transposed,
        has("mask"),
    ),
    Fault(
        "tree-hides-context",
        "tree",
        "drafts see only each other",
        "the mask is taken for all keys, not for the new ones",
        _mask_hides_context,
        has("mask"),
    ),
    Fault(
        "positions-ignored",
        "tree",
        "biases and windows of drafts follow their rows, not their depth",
        "positions are counted instead of read",
        lambda: PLAIN.replace(bias=_counted_bias, see=_counted_see),
        has("positions"),
    ),
)
