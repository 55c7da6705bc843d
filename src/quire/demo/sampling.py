"""Picks the next byte: temperature, top-k, and noise that depends on the request and the position alone.

So a request draws the same noise whatever shares its batch, and whether it runs paged or alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Taste(NamedTuple):
    """How a request wants its bytes picked."""

    temperature: float
    top_k: int
    seed: int


def pick(logits: torch.Tensor, taste: Taste, position: int) -> int:
    """The best of the top k by logit over temperature plus Gumbel noise, which is a draw from their softmax."""
    logits = logits.double().cpu()
    noisy, inside = _draw(logits, taste, position)
    return int(torch.where(inside, noisy, -math.inf).argmax())


def distance(token: int, logits: torch.Tensor, taste: Taste, position: int) -> float:
    """How far every logit would have to move, at least, for this token to be picked; 0 if it is the one."""
    logits = logits.double().cpu()
    noisy, inside = _draw(logits, taste, position)
    behind = (noisy[inside].max() - noisy[token]) * taste.temperature
    outside = logits[inside].min() - logits[token]
    return max(0.0, float(behind), float(outside)) / 2


def _draw(logits: torch.Tensor, taste: Taste, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The noisy scores, and which of them are of the top k."""
    chance = torch.Generator().manual_seed(taste.seed * 65_536 + position)
    noise = -(-torch.rand(logits.shape, generator=chance, dtype=torch.float64, device="cpu").clamp(min=1e-12).log()).log()
    return logits / taste.temperature + noise, logits >= logits.topk(taste.top_k).values[-1]
