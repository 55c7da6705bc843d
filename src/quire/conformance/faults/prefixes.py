"""Faults of shared prefixes: pages that a kernel reads once for several sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import with_visibility
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Stages, Work


def _keys_of(call: KernelCall, seq: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The prefixes of a sequence: their sequences with new tokens in order, and the positions [begin, end) of their keys."""
    with_queries = call.q_starts.diff().tolist()
    for sequences, begin, end in sorted(call.prefixes or (), key=lambda prefix: prefix[1]):
        if seq in sequences:
            readers = tuple(sorted(i for i in sequences if with_queries[i]))
            yield readers, begin * call.page_size, end * call.page_size


def _without(hidden: Callable[[int, int, tuple[int, ...]], bool]) -> Stages:
    """The keys of a prefix are not read for a sequence if `hidden(level of the prefix, sequence, sequences of the prefix)`."""

    def visibility(w: Work, sequence: BatchSequence, distances: torch.Tensor) -> torch.Tensor:
        visible = oracle.visible_at(w, sequence, distances, w.call.window).clone()
        for level, (readers, begin, end) in enumerate(_keys_of(w.call, sequence.seq)):
            if hidden(level, sequence.seq, readers):
                visible[:, begin:end] = False
        return visible

    return with_visibility(visibility)


def _twice() -> Stages:
    """The keys of prefixes have twice their weight."""

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        end = max((end for _, _, end in _keys_of(w.call, sequence.seq)), default=0)
        return oracle.bias(w, sequence, keys) + math.log(2) * (torch.arange(keys) < end)

    return PLAIN.replace(bias=bias)


def _of_first_member() -> Stages:
    """ALiBi in a prefix is computed from the positions that the queries of its first sequence have."""

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        contexts = (w.call.kv_lens.cpu().long() - w.call.q_starts.cpu().long().diff()).tolist()
        bent = torch.as_tensor(oracle.bias(w, sequence, keys)).clone()
        q_pos, k_pos = oracle.token_positions(w, sequence, keys)
        for readers, begin, end in _keys_of(w.call, sequence.seq):
            moved = q_pos + contexts[readers[0]] - sequence.context
            bent[..., begin:end] = -oracle.slopes(w) * (moved[:, None] - k_pos[None, begin:end]).abs()
        return bent

    return PLAIN.replace(bias=bias)


def _sequences(call: KernelCall, has: Callable[[KernelCall, int], bool]) -> bool:
    """Whether the call has prefixes, and some sequence with new tokens is one where a fault shows."""
    return bool(call.prefixes) and any(n and has(call, seq) for seq, n in enumerate(call.q_starts.diff().tolist()))


def _has_prefix(call: KernelCall, seq: int) -> bool:
    return any(True for _ in _keys_of(call, seq))


def _is_later(call: KernelCall, seq: int) -> bool:
    return any(readers[0] != seq for readers, _, _ in _keys_of(call, seq))


def _has_levels(call: KernelCall, seq: int) -> bool:
    return sum(1 for _ in _keys_of(call, seq)) > 1


def _is_elsewhere(call: KernelCall, seq: int) -> bool:
    contexts = (call.kv_lens.cpu().long() - call.q_starts.cpu().long().diff()).tolist()
    return any(contexts[readers[0]] != contexts[seq] for readers, _, _ in _keys_of(call, seq))


PREFIXES = (
    Fault(
        "prefix-missing",
        "prefixes",
        "sequences that share pages see only the keys after them",
        "the partial results of prefixes are not merged",
        lambda: _without(lambda level, seq, readers: True),
        lambda call: _sequences(call, _has_prefix),
    ),
    Fault(
        "prefix-only-of-first-sequence",
        "prefixes",
        "of the sequences that share pages only the first sees their keys",
        "the partial result of a prefix is stored for one of its sequences",
        lambda: _without(lambda level, seq, readers: seq != readers[0]),
        lambda call: _sequences(call, _is_later),
    ),
    Fault(
        "prefix-of-one-level",
        "prefixes",
        "of several prefixes of a sequence only the first is seen",
        "a sequence is expected to have one prefix, but prefixes form trees",
        lambda: _without(lambda level, seq, readers: level > 0),
        lambda call: _sequences(call, _has_levels),
    ),
    Fault(
        "prefix-counted-twice",
        "prefixes",
        "keys of shared pages have twice their weight",
        "the pages are read for the prefix, and again for the sequence",
        _twice,
        lambda call: _sequences(call, _has_prefix),
    ),
    Fault(
        "prefix-positions-of-first-sequence",
        "prefixes",
        "shared keys have too much or too little weight relative to others",
        "the queries of all sequences of a prefix are taken to have the positions of those of its first",
        _of_first_member,
        lambda call: call.alibi is not None and _sequences(call, _is_elsewhere),
    ),
)
