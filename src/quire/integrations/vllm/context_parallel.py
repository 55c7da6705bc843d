"""Decode context parallelism: the pages of a sequence are distributed over the ranks of a group. Each rank attends with the queries
of all ranks to the keys that it holds, and the partial results are combined by their LSE. New tokens are in the cache already, so
prefill and decode are the same call."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from vllm.distributed.parallel_state import get_dcp_group

from quire.attend import attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.options import Options


def sharded_options(options: Options) -> Options:
    """The options for the queries of all ranks. Slopes and sinks are those of all heads; a sink counts once, on the first rank."""
    group = get_dcp_group()
    alibi, sinks = (None if t is None else group.all_gather(t.detach().contiguous(), dim=0) for t in (options.alibi, options.sinks))
    return replace(options, alibi=alibi, sinks=sinks if group.rank_in_group == 0 else None)


def attend_sharded(q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, out: torch.Tensor) -> None:
    """Writes the attention of this rank's heads over the keys of all ranks to `out`.

    Args:
        q: This rank's queries `[tokens, heads, head_size]`.
        cache, batch: This rank's pages; the batch has a shard.
        options: As `sharded_options` makes them.
        out: `[tokens, heads, head_size]`.
    """
    group = get_dcp_group()
    every = group.all_gather(q.contiguous(), dim=1)
    partial, lse = attend(every, cache, batch, options, lse=True)
    lses = group.all_gather(lse.unsqueeze(0), dim=0)
    total = torch.logsumexp(lses, dim=0)
    share = torch.exp(lse - total.masked_fill(total == -math.inf, 0.0)).unsqueeze(-1)
    # A partial result without keys has a share of 0.
    weighted = torch.where(share == 0, 0.0, partial.float() * share).to(out.dtype)
    out.copy_(group.reduce_scatter(weighted, dim=1))
