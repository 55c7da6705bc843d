"""Write, then attend in full form: production order, in which the contract holds by construction."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from quire.attend import Launch, are_apart, choose_kernel, is_quick, is_traced, reads_elsewhere, remember, run
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level, enforce
from quire.kind import facts, of_batch, of_cache, of_options, read_by
from quire.options import PLAIN, Options
from quire.write import choose_writer, store


@overload
def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    out: torch.Tensor | None = ..., lse: Literal[False] = ..., kernel: str | None = ..., check: Level = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    out: torch.Tensor | None = ..., lse: Literal[True], kernel: str | None = ..., check: Level = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    out: torch.Tensor | None = None,
    lse: bool = False,
    kernel: str | None = None,
    check: Level = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`write(k, v, cache, batch)`, then `attend(q, cache, batch, options)`. Both are checked, and both kernels
    chosen, before anything is written. `kernel` names the attention kernel."""
    if is_traced(q):
        from quire import ops

        return ops.step(q, k, v, cache, batch, options, out, lse, kernel, check)
    options = options or PLAIN
    key = None
    quick = check == "auto" and is_quick(q, cache, batch) and cache.ledger is None and not reads_elsewhere(options, q)
    if quick and (out is None or are_apart(out, q, k, v, batch.given_slots, *read_by(cache, batch, options))):
        tensors = facts((q, k, v, out, batch.given_slots))
        key = (of_cache(cache), of_batch(batch), of_options(options), tensors, lse, kernel)
        bound = _bound.get(key)
        if bound is not None:
            bound[0](k, v, cache, batch, None)
            return run(bound[1], q, cache, batch, options, None, out, lse)
    enforce("step", Call(cache, batch, q, options, None, out, k, v), check)
    writer = choose_writer(k, v, cache, batch, None, None)
    launch = choose_kernel(q, cache, batch, options, None, out, lse, kernel, zero_padding=out is None)
    store(writer, k, v, cache, batch, None)
    result = run(launch, q, cache, batch, options, None, out, lse)
    remember(_bound, key, writer, launch)
    return result


_bound: dict[Any, tuple[Launch, ...]] = {}
