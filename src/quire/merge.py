"""Combines attention over parts of the keys into attention over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.errors import ArgumentError, describe


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of the same queries over disjoint keys, as one: `out [tokens, q_heads, v_head_dim]` and
    `lse [tokens, q_heads]`, natural log, fp32.

    A part that saw no key (LSE -inf) counts nothing, whatever its output holds. A sink belongs to exactly one part."""
    if len(outs) != len(lses) or not outs:
        raise ArgumentError("lses", f"{len(lses)} beside {len(outs)} outs", "one LSE for each of one or more outs")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or out.dim() != 3:
            raise ArgumentError(f"outs[{i}]", describe(out), "a floating-point tensor [tokens, q_heads, v_head_dim]")
        if (out.shape, out.dtype, out.device) != (outs[0].shape, outs[0].dtype, outs[0].device):
            raise ArgumentError(f"outs[{i}]", describe(out), f"as outs[0]: {describe(outs[0])}")
        if not isinstance(lse, torch.Tensor) or lse.dtype is not torch.float32 or lse.shape != out.shape[:2]:
            raise ArgumentError(f"lses[{i}]", describe(lse), f"float32{list(out.shape[:2])}, the tokens and heads of outs[{i}]")
        if lse.device != out.device:
            raise ArgumentError(f"lses[{i}]", describe(lse), f"on {out.device}, as outs[{i}]")
    parts = torch.stack(list(lses))
    lse = torch.logsumexp(parts, dim=0)
    shares = torch.exp(parts - lse.masked_fill(lse == -math.inf, 0.0)).unsqueeze(-1)
    total = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for out, share in zip(outs, shares):
        total += torch.where(share == 0, 0.0, out.float() * share)
    return total.to(outs[0].dtype), lse
