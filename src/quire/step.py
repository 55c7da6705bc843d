"""One step of a layer: write the new keys and values, then attend in full form."""

from __future__ import annotations

from typing import Literal, NoReturn, overload

import torch

from quire.attend import Result, is_traced
from quire.batch import Batch
from quire.cache.hadamard import transformed
from quire.cache.kv_cache import KVCache
from quire.cache.latent import Keys, rows_to_write
from quire.contract.call import Call
from quire.contract.check import Level, enforce
from quire.errors import ArgumentError
from quire.keywords import refuse_unknown
from quire.launch import audit, launcher_for
from quire.options import PLAIN, Options
from quire.rope import Rope
from quire.write import store


@overload
def step(
    q: torch.Tensor, k: Keys, v: torch.Tensor | None, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    out: torch.Tensor | None = ..., lse: Literal[False] = ..., rope: Rope | None = ...,
    positions: torch.Tensor | None = ..., kernel: str | None = ..., check: Level = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def step(
    q: torch.Tensor, k: Keys, v: torch.Tensor | None, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    out: torch.Tensor | None = ..., lse: Literal[True] | torch.Tensor, rope: Rope | None = ...,
    positions: torch.Tensor | None = ..., kernel: str | None = ..., check: Level = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def step(
    q: torch.Tensor,
    k: Keys,
    v: torch.Tensor | None,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    out: torch.Tensor | None = None,
    lse: bool | torch.Tensor = False,
    rope: Rope | None = None,
    positions: torch.Tensor | None = None,
    kernel: str | None = None,
    check: Level = "auto",
    **unknown: NoReturn,
) -> Result:
    """Writes the new keys and values to the cache, then computes attention over it: `write(k, v, cache, batch)`, then
    `attend(q, cache, batch, options)`. Both are checked, and both kernels chosen, before anything is written.

    Args:
        q, k, v: Queries `[tokens, q_heads, head_dim]`, and new keys and values `[tokens, kv_heads, dim]`, as in `quire.write`.
        cache, batch, options, out, lse, check: As in `quire.attend`.
        rope: How q and k are normalised and rotated in the launch that writes; q and k themselves are not changed.
        positions: With rope: as in `quire.write`. Default: `options.positions`, or those of the batch.
        kernel: The name of the attention kernel to use.

    Returns:
        `out`, or `(out, lse)`.

    Raises:
        ContractError, KernelError, ArgumentError, StaleBatch: As `quire.attend` and `quire.write`. Nothing was written.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=16)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64)
        >>> a, b = pool.sequence(), pool.sequence()
        >>> for counts in ({a: 5, b: 20}, {a: 1, b: 1}):  # a prefill step, then a decode step
        ...     batch = pool.step(counts)
        ...     q, k, v = torch.randn(sum(counts.values()), 12, 64, dtype=torch.bfloat16).split((8, 2, 2), dim=1)
        ...     print(quire.step(q, k, v, cache, batch).shape)
        torch.Size([25, 8, 64])
        torch.Size([2, 8, 64])
    """
    if unknown:
        refuse_unknown(step, unknown)
    if lse is None:
        raise ArgumentError("lse", None, "True, False or a tensor [tokens, q_heads] of fp32")
    q, (keys, values) = transformed("q", q, cache), rows_to_write(k, v, cache, rope)
    if is_traced(q):
        from quire import ops

        if rope is not None or positions is not None:
            return ops.rope_step(q, keys, values, cache, batch, options, out, lse, rope, positions, kernel, check)
        return ops.step(q, keys, values, cache, batch, options, out, lse, kernel, check)
    given = None if lse is True or lse is False else lse
    options = PLAIN if options is None else options
    call = Call(cache, batch, q, options, None, out, keys, values, lse=given, with_lse=lse is not False)
    call.rope, call.rope_positions = rope, positions
    return _written_and_attended(call, kernel, check)


def _written_and_attended(call: Call, kernel: str | None, check: Level) -> Result:
    if call.rope is not None:
        call.q_in = call.q
        if call.rope_positions is None and isinstance(call.options, Options):
            call.rope_positions = call.options.positions
    enforce("step", call, check)
    if call.q_in is not None:
        # The writer reads `q_in`; attention reads what it makes.
        call.q = call.q_out = torch.empty(call.q_in.shape, dtype=call.q_in.dtype, device=call.q_in.device)
    writer = launcher_for("write", call)
    launcher = launcher_for("attend", call, kernel)
    store(writer, call)
    if call.cache.ledger is not None:
        audit(call)
    launcher(call)
    return call.out if call.lse is None else (call.out, call.lse)  # type: ignore[return-value]
