"""Write, then attend in full form: production order, in which the contract holds by construction."""

from __future__ import annotations

from typing import Literal, overload

import torch

from quire.attend import choose_kernel, run
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import Level, enforce
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
    options = options or PLAIN
    enforce("step", Call(cache, batch, q, options, None, out, k, v), check)
    writer = choose_writer(k, cache, batch, None)
    launch = choose_kernel(q, cache, batch, options, None, out, lse, kernel)
    store(writer, k, v, cache, batch, None)
    return run(launch, q, cache, batch, options, None, out, lse)
