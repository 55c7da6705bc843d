"""Faults of latent caches, of which V is a part of K."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.formats import DS_MLA
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, Stages, Work


def _scores_of(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Stages:
    """Scores are those of `change(keys, v_head_dim)`."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return oracle.score(w, q, change(k, w.dims["v"]), heads)

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
        "rest-of-keys-missing",
        "latent",
        "logits lack the elements of keys that are not values",
        "a kernel multiplies queries by the latent alone, without the rotated part",
        lambda: _scores_of(lambda k, first: torch.cat((k[..., :first], torch.zeros_like(k[..., first:])), -1)),
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
