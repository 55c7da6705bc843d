"""The operator: check the call, choose a kernel, launch it."""

from __future__ import annotations

from typing import Literal, overload

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level
from quire.dispatch.kernel import Launcher
from quire.errors import ArgumentError
from quire.launch import audit_launcher, launcher_for
from quire.options import PLAIN, Options
from quire.problem import default_out_dtype

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@overload
def attend(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    new: tuple[torch.Tensor, torch.Tensor] | None = ..., out: torch.Tensor | None = ..., lse: Literal[False] = ...,
    kernel: str | None = ..., check: Level = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attend(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    new: tuple[torch.Tensor, torch.Tensor] | None = ..., out: torch.Tensor | None = ..., lse: Literal[True] | torch.Tensor,
    kernel: str | None = ..., check: Level = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def attend(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    lse: bool | torch.Tensor = False,
    kernel: str | None = None,
    check: Level = "auto",
) -> Result:
    """Attention of the new tokens of every sequence of a mixed batch over its pages.

        q     [tokens, q_heads, head_dim]       fp32, fp16, bf16, or fp8 with Options(q_scale=...)
        new   (k, v), [tokens, kv_heads, dim]   context form: the cache holds only what came before the new tokens; without it,
                                                full form, the cache holds every token
        out   [tokens, q_heads, v_head_dim]     where to write; by default a new tensor, zero in padding rows, of q's type (bf16 for
                                                fp8 queries); under Options(out_scale=...) of q's fp8 type, e4m3fn for other queries
        lse   True, or fp32 [tokens, q_heads]   returns the natural-log LSE too, in a new tensor or in the one given

    Returns `out`, or `(out, lse)`. `kernel` forces a kernel by name or raises. `check="full"` reads values on any device, not only
    in host memory.

    >>> import quire
    >>> pool = quire.PagePool(pages=8, page_size=16)
    >>> cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
    >>> batch = pool.step({pool.sequence(): 5})
    >>> q, k, v = torch.randn(5, 12, 64, dtype=torch.bfloat16).split((8, 2, 2), dim=1)
    >>> quire.write(k, v, cache, batch)
    >>> quire.attend(q, cache, batch).shape
    torch.Size([5, 8, 64])
    """
    if lse is None:
        raise ArgumentError("lse", None, "True, False or a tensor [tokens, q_heads] of fp32")
    if (torch.compiler.is_dynamo_compiling() or type(q) is not torch.Tensor) and is_traced(q):
        from quire import ops

        return ops.attend(q, cache, batch, options, new, out, lse, kernel, check)
    given = None if lse is True or lse is False else lse
    call = Call(cache, batch, q, PLAIN if options is None else options, new, out, lse=given, with_lse=lse is not False)
    return run(launcher_for("attend", call, kernel, check, checked=False), call)


def run(launcher: Launcher, call: Call) -> Result:
    """Launches, into new tensors if none were given: the launcher fills their padding rows with zeros."""
    q, cache = call.q, call.cache
    assert q is not None
    if call.out is None:
        dtype = q.dtype
        if dtype.itemsize == 1 or call.options.out_scale is not None:
            dtype = default_out_dtype(dtype, call.options.out_scale is not None)
        call.out = torch.empty((q.shape[0], q.shape[1], cache.v_head_dim), dtype=dtype, device=q.device)
        call.zero_padding = True
    if call.with_lse and call.lse is None:
        call.lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if cache.ledger is not None:
        audit = audit_launcher(call)
        if audit is not None:
            audit(call)
    launcher(call)
    return call.out if call.lse is None else (call.out, call.lse)


def is_traced(rows: torch.Tensor) -> bool:
    """True under torch.compile and with fake tensors: the call then becomes an operator of the graph. An operator that is run while
    torch compiles, here or in another thread, has real tensors."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return type(rows) is not torch.Tensor and (torch.compiler.is_compiling() or hasattr(rows, "fake_mode"))
