"""Faults of Hadamard-transformed keys: what a kernel does with queries and new keys, which it must transform as stored keys are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.formats import hadamard, in_sequency_order
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import finished
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Outcome, Stages, Values, Work


def _with_transform(change: Callable[[torch.Tensor], torch.Tensor]) -> Stages:
    """Queries and new keys are transformed by `change`."""
    return PLAIN.replace(transform=lambda w, x: change(x))


def _of_queries(change: Callable[[torch.Tensor], torch.Tensor]) -> Stages:
    """Queries are transformed by `change`, new keys as they should be."""

    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        return oracle.gather(w, PLAIN, indices, sequence)

    return PLAIN.replace(transform=lambda w, x: change(x), gather=gather)


def _of_new_keys(change: Callable[[torch.Tensor], torch.Tensor]) -> Stages:
    """New keys are transformed by `change`, queries as they should be."""

    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        return oracle.gather(w, PLAIN.replace(transform=lambda w, x: change(x)), indices, sequence)

    return PLAIN.replace(gather=gather)


def _of_output() -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.out = hadamard(into.out)
        # A sum of as many products as a head has elements: their magnitudes add up.
        into.weighted = into.weighted.sum(-1, keepdim=True).expand_as(into.weighted) * into.weighted.shape[-1] ** -0.5
        return into

    return finished(finish)


def _transforms(call: KernelCall) -> bool:
    return call.hadamard


def _transforms_new_keys(call: KernelCall) -> bool:
    return call.hadamard and call.new_k is not None


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


HADAMARD = (
    Fault(
        "hadamard-queries-not-transformed",
        "hadamard",
        "queries are multiplied with transformed keys as they are",
        "the transform is applied in the write alone, or to the keys that are read once more",
        lambda: _of_queries(lambda x: x),
        _transforms,
    ),
    Fault(
        "hadamard-factor-missing",
        "hadamard",
        "logits are too large by the square root of head_dim",
        "queries are transformed by a matrix of 1 and -1, which is not normalised",
        lambda: _of_queries(lambda x: hadamard(x) * x.shape[-1] ** 0.5),
        _transforms,
    ),
    Fault(
        "hadamard-factor-twice",
        "hadamard",
        "logits are too small by the square root of head_dim",
        "queries are divided by head_dim and not by its square root",
        lambda: _of_queries(lambda x: hadamard(x) * x.shape[-1] ** -0.5),
        _transforms,
    ),
    Fault(
        "hadamard-other-order",
        "hadamard",
        "queries are transformed by a matrix whose rows are in another order than those of the keys' matrix",
        "rows in the order of their sign changes (Walsh), and not in the natural order",
        lambda: _with_transform(in_sequency_order),
        _transforms,
    ),
    Fault(
        "hadamard-new-keys-not-transformed",
        "hadamard",
        "logits of keys that are passed as arguments are those of transformed queries with keys as they are",
        "stored keys were transformed when they were written, new ones are not",
        lambda: _of_new_keys(lambda x: x),
        _transforms_new_keys,
    ),
    Fault(
        "hadamard-output-transformed",
        "hadamard",
        "outputs are transformed",
        "values are taken to be transformed as keys are",
        _of_output,
        lambda call: call.hadamard and _is_power_of_two(call.out.shape[2]),
    ),
)
