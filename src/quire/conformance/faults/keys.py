"""Faults of keys that are missing or counted twice, and of tree masks."""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import TILES, has, with_visibility
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, SequenceResult, Stages, Work


def _shallow(fill: float, tile: int, empty: bool) -> Stages:
    """Masked keys get the finite score `fill`, which the scale (times k_scale) makes small, so that they keep a weight. So do the
    slots between the end of a sequence and the end of its last tile; their values are zero. With `empty`, a row without a visible
    score above the masked ones gives zero."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        kept = fill * w.call.scale * float(w.call.k_scale)  # type: ignore[arg-type]
        logits = logits.masked_fill(logits == -torch.inf, kept)
        unused = -(-v.shape[0] // tile) * tile - v.shape[0]
        logits = torch.cat((logits, logits.new_full((*logits.shape[:2], unused), kept)), -1)
        part = oracle.softmax(w, logits, torch.cat((v, v.new_zeros(unused, *v.shape[1:]))), heads)
        seen = (logits.amax(-1) > kept).T.unsqueeze(-1) if empty else torch.ones(())
        return SequenceResult(torch.where(seen > 0, part.out, 0.0), part.lse, part.weighted)

    return PLAIN.replace(softmax=softmax, keep_unseen=True)


def _shrinks_masks(call: KernelCall) -> bool:
    """Whether a score of -50000 becomes so small after scaling that a masked key keeps a noticeable weight."""
    return call.k_scale is not None and call.k_scale.dim() == 0 and 5e4 * call.scale * float(call.k_scale) < 6


def _hidden(which: Any) -> Stages:
    """Keys for which `which(w, sequence, distances)` is True are not visible."""

    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        return oracle.visible_at(w, sequence, distances, w.call.window) & ~which(w, sequence, distances)

    return with_visibility(change)


def _key_at(position: Any) -> Stages:
    def which(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        return (torch.arange(distances.shape[1]) == position(sequence))[None, :].expand(distances.shape)

    return _hidden(which)


def _keys_between(first: int, last: int) -> Stages:
    def which(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        keys = torch.arange(distances.shape[1])
        return ((keys >= first) & (keys < last))[None, :].expand(distances.shape)

    return _hidden(which)


def _without_last_tile(tile: int, keeps_short: bool) -> Stages:
    """Only whole tiles are visible; with `keeps_short`, a sequence shorter than one tile is complete."""

    def which(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        n = distances.shape[1]
        end = n if keeps_short and n < tile else n // tile * tile
        return (torch.arange(n) >= end)[None, :].expand(distances.shape)

    return _hidden(which)


def _part_tiles(call: KernelCall) -> list[int]:
    """Tile sizes for which some sequence with queries has at least one whole tile and an incomplete last one."""
    lengths = call.kv_lens[call.q_starts.diff() > 0].tolist()
    return [tile for tile in TILES if any(n > tile and n % tile for n in lengths)]


def _by_distance(distance: int) -> Stages:
    return _hidden(lambda w, sequence, distances: distances == distance)


def _counted(first: int, last: int, from_end: bool = False) -> Stages:
    """Keys of a range have twice their weight."""

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        at = torch.arange(keys)
        lo, hi = (sequence.kv_len - last, sequence.kv_len - first) if from_end else (first, last)
        twice = torch.where((at >= lo) & (at < hi), math.log(2.0), 0.0).to(w.number)
        return oracle.bias(w, sequence, keys) + twice

    return PLAIN.replace(bias=bias)


def _plain_causal() -> Stages:
    """The tree mask is ignored: the drafts are treated as one causal sequence."""
    return with_visibility(lambda w, sequence, distances: _causal_line(w, sequence, distances))


def _causal_line(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
    q_pos, k_pos = torch.arange(sequence.context, sequence.kv_len), torch.arange(distances.shape[1])
    visible = (q_pos[:, None] >= k_pos[None, :]).clone()
    left = w.call.window[0]
    return visible if left is None else visible & (distances <= left)


def _mask_transposed() -> Stages:
    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        visible = oracle.visible_at(w, sequence, distances, w.call.window)
        tree = w.call.mask[sequence.first : sequence.first + sequence.q_len, : sequence.q_len].cpu()  # type: ignore[index]
        visible[:, sequence.context :] = tree.T
        return visible

    return with_visibility(change)


def _mask_hides_context() -> Stages:
    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        visible = oracle.visible_at(w, sequence, distances, w.call.window)
        visible[:, : sequence.context] = False
        return visible

    return with_visibility(change)


def _new_twice(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
    twice = torch.where(torch.arange(keys) >= sequence.context, math.log(2.0), 0.0).to(w.number)
    return oracle.bias(w, sequence, keys) + twice


def _counted_bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
    if w.call.alibi is None:
        return 0.0
    q_pos = torch.arange(sequence.context, sequence.kv_len)
    return -oracle.slopes(w) * (q_pos[:, None] - torch.arange(keys)[None, :]).abs()


def _counted_see(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
    q_pos = torch.arange(sequence.context, sequence.kv_len)
    return oracle.visible_at(w, sequence, q_pos[:, None] - torch.arange(keys)[None, :], w.call.window)


KEYS = (
    Fault(
        "mask-too-shallow",
        "keys",
        "masked keys, and slots after the end, keep a small weight",
        "masked scores are set to -50000 before the softmax scale, which includes a small k_scale, is applied",
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
        "the last key of each sequence is not visible",
        "kv_len - 1 is used as the length, or the cache is not written yet",
        lambda: _key_at(lambda sequence: sequence.kv_len - 1),
        issues=("FlashInfer plan() not re-run: TRT-LLM #18769",),
    ),
    Fault(
        "first-token-missing",
        "keys",
        "the first key of each sequence is not visible",
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
        "one key is not visible",
        "a slot is skipped or was never written",
        lambda position: _key_at(lambda sequence: position),
        tries=(),
        solve=solve.missing_token,
        symptom=True,
        inject=lambda call: {"position": int(call.kv_lens.max()) // 2},
    ),
    Fault(
        "token-missing-from-end",
        "keys",
        "the key at a fixed distance from the end is not visible",
        "accepted speculative tokens were not written",
        lambda back: _key_at(lambda sequence: sequence.kv_len - back),
        tries=(),
        solve=solve.missing_from_end,
        lasting=True,
        inject=lambda call: {"back": 2},
    ),
    Fault(
        "token-missing-at-distance",
        "keys",
        "no query sees the key at a fixed distance to its left",
        "an error at the boundary between two tiles or two loops",
        lambda distance: _by_distance(distance),
        tries=(),
        solve=solve.missing_at_distance,
        lasting=True,
        inject=lambda call: {"distance": 1},
    ),
    Fault(
        "keys-missing",
        "keys",
        "a range of keys is not visible: a page, a tile, a split, or all keys from a position on",
        "a tile is skipped, a loop ends too early, or a split is dropped",
        lambda first, last: _keys_between(first, last),
        tries=(),
        solve=solve.missing_keys,
        symptom=True,
        inject=lambda call: {"first": call.page_size, "last": 2 * call.page_size},
        issues=("FlashInfer #3219",),
    ),
    Fault(
        "last-tile-dropped",
        "keys",
        "keys of an incomplete last tile are not visible",
        "the number of tiles is rounded down; sequences shorter than one tile may be handled separately",
        lambda tile, keeps_short: _without_last_tile(tile, keeps_short),
        lambda call: bool(_part_tiles(call)),
        tuple({"tile": n, "keeps_short": keeps_short} for n in TILES for keeps_short in (True, False)),
        inject=lambda call: {"tile": _part_tiles(call)[0], "keeps_short": True},
    ),
    Fault(
        "keys-counted-twice",
        "keys",
        "a range of keys has twice its weight",
        "tiles of two loops overlap, or a page belongs to two splits",
        lambda first, last: _counted(first, last),
        tries=(),
        solve=solve.doubled_keys,
        symptom=True,
        inject=lambda call: {"first": 0, "last": call.page_size},
    ),
    Fault(
        "last-token-counted-twice",
        "keys",
        "the last key has twice its weight",
        "it is read from the cache and from k",
        lambda: _counted(0, 1, from_end=True),
    ),
    Fault(
        "new-tokens-counted-twice",
        "keys",
        "the new keys have twice their weight",
        "they are read from the cache and from k",
        lambda: PLAIN.replace(bias=_new_twice),
    ),
    Fault(
        "tree-ignored",
        "tree",
        "draft tokens see their siblings",
        "the mask is not passed: the drafts are treated as one causal sequence",
        _plain_causal,
        has("mask"),
    ),
    Fault(
        "tree-transposed",
        "tree",
        "draft tokens see their descendants instead of their ancestors",
        "rows and columns of the mask are exchanged",
        _mask_transposed,
        has("mask"),
    ),
    Fault(
        "tree-hides-context",
        "tree",
        "draft tokens see only each other",
        "the mask is applied to all keys instead of the new ones",
        _mask_hides_context,
        has("mask"),
    ),
    Fault(
        "positions-ignored",
        "tree",
        "ALiBi and window of draft tokens follow their row instead of their depth in the tree",
        "positions are counted instead of read from `positions`",
        lambda: PLAIN.replace(bias=_counted_bias, visibility=_counted_see),
        has("positions"),
    ),
)
