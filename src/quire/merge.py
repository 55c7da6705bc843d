"""Combines attention over parts of the keys into attention over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.cache.memory import overlaps_itself, share_memory
from quire.errors import ArgumentError, describe


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of the same queries over disjoint keys, as one: `out [tokens, q_heads, v_head_dim]` and
    `lse [tokens, q_heads]`, natural log, fp32. Into new tensors, or into those given.

    A part that saw no key (LSE -inf) counts nothing, whatever its output holds. A sink belongs to exactly one part."""
    _check_parts(outs, lses)
    _check_buffers(outs, lses, out, lse)
    parts = torch.stack(list(lses))
    total_lse = torch.logsumexp(parts, dim=0)
    shares = torch.exp(parts - total_lse.masked_fill(total_lse == -math.inf, 0.0)).unsqueeze(-1)
    total = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for part, share in zip(outs, shares):
        total += torch.where(share == 0, 0.0, part.float() * share)
    return (
        total.to(outs[0].dtype) if out is None else out.copy_(total),
        total_lse if lse is None else lse.copy_(total_lse),
    )


def _check_parts(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise ArgumentError(name, describe(parts), "a list or tuple of tensors, one for each part")
    if len(outs) != len(lses) or not outs:
        raise ArgumentError("lses", f"{len(lses)} beside {len(outs)} outs", "one LSE for each of one or more outs")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        if not _is_dense(out) or not out.is_floating_point() or out.dim() != 3:
            raise ArgumentError(f"outs[{i}]", describe(out), "a floating-point tensor [tokens, q_heads, v_head_dim]")
        if (out.shape, out.dtype, out.device) != (outs[0].shape, outs[0].dtype, outs[0].device):
            raise ArgumentError(f"outs[{i}]", describe(out), f"as outs[0]: {describe(outs[0])}")
        if not _is_dense(lse) or lse.dtype is not torch.float32 or lse.shape != out.shape[:2]:
            raise ArgumentError(f"lses[{i}]", describe(lse), f"float32{list(out.shape[:2])}, the tokens and heads of outs[{i}]")
        if lse.device != out.device:
            raise ArgumentError(f"lses[{i}]", describe(lse), f"on {out.device}, as outs[{i}]")


def _check_buffers(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """The results' memory: their shapes and types, each element once, and no part's."""
    named = {f"outs[{i}]": part for i, part in enumerate(outs)} | {f"lses[{i}]": part for i, part in enumerate(lses)}
    for name, buffer, like in (("out", out, outs[0]), ("lse", lse, lses[0])):
        if buffer is None:
            continue
        if not _is_dense(buffer) or (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
            raise ArgumentError(name, describe(buffer), f"a dense tensor as {name}s[0]: {describe(like)}")
        if overlaps_itself(buffer):
            given = f"strides {buffer.stride()} over {list(buffer.shape)}, which overlap"
            raise ArgumentError(name, given, "memory of its own for each element")
        for other, tensor in named.items():
            if share_memory(buffer, tensor):
                raise ArgumentError(name, f"memory shared with {other}", "memory of its own")
        named[name] = buffer


def _is_dense(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
