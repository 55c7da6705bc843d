"""The attention operator: checks the call, chooses a kernel and launches it."""

from __future__ import annotations

from typing import Literal, NoReturn, overload

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.latent import as_read
from quire.contract.call import Call
from quire.contract.check import Level
from quire.errors import ArgumentError
from quire.keywords import refuse_unknown
from quire.launch import audit, launcher_for
from quire.options import PLAIN, Options

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@overload
def attend(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    new: tuple[torch.Tensor, torch.Tensor | None] | None = ..., out: torch.Tensor | None = ..., lse: Literal[False] = ...,
    kernel: str | None = ..., check: Level = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attend(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    new: tuple[torch.Tensor, torch.Tensor | None] | None = ..., out: torch.Tensor | None = ..., lse: Literal[True] | torch.Tensor,
    kernel: str | None = ..., check: Level = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def attend(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    out: torch.Tensor | None = None,
    lse: bool | torch.Tensor = False,
    kernel: str | None = None,
    check: Level = "auto",
    **unknown: NoReturn,
) -> Result:
    """Computes attention of the new tokens of every sequence over the sequence's keys and values in a paged cache.

    Args:
        q: Queries `[tokens, q_heads, head_dim]`, fp32, fp16, bf16, or fp8 with `Options(q_scale=...)`. Any strides are allowed.
        cache, batch: The layer's keys and values, and the sequences. Rows of q from `batch.q_starts[-1]` on are padding.
        options: Window, softmax options, masks and scales of the layer. Default: causal attention with scale `head_dim ** -0.5`.
        new: The new keys and values `(k, v)`, `[tokens, kv_heads, dim]`; `(k, None)` if V is a part of K. If given, the cache holds
            only the tokens before the new ones (context form). Default: the cache holds all tokens (full form).
        out: The output buffer `[tokens, q_heads, v_head_dim]`; padding rows are not written. Default: a new tensor with zeros in
            padding rows, of q's type (bf16 for fp8 queries); with `Options(out_scale=...)` of q's fp8 type, or OCP fp8.
        lse: True, or an fp32 buffer `[tokens, q_heads]`, to also return the log-sum-exp of the logits (natural log).
        kernel: The name of a kernel to use. Default: the first kernel of the catalogue that can run the call.
        check: "auto" checks shapes and types, and values in host memory. "full" also checks values on a GPU.

    Returns:
        `out`, or `(out, lse)`. A query that sees no key gives zeros and an LSE of -inf (with a sink: the sink).

    Raises:
        ContractError, KernelError: The call violates the contract, or no kernel (or not the one requested) can run it.
        ArgumentError, StaleBatch: An argument has the wrong class, or the pool has changed since the batch was made.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=16)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
        >>> batch = pool.step({pool.sequence(): 5})
        >>> q, k, v = torch.randn(5, 12, 64, dtype=torch.bfloat16).split((8, 2, 2), dim=1)
        >>> quire.write(k, v, cache, batch)
        >>> quire.attend(q, cache, batch).shape
        torch.Size([5, 8, 64])
    """
    if unknown:
        refuse_unknown(attend, unknown)
    if lse is None:
        raise ArgumentError("lse", None, "True, False or a tensor [tokens, q_heads] of fp32")
    given = None if lse is True or lse is False else lse
    q, new = (q, new) if new is None and not getattr(cache, "hadamard", False) else as_read(q, new, cache)
    if (torch.compiler.is_dynamo_compiling() or type(q) is not torch.Tensor) and is_traced(q):
        from quire import ops

        return ops.attend(q, cache, batch, options, new, out, lse, kernel, check)
    call = Call(cache, batch, q, PLAIN if options is None else options, new, out, lse=given, with_lse=lse is not False)
    launcher = launcher_for("attend", call, kernel, check, checked=False)
    if cache.ledger is not None:
        audit(call)
    launcher(call)
    return call.out if call.lse is None else (call.out, call.lse)  # type: ignore[return-value]


def is_traced(rows: torch.Tensor) -> bool:
    """True under torch.compile and with fake tensors: the call then becomes an operator of the graph. A call with real tensors
    while torch compiles, here or in another thread, is not traced."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return type(rows) is not torch.Tensor and (torch.compiler.is_compiling() or hasattr(rows, "fake_mode"))
