"""Faults of latent caches, in which V is the first elements of K."""

from __future__ import annotations

import torch

from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Values, Work


def _last_elements() -> Stages:
    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        k = oracle.gather(w, s, indices, sequence).k
        return Values(k, k[..., -w.dims["v"] :])

    return PLAIN.replace(gather=gather)


def _without_rest() -> Stages:
    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return oracle.score(w, q[..., : w.dims["v"]], k[..., : w.dims["v"]], heads)

    return PLAIN.replace(score=score)


LATENT = (
    Fault(
        "latent-values-from-the-end",
        "latent",
        "outputs contain the last elements of keys",
        "the elements with rotary positions are expected before the latent vector",
        _last_elements,
        lambda call: call.v_in_k,
    ),
    Fault(
        "latent-logits-of-values-alone",
        "latent",
        "logits lack the elements of keys that are not values",
        "the elements with rotary positions are a second product, which is missing",
        _without_rest,
        lambda call: call.v_in_k,
    ),
)
