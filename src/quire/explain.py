"""Which kernel a call gets, why, why not the others, and what to change to get a better one."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import enforce_static
from quire.dispatch.choose import choose
from quire.dispatch.decision import Decision
from quire.dispatch.kernel import OneOf
from quire.errors import ArgumentError, describe
from quire.launch import described
from quire.options import PLAIN, Options
from quire.platform import Platform
from quire.problem import is_fp8

OPERATIONS = ("attend", "write", "step", "audit")


def explain(
    q: torch.Tensor | None,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    lse: bool | torch.Tensor = False,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    operation: str = "attend",
    platform: Platform | None = None,
) -> Decision:
    """The decision that an operation would make for this call, here or on another `platform`. Nothing is computed and no value is
    read: tensors of torch's meta device will do. What the operation would refuse for its shapes, types or options is refused.

    `operation` is attend, write, step or audit. A write and a step are explained for `k` and `v`, by default contiguous tensors of
    q's type (bf16 for fp8 queries); a write of `k` and `v` needs no q. `Decision.compiled` has a key
    for each kernel that the operation needs: those of a step include its write's."""
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise ArgumentError("operation", describe(operation), str(OneOf(OPERATIONS)))
    if not isinstance(cache, KVCache):
        raise ArgumentError("cache", describe(cache), "a quire.KVCache")
    if platform is not None and not isinstance(platform, Platform):
        raise ArgumentError("platform", describe(platform), "a quire.Platform, or None for the device of q")
    if not isinstance(lse, (bool, torch.Tensor)):
        raise ArgumentError("lse", describe(lse), "True, False or a tensor")
    options = PLAIN if options is None else options
    given = lse if isinstance(lse, torch.Tensor) else None
    if operation in ("write", "step") and k is None and v is None and isinstance(q, torch.Tensor) and q.dim() == 3:
        dtype = torch.bfloat16 if is_fp8(q.dtype) else q.dtype
        k, v = (q.new_empty((q.shape[0], cache.kv_heads, dim), dtype=dtype) for dim in (cache.head_dim, cache.v_head_dim))
    if operation == "write":
        call = Call(cache, batch, k=k, v=v, slots=slots)
    else:
        call = Call(cache, batch, q, options, new, out, k, v, slots, lse=given, with_lse=lse is not False)
    enforce_static("write" if operation == "write" else "explain", call)
    platform = Platform.detect(cache.device) if platform is None else platform
    needed = {"step": ("write", "attend")}.get(operation, (operation,))
    if cache.ledger is not None and "attend" in needed:
        needed = (*needed, "audit")
    decisions = {one: choose(*described(one, call), platform, operation=one) for one in needed}
    first = decisions["attend" if operation == "step" else operation]
    return replace(first, operation=operation, beside=tuple(d for one, d in decisions.items() if d is not first))
