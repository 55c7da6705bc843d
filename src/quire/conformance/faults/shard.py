"""Faults of context-parallel shards: positions and numbers of the keys of a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import has, with_visibility
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Stages, Work


def _key_positions(change: Callable[[KernelCall, torch.Tensor], torch.Tensor]) -> Stages:
    """Distances are computed from `change(call, key numbers)` instead of the positions of the keys. Given positions of new tokens
    stay as they are."""

    def distances(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        q_pos, k_pos = oracle.token_positions(w, sequence, keys)
        at = torch.arange(keys)
        wrong = change(w.call, oracle.key_numbers(w.call, at))
        given = at >= (keys if w.call.positions is None else sequence.context)
        return q_pos[:, None] - torch.where(given, k_pos, wrong)[None, :]

    def visibility(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        return oracle.visible_at(w, sequence, distances(w, sequence, keys), w.call.window)

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        return 0.0 if w.call.alibi is None else -oracle.slopes(w) * distances(w, sequence, keys).abs()

    return PLAIN.replace(visibility=visibility, bias=bias)


def _uses_positions(call: KernelCall) -> bool:
    """Whether the positions of keys matter: to ALiBi, to a window, or to the causality of several queries."""
    matters = call.alibi is not None or call.window != (None, None)
    return call.shard is not None and (matters or (call.mask is call.spans is None and bool((call.q_starts.diff() > 1).any())))


def _fewer_keys() -> Stages:
    """A sequence has `kv_len // ranks` keys on every rank."""

    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        assert w.call.shard is not None
        numbers = oracle.key_numbers(w.call, torch.arange(distances.shape[1]))
        return oracle.visible_at(w, sequence, distances, w.call.window) & (numbers < sequence.kv_len // w.call.shard[1])

    return with_visibility(change)


def _has_fewer_keys(call: KernelCall) -> bool:
    if call.shard is None:
        return False
    lens = call.kv_lens[call.q_starts.diff() > 0].tolist()
    return any(int(oracle.is_kept(call, n).sum()) > n // call.shard[1] for n in lens)


def _all_new_tokens() -> Stages:
    """New tokens that come with the call are visible on every rank."""

    def change(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        whole = Work(dataclasses.replace(w.call, shard=None), w.number, w.factors)
        new = torch.arange(distances.shape[1]) >= sequence.context
        visible = oracle.visible_at(whole, sequence, distances, w.call.window)
        return visible & (new | oracle.is_kept(w.call, distances.shape[1]))

    return with_visibility(change)


SHARD = (
    Fault(
        "shard-positions-local",
        "shard",
        "causality, window and ALiBi are those of a shorter sequence",
        "the number of a key in its pages is used as its position",
        lambda: _key_positions(lambda call, key: key),
        _uses_positions,
    ),
    Fault(
        "shard-interleave-ignored",
        "shard",
        "keys have positions next to their own",
        "key j of a rank is placed at j * ranks + rank, as if ranks took turns key by key",
        lambda: _key_positions(lambda call, key: key * call.shard[1] + call.shard[0]),  # type: ignore[index]
        lambda call: _uses_positions(call) and call.shard is not None and call.shard[2] > 1,
    ),
    Fault(
        "shard-length-divided",
        "shard",
        "the last keys of a rank are missing",
        "the keys of a rank are counted as kv_len // ranks",
        _fewer_keys,
        _has_fewer_keys,
    ),
    Fault(
        "shard-new-tokens-on-every-rank",
        "shard",
        "new tokens have too much weight after the merge",
        "every rank sees all new tokens that are passed as arguments",
        _all_new_tokens,
        lambda call: has("shard")(call) and call.new is not None,
    ),
)
