"""Merges partial attention results over disjoint sets of keys."""

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
    """Merges partial attention results of the same queries over disjoint sets of keys into the result over all keys.

    A partial result without keys (LSE of -inf) has no influence; its output may hold any value. A sink must be in exactly one.
    Where an LSE is +inf, as with a sink of +inf, parts with a smaller one have no influence, and those with +inf have equal
    weights: with such a sink the output is 0 and the LSE +inf, as without parts.

    Args:
        outs: Outputs `[tokens, q_heads, v_head_dim]`, all of one floating-point type.
        lses: Their log-sum-exps `[tokens, q_heads]`, fp32, natural log, as `attend(..., lse=True)` returns them.
        out, lse: Buffers for the results. Default: new tensors.

    Returns:
        `(out, lse)`.

    Raises:
        ArgumentError: Shapes, types or devices differ, or a buffer shares memory with another tensor.

    Example:
        >>> import torch, quire
        >>> outs, lses = torch.tensor([1.0, 5.0]).view(2, 1, 1, 1), torch.zeros(2, 1, 1)
        >>> out, lse = quire.merge(list(outs), list(lses))
        >>> out.item(), round(lse.item(), 4)  # equal weights; log(2)
        (3.0, 0.6931)
    """
    _check_parts(outs, lses)
    _check_buffers(outs, lses, out, lse)
    parts = torch.stack(list(lses))
    total_lse = torch.logsumexp(parts, dim=0)
    # An infinite total has no difference to its parts: inf - inf is NaN.
    shares = torch.exp(parts - total_lse.masked_fill(total_lse.isinf(), 0.0))
    largest = parts == math.inf
    shares = torch.where(total_lse == math.inf, largest / largest.sum(dim=0).clamp(min=1), shares).unsqueeze(-1)
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
        raise ArgumentError("lses", f"{len(lses)} lses for {len(outs)} outs", "one LSE for each of one or more outs")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        if not _is_dense(out) or not out.is_floating_point() or out.dim() != 3:
            raise ArgumentError(f"outs[{i}]", describe(out), "a floating-point tensor [tokens, q_heads, v_head_dim]")
        if (out.shape, out.dtype, out.device) != (outs[0].shape, outs[0].dtype, outs[0].device):
            raise ArgumentError(f"outs[{i}]", describe(out), f"like outs[0]: {describe(outs[0])}")
        if not _is_dense(lse) or lse.dtype is not torch.float32 or lse.shape != out.shape[:2]:
            raise ArgumentError(f"lses[{i}]", describe(lse), f"float32{list(out.shape[:2])}, the tokens and heads of outs[{i}]")
        if lse.device != out.device:
            raise ArgumentError(f"lses[{i}]", describe(lse), f"on {out.device}, as outs[{i}]")


def _check_buffers(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Checks the buffers for the results: shapes and types, and that they share no memory."""
    named = {f"outs[{i}]": part for i, part in enumerate(outs)} | {f"lses[{i}]": part for i, part in enumerate(lses)}
    for name, buffer, like in (("out", out, outs[0]), ("lse", lse, lses[0])):
        if buffer is None:
            continue
        if not _is_dense(buffer) or (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
            raise ArgumentError(name, describe(buffer), f"a dense tensor like {name}s[0]: {describe(like)}")
        if overlaps_itself(buffer):
            given = f"strides {buffer.stride()} over {list(buffer.shape)}, which overlap"
            raise ArgumentError(name, given, "memory in which no two elements overlap")
        for other, tensor in named.items():
            if share_memory(buffer, tensor):
                raise ArgumentError(name, f"memory shared with {other}", "memory that no other tensor of the call uses")
        named[name] = buffer


def _is_dense(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
