"""Write, then attend in full form: production order, in which the contract holds by construction."""

from __future__ import annotations

from typing import Literal, overload

import torch

from quire.attend import Result, is_traced, run
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level, enforce
from quire.errors import ArgumentError
from quire.launch import launcher_for
from quire.options import PLAIN, Options
from quire.write import store


@overload
def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    out: torch.Tensor | None = ..., lse: Literal[False] = ..., kernel: str | None = ..., check: Level = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, options: Options | None = ..., *,
    out: torch.Tensor | None = ..., lse: Literal[True] | torch.Tensor, kernel: str | None = ..., check: Level = ...,
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
    lse: bool | torch.Tensor = False,
    kernel: str | None = None,
    check: Level = "auto",
) -> Result:
    """`write(k, v, cache, batch)`, then `attend(q, cache, batch, options)`. Both are checked, and both kernels
    chosen, before anything is written. `kernel` names the attention kernel."""
    if lse is None:
        raise ArgumentError("lse", None, "True, False or a tensor [tokens, q_heads] of fp32")
    if is_traced(q):
        from quire import ops

        return ops.step(q, k, v, cache, batch, options, out, lse, kernel, check)
    given = None if lse is True or lse is False else lse
    call = Call(cache, batch, q, PLAIN if options is None else options, None, out, k, v, lse=given, with_lse=lse is not False)
    enforce("step", call, check)
    writer = launcher_for("write", call)
    launcher = launcher_for("attend", call, kernel)
    store(writer, call)
    return run(launcher, call)
