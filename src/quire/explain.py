"""Explains which kernel a call uses, and why the others cannot run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.latent import Keys, as_read, rows_to_write
from quire.contract.call import Call
from quire.contract.check import enforce_static
from quire.dispatch.choose import choose
from quire.dispatch.decision import Decision
from quire.dispatch.kernel import OneOf
from quire.errors import ArgumentError, describe
from quire.keywords import with_pointers
from quire.launch import described
from quire.options import PLAIN, Options
from quire.platform import Platform
from quire.problem import is_fp8
from quire.rope import Rope

OPERATIONS = ("attend", "write", "step", "audit")


@with_pointers
def explain(
    q: torch.Tensor | None,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    out: torch.Tensor | None = None,
    lse: bool | torch.Tensor = False,
    k: Keys | None = None,
    v: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    rope: Rope | None = None,
    positions: torch.Tensor | None = None,
    operation: str = "attend",
    platform: Platform | None = None,
) -> Decision:
    """Explains which kernel an operation would use for a call, here or on another platform. Nothing is computed and no value is
    read: tensors on torch's meta device are enough.

    Args:
        q, cache, batch, options, new, out, lse: The arguments of `quire.attend`. `q` may be None for a write.
        k, v, slots, rope, positions: The arguments of `quire.write`. Default: contiguous k and v of q's type (bf16 for fp8
            queries).
        operation: "attend", "write", "step" or "audit".
        platform: The machine to explain the choice for, for example `quire.Platform.named("sm90")`. Default: that of the cache.

    Returns:
        A `quire.Decision`: the chosen kernel, and for each other kernel why it was refused and what to change. Print it.

    Raises:
        ContractError: Shapes, types or options violate the contract, so that the operation would raise too.
        ArgumentError: An argument has the wrong class.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=16)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
        >>> batch = pool.step({pool.sequence(): 5})
        >>> decision = quire.explain(torch.zeros(5, 8, 64, dtype=torch.bfloat16), cache, batch)
        >>> decision.because
        'it is the first whose limits all hold'
    """
    _check_arguments(operation, cache, lse, platform)
    keys, values = _new_rows(operation, q, k, v, cache)
    q, given = as_read(q, new, cache)
    if operation == "write":
        call = Call(cache, batch, k=keys, v=values, slots=slots)
    else:
        buffer = lse if isinstance(lse, torch.Tensor) else None
        options = PLAIN if options is None else options
        call = Call(cache, batch, q, options, given, out, keys, values, slots, lse=buffer, with_lse=lse is not False)
    call.rope, call.q_in, call.rope_positions = rope, None if rope is None else q, positions
    return decide(operation, call, Platform.detect(cache.device) if platform is None else platform)


def _new_rows(operation: str, q: Any, k: Any, v: Any, cache: KVCache) -> tuple[Any, Any]:
    """What a write stores: from k and v or, by default, contiguous rows for those of q."""
    if k is not None or v is not None:
        return rows_to_write(k, v, cache)
    if operation not in ("write", "step") or not isinstance(q, torch.Tensor) or q.dim() != 3:
        return None, None
    dtype = torch.bfloat16 if is_fp8(q.dtype) else q.dtype
    first, second = (q.new_empty((q.shape[0], cache.kv_heads, dim), dtype=dtype) for dim in cache.written_dims)
    return first, second


def decide(operation: str, call: Call, platform: Platform) -> Decision:
    """The decision for an operation, with those for the other kernels that it launches in `related`."""
    enforce_static("write" if operation == "write" else "explain", call)
    needed = {"step": ("write", "attend")}.get(operation, (operation,))
    if call.cache.ledger is not None and "attend" in needed:
        needed = (*needed, "audit")
    decisions = {one: choose(*described(one, call), platform, operation=one) for one in needed}
    first = decisions["attend" if operation == "step" else operation]
    return replace(first, operation=operation, related=tuple(d for one, d in decisions.items() if d is not first))


def _check_arguments(operation: str, cache: KVCache, lse: bool | torch.Tensor, platform: Platform | None) -> None:
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise ArgumentError("operation", describe(operation), str(OneOf(OPERATIONS)))
    if not isinstance(cache, KVCache):
        raise ArgumentError("cache", describe(cache), "a quire.KVCache")
    if platform is not None and not isinstance(platform, Platform):
        raise ArgumentError("platform", describe(platform), "a quire.Platform, or None for the device of the cache")
    if not isinstance(lse, (bool, torch.Tensor)):
        raise ArgumentError("lse", describe(lse), "True, False or a tensor")
