"""Samples the next byte with temperature and top-k. The random numbers depend only on the request and the position, so that a
request samples the same bytes in any batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class SamplingParams(NamedTuple):
    """The sampling parameters of a request."""

    temperature: float
    top_k: int
    seed: int


def pick(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    """Samples from the softmax of the top k logits, by adding Gumbel noise and taking the maximum."""
    logits = logits.double().cpu()
    noisy, inside = _draw(logits, sampling, position)
    return int(torch.where(inside, noisy, -math.inf).argmax())


def distance(token: int, logits: torch.Tensor, sampling: SamplingParams, position: int) -> float:
    """The smallest change of all logits for which this token would be sampled; 0 if it is sampled without a change."""
    logits = logits.double().cpu()
    noisy, inside = _draw(logits, sampling, position)
    behind = (noisy[inside].max() - noisy[token]) * sampling.temperature
    outside = logits[inside].min() - logits[token]
    return max(0.0, float(behind), float(outside)) / 2


def _draw(logits: torch.Tensor, sampling: SamplingParams, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits with noise, and which of them are among the top k."""
    generator = torch.Generator().manual_seed(sampling.seed * 65_536 + position)
    noise = -(-torch.rand(logits.shape, generator=generator, dtype=torch.float64, device="cpu").clamp(min=1e-12).log()).log()
    return logits / sampling.temperature + noise, logits >= logits.topk(sampling.top_k).values[-1]
