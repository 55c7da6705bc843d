"""One call of context parallelism: its arguments, checked, and how its result is stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.attend import Result, attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.memory import overlaps_itself
from quire.contract.check import Level
from quire.contract.rule import Violation
from quire.distributed.agreement import CommonFact
from quire.distributed.call_order import Place
from quire.errors import ArgumentError, ContractError, describe
from quire.options import Options
from quire.problem import default_out_dtype, is_fp8

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class LayerPlan(NamedTuple):
    """What follows from the options of a layer."""

    partial: Options
    """The options of this rank's partial result: the sink is in that of rank 0, and `out_scale` applies to the merged result."""
    facts: dict[str, CommonFact]


class ContextCall(NamedTuple):
    """The arguments of one call."""

    q: torch.Tensor
    cache: KVCache
    batch: Batch
    options: Options
    plan: LayerPlan
    facts: dict[str, CommonFact]
    place: Place
    header: torch.Tensor
    dtype: torch.dtype
    """Of the result."""
    out: torch.Tensor | None
    lse: bool | torch.Tensor
    check: Level

    def attend_to_own_keys(self, q: torch.Tensor, batch: Batch, out: torch.Tensor, lse: torch.Tensor, kernel: str | None) -> None:
        """The partial result of some rows over the keys of this rank."""
        attend(q, self.cache, batch, self.plan.partial, out=out, lse=lse, kernel=kernel, check=self.check)
        exclude_padding(lse, batch)

    def finished(self, out: torch.Tensor) -> torch.Tensor:
        """The merged output, fp32, in the type of the result."""
        if self.options.out_scale is not None:
            largest = torch.finfo(self.dtype).max
            out = (out / self.options.out_scale).clamp(-largest, largest)
        return out.to(self.dtype)


def checked_arguments(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    out: torch.Tensor | None,
    lse: bool | torch.Tensor,
    shard: tuple[int, int, int],
) -> torch.dtype:
    """Checks what `quire.attend` does not see: the shard, and the buffers of the results. Returns the type of the output."""
    for name, value, kind in (
        ("q", q, torch.Tensor),
        ("cache", cache, KVCache),
        ("batch", batch, Batch),
        ("options", options, Options),
    ):
        if not isinstance(value, kind):
            raise ArgumentError(name, describe(value), f"a {kind.__name__}")
    given = (0, 1, shard[2]) if batch.shard is None else tuple(batch.shard)  # without a shard, one rank holds all keys
    if given != shard:
        shown = "no shard" if batch.shard is None else f"shard={given}"
        raise ArgumentError("batch", shown, f"shard={shard}: make it, or its PagePool, with shard=cp.shard")
    if batch.select is not None:
        raise ArgumentError("batch", "a selection", "a batch without one: ranks hold different keys")
    if q.dim() != 3 or not q.shape[1]:
        raise ArgumentError("q", describe(q), "[tokens, q_heads, head_dim]")
    if q.requires_grad and torch.is_grad_enabled():
        # quire.attend would not see it with split_heads: what is received has no history.
        allowed = "inference only: call under torch.no_grad() or detach it"
        raise ContractError("attend", [Violation("shapes", "q", "a tensor that requires grad", allowed)])
    if out is not None:
        _check_out(out, (*q.shape[:2], cache.v_head_dim), q.device, options)
    if not isinstance(lse, bool):
        fits = isinstance(lse, torch.Tensor) and lse.dtype is torch.float32 and lse.shape == q.shape[:2]
        if not fits or lse.device != q.device or overlaps_itself(lse):
            raise ArgumentError("lse", describe(lse), f"True, False or float32{list(q.shape[:2])} on {q.device}, no overlaps")
    return default_out_dtype(q.dtype, options.out_scale is not None) if out is None else out.dtype


def _check_out(out: torch.Tensor, shape: tuple[int, ...], device: torch.device, options: Options) -> None:
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != shape or out.device != device or overlaps_itself(out):
        raise ArgumentError("out", describe(out), f"[tokens, q_heads, v_head_dim] = {list(shape)} on {device}, no overlaps")
    if is_fp8(out.dtype) != (options.out_scale is not None) or not (is_fp8(out.dtype) or out.dtype in TYPES):
        raise ArgumentError("out", describe(out), "float32, float16 or bfloat16; fp8 with out_scale, and only with it")


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def exclude_padding(lse: torch.Tensor, batch: Batch) -> None:
    """Gives padding rows an LSE of -inf, so that they are merged to zeros whatever they hold."""
    if is_on_host(lse):
        lse[int(batch.q_starts[-1]) :] = -torch.inf
    else:
        lse.masked_fill_(torch.arange(lse.shape[0], device=lse.device)[:, None] >= batch.q_starts[-1], -torch.inf)


def stored(call: ContextCall, out: torch.Tensor, lse: torch.Tensor) -> Result:
    """Stores the result in the buffers of the caller. Padding rows of `out` are not written, and those of the LSE are 0."""
    tokens, end = call.q.shape[0], call.batch.q_starts[-1]
    live = torch.arange(tokens, device=out.device) < end
    lse = lse.masked_fill(~live[:, None], 0.0)
    if call.out is not None:
        if is_on_host(out):
            call.out[: int(end)] = out[: int(end)]
        else:
            # As integers of the same size: torch.where does not know every type.
            kind = (torch.uint8, torch.int16, torch.int32)[(1, 2, 4).index(out.dtype.itemsize)]
            call.out.view(kind).copy_(torch.where(live[:, None, None], out.view(kind), call.out.view(kind)))
        out = call.out
    if call.lse is False:
        return out
    return out, lse if call.lse is True else call.lse.copy_(lse)
