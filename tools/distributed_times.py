"""Times of context parallelism on this machine: how partial results are exchanged, and whether chunks pay. Start it with

    torchrun --nproc-per-node 2 tools/distributed_times.py

Each number is the first decile of 40 runs in ms, of rank 0; all variants of a row are measured in turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import quire
from quire.distributed import ContextParallel
from quire.distributed.agreement import HEADER
from quire.distributed.exchange import DividedExchange, GatherExchange, PartialShape
from quire.distributed.group import RankGroup

RUNS = 40
CHUNKS = (1, 2, 4)
BATCHES = {
    "decode 64 x 4k": (64, 1, 4096),
    "decode 8 x 32k": (8, 1, 32768),
    "decode 256 x 512": (256, 1, 512),
    "prefill 512 of 4k": (1, 512, 4096),
    "prefill 2048 of 2k": (1, 2048, 2048),
}
"""Sequences, new tokens of each, and tokens of each."""


def times(variants: dict[str, Callable[[], object]]) -> str:
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(RUNS):
        for name, variant in variants.items():
            dist.barrier()
            begin = time.perf_counter()
            variant()
            found[name].append(time.perf_counter() - begin)
    return ", ".join(f"{name} {sorted(all_times)[RUNS // 10] * 1e3:.2f}" for name, all_times in found.items())


def exchanged(group: RankGroup, kind: type[GatherExchange] | type[DividedExchange], tokens: int) -> None:
    exchange = kind(group, PartialShape(tokens, 32, 128, torch.float32, torch.device("cpu")), lambda out: out.bfloat16())
    exchange.out.fill_(1)
    exchange.lse.fill_(0)
    exchange.start()
    exchange.finish()


def batch_times(seqs: int, new: int, kv: int) -> str:
    """A layer with 8 query heads, 2 KV heads and a head of 128, in bf16."""
    every = {chunks: ContextParallel(chunks=chunks) for chunks in CHUNKS}
    own = {chunks: ContextParallel(chunks=chunks, split_heads=True) for chunks in CHUNKS}
    pool = quire.PagePool(pages=seqs * (kv // 16 // dist.get_world_size() + 2), page_size=16, shard=every[1].shard)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=128)
    cache.k.normal_()
    cache.v.normal_()
    sequences = [pool.sequence() for _ in range(seqs)]
    pool.step(dict.fromkeys(sequences, kv - new))
    batch = pool.step(dict.fromkeys(sequences, new))
    q = torch.randn(seqs * new, 8, 128).bfloat16()
    mine = q[:, : 8 // dist.get_world_size()].contiguous()
    variants = {"without ranks": partial(quire.attend, q, cache, batch, out=torch.empty(q.shape), lse=True)}
    variants |= {f"chunks={n}": partial(cp.attend, q, cache, batch) for n, cp in every.items()}
    variants |= {f"split_heads chunks={n}": partial(cp.attend, mine, cache, batch) for n, cp in own.items()}
    return times(variants)


torch.set_num_threads(1)
dist.init_process_group("gloo")
group = RankGroup(None, 60)
lines = [f"header: {times({'': lambda: group.all_gather(torch.zeros(HEADER, dtype=torch.int64)).wait()})}"]
for tokens in (1, 4, 16, 64, 256, 1024):
    kinds = {"gather": GatherExchange, "divided": DividedExchange}
    variants = {name: partial(exchanged, group, kind, tokens) for name, kind in kinds.items()}
    lines.append(f"{tokens * 32 * 132 * 4 / 2**20:.2f} MiB: {times(variants)}")
lines += [f"{name}: {batch_times(*sizes)}" for name, sizes in BATCHES.items()]
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks on {os.cpu_count()} cores, ms", *lines, sep="\n")
dist.destroy_process_group()
