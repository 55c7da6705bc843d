"""Which kernel a call gets, why, why not the others, and what to change to get a better one."""

from __future__ import annotations

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.contract.call import Call
from quire.contract.check import enforce_static
from quire.dispatch.choose import choose
from quire.dispatch.decision import Decision
from quire.options import PLAIN, Options
from quire.platform import Platform
from quire.problem import Extent, Problem


def explain(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options | None = None,
    *,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    lse: bool = False,
    platform: Platform | None = None,
) -> Decision:
    """The decision that `attend` would make for this call, here or on another `platform`. Nothing is computed, no value is read; a
    call that `attend` would refuse for its shapes, types or options is refused here too."""
    enforce_static("explain", Call(cache, batch, q, options or PLAIN, new, out))
    problem = Problem.of(q, cache, batch, options, new=new, out=out, lse=lse)
    return choose(problem, Extent.of(q, cache, batch), Platform.detect(q.device) if platform is None else platform)
