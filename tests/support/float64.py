"""Attention of one sequence in float64, and how far a kernel's result may be from it."""

from __future__ import annotations

from typing import Any

import torch

from quire import reference
from quire.conformance.oracle.budget import SAFETY_FACTOR, SMALL, allowed, least_loss


def assert_exact(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor | None = None, **options: Any
) -> None:
    """Fails unless out `[q_len, q_heads, dim]` and lse `[q_len, q_heads]` are the attention of q over k, v, within the budget of
    their types: the conformance kit's, with the smallest loss that it allows."""
    want, want_lse = reference.attention(q, k, v, **options)
    weighted, _ = reference.attention(q, k, v.abs(), **options)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    group = q.shape[1] // k.shape[1]
    top = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(group, 1)).abs().max() * scale if k.numel() else 0.0
    slopes = options.get("alibi")
    top = float(top) + (0.0 if slopes is None else float(slopes.abs().max()) * k.shape[0])
    lost = least_loss(top, 0.0 if q.dtype is torch.float32 else torch.finfo(q.dtype).eps / 2, q.shape[-1])
    budget = allowed(lost, weighted, want, out.dtype)
    assert out.shape == want.shape
    excess = ((out.double() - want).abs() / budget).nan_to_num(torch.inf)
    assert float(excess.max()) <= 1, f"{float(excess.max()):.3g} times the budget, at {tuple((excess > 1).nonzero()[0].tolist())}"
    if lse is not None:
        assert torch.equal(lse.isneginf(), want_lse.isneginf())
        finite = ~want_lse.isneginf()
        error = (lse.double() - want_lse)[finite].abs()
        assert bool((error <= SAFETY_FACTOR * lost + 8 * SMALL * want_lse[finite].abs().clamp(min=1)).all())
