"""Faults of latent caches, in which V is the first elements of K."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.formats import DS_MLA
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


def _scales_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Stages:
    """Groups of a latent have the scales of groups `change(group)`."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        numbers = oracle.latent_numbers(w, part, raw, page, offset)
        return (numbers * oracle.latent_scales(w, part, page, offset, change)).to(w.number)

    return PLAIN.replace(decode=decode)


def _is_ds_mla(call: KernelCall) -> bool:
    return call.format == DS_MLA


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
    Fault(
        "latent-scale-of-neighbour",
        "latent",
        "each 128 elements of a latent have the scale of the next 128",
        "the index of a group is off by one",
        lambda: _scales_of(lambda group: (group + 1) % 4),
        _is_ds_mla,
    ),
    Fault(
        "latent-scale-of-first-group",
        "latent",
        "all elements of a latent have the scale of the first 128",
        "a kernel loads one scale for a token",
        lambda: _scales_of(torch.zeros_like),
        _is_ds_mla,
    ),
)
