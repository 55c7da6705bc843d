"""The ways to divide the attention of a model over GPUs, and what each costs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from quire.cache.format import FORMATS
from quire.plan.communication import CollectiveCost, all_gather, all_reduce, all_to_all
from quire.plan.counts import LayerShape, Lengths, PageShard, count
from quire.plan.machines import Cluster, allowed_counts
from quire.plan.models import LayerKind, ModelShape
from quire.plan.step_time import HBM, LATENCY, layer_time, write_bytes, write_time

Batch = Counter[tuple[int, int]]
"""(new tokens, context) of sequences, and how many have it. A large batch has few different ones."""
COMMUNICATION, CAPACITY = "communication", "capacity"
"""Limiting resources beside those of one GPU."""


GATHER, EXCHANGE, MERGED = "gather of queries", "exchange of partial results", "gather of merged outputs"
"""Collectives of ranks that share a sequence."""
DIVIDED_FROM = 1 << 20
"""Bytes of a partial result from which the ranks divide the merge, where every rank needs every head."""


class ParallelSplit(NamedTuple):
    """How GPUs share the work: heads over `tp`, pages of a sequence over `cp`, sequences over `dp`. Ranks of `tp` are neighbours,
    then those of `cp`."""

    tp: int
    cp: int
    dp: int

    @property
    def gpus(self) -> int:
        """The GPUs of one replica."""
        return self.tp * self.cp

    def __str__(self) -> str:
        return f"tp {self.tp} x cp {self.cp} x dp {self.dp}"


@dataclass(frozen=True)
class PlanJob:
    """What is planned: a model, a batch, GPUs."""

    model: ModelShape
    sequences: Lengths
    cluster: Cluster
    kv_format: str = "bf16"
    q_format: str = "bf16"
    page_size: int = 16
    memory_part: float = 0.9
    """The part of a GPU's memory for weights and cache."""
    whole_cache: bool = False
    """Whether layers with a window keep all tokens, as with one page table for all layers."""

    @cached_property
    def distinct(self) -> Batch:
        """How often each pair of lengths is in the batch."""
        return Counter(self.sequences)

    def layer(self, kind: LayerKind, tp: int = 1) -> LayerShape:
        """The attention of a layer on one GPU. With fewer key heads than ranks, several ranks have the same one."""
        model = self.model
        return LayerShape(
            model.q_heads // tp,
            max(1, model.kv_heads // tp),
            model.head_dim,
            self.page_size,
            self.q_format,
            self.kv_format,
            kind.window,
            model.features,
        )


@dataclass(frozen=True)
class SplitCost:
    """What a step costs with a split, on the GPU that takes the longest; all layers."""

    split: ParallelSplit
    parts: dict[str, float]
    """Seconds by resource: those of one GPU, and communication. Their sum is the time of the step."""
    collectives: dict[str, float]
    """Seconds of each collective."""
    bytes: int
    """Moved to and from the GPU's memory, by attention and by the write of new tokens."""
    flops: int
    sent: float
    """Bytes that the GPU sends to others."""
    kv_heads: int
    replication: int
    """GPUs of a replica that have the same keys."""
    weights: float
    """Bytes of weights on a GPU."""
    cache: float
    """Bytes of the cache of this batch on a GPU."""
    usable: float
    """Bytes of a GPU's memory for both."""
    most_sequences: int
    """Sequences of the batch's mean length that fit, in all replicas."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.weights + self.cache <= self.usable

    @property
    def limit(self) -> str:
        """The resource that takes the most time; the memory, if the batch does not fit."""
        return max(self.parts, key=self.parts.__getitem__) if self.fits else CAPACITY


def possible_splits(model: ModelShape, gpus: int) -> Iterator[ParallelSplit]:
    """Every split of so many GPUs: query heads are divided evenly, and key heads are divided or replicated evenly."""
    for tp in _divisors(gpus):
        even = not model.kv_heads % tp or not tp % model.kv_heads
        if model.q_heads % tp == 0 and even:
            for cp in _divisors(gpus // tp):
                yield ParallelSplit(tp, cp, gpus // tp // cp)


def all_costs(job: PlanJob) -> list[SplitCost]:
    """The cost of every split, those that fit first, the fastest first; among equals the one with fewer GPUs in a replica."""
    costs = [cost_of(job, split) for split in possible_splits(job.model, job.cluster.gpus)]
    return sorted(costs, key=lambda cost: (not cost.fits, cost.seconds, cost.split.gpus, cost.split.cp))


def cost_of(job: PlanJob, split: ParallelSplit) -> SplitCost:
    """The cost of one split: the time of its slowest replica, the memory of its fullest one."""
    slowest = max((_replica_cost(job, split, batch) for batch, _ in divided(job, split.dp)), key=lambda cost: cost.seconds)
    model = job.model
    heads = max(1, model.kv_heads // split.tp)
    memory = memory_of(job, split)
    return replace(slowest, kv_heads=heads, replication=heads * split.tp // model.kv_heads, **memory._asdict())


class MemoryUse(NamedTuple):
    """What one GPU has to hold: bytes of weights and of the batch's cache, those it can hold, and sequences of the batch's mean
    length that fit in all replicas."""

    weights: float
    cache: float
    usable: float
    most_sequences: int

    @property
    def fits(self) -> bool:
        return self.weights + self.cache <= self.usable


def memory_of(job: PlanJob, split: ParallelSplit) -> MemoryUse:
    """The memory of the fullest GPU."""
    holders = split.gpus if shares_weights(job.model, split) else split.tp
    weights, usable = job.model.weight_bytes / holders, job.cluster.machine.memory * job.memory_part
    fullest = max(_cache_bytes(job, split, batch) for batch, _ in divided(job, split.dp))
    mean = _cache_bytes(job, split, job.distinct) / len(job.sequences)
    return MemoryUse(weights, fullest, usable, int(max(0.0, usable - weights) // mean) * split.dp)


def _cache_bytes(job: PlanJob, split: ParallelSplit, batch: Batch) -> float:
    """Bytes of the cache of some sequences on one GPU."""
    return sum(
        kind.layers
        * job.layer(kind, split.tp).key_bytes
        * sum(times * kept_tokens(job, kind, one, split.cp) for one, times in batch.items())
        for kind in job.model.kinds
    )


def least_gpus(job: PlanJob) -> int | None:
    """The smallest number of such GPUs that a cluster can have and that holds the model and the batch; None if there is none."""
    usable = job.cluster.machine.memory * job.memory_part
    whole = job.model.weight_bytes + _cache_bytes(job, ParallelSplit(1, 1, 1), job.distinct)
    for gpus in allowed_counts(job.cluster.machine):
        # No split stores less than one copy of everything: this spares most numbers the search.
        if gpus * usable >= whole:
            other = replace(job, cluster=job.cluster._replace(gpus=gpus))
            if any(memory_of(other, split).fits for split in possible_splits(job.model, gpus)):
                return gpus
    return None


def divided(job: PlanJob, replicas: int) -> tuple[tuple[Batch, int], ...]:
    """The different batches of replicas, and how many replicas have each: the sequence that takes the longest first, each to the
    replica with the least until then."""
    machine, layer = job.cluster.machine, job.layer(LayerKind(1, None))

    def load(one: tuple[int, int]) -> float:
        """Seconds of a sequence in a layer without a window at the published limits."""
        new, context = one
        pairs = new * (2 * context + new + 1) // 2
        return (new + context) * layer.key_bytes / machine.bandwidth + pairs * layer.pair_flops / machine.flops

    runs = sorted(((load(one), one, times) for one, times in job.distinct.items()), key=lambda run: run[0], reverse=True)
    return _balanced(tuple(runs), replicas)


@lru_cache(maxsize=1024)
def _balanced(runs: tuple[tuple[float, tuple[int, int], int], ...], replicas: int) -> tuple[tuple[Batch, int], ...]:
    """Divides runs of (load, lengths, how many sequences). Splits with equally many replicas share the result."""
    loads = [(0.0, i) for i in range(replicas)]
    found: list[Batch] = [Counter() for _ in range(replicas)]
    for load, one, times in runs:
        while times:
            if times >= replicas and max(loads)[0] - loads[0][0] < load:  # from here on, each replica in turn gets one
                rounds, times = divmod(times, replicas)
                loads = [(least + rounds * load, i) for least, i in loads]
                for batch in found:
                    batch[one] += rounds
                heapq.heapify(loads)
            steps = min(times, replicas)
            for _ in range(steps):
                least, i = loads[0]
                found[i][one] += 1
                heapq.heapreplace(loads, (least + load, i))
            times -= steps
    equal = Counter(frozenset(batch.items()) for batch in found)
    different = {frozenset(batch.items()): batch for batch in found}
    return tuple((batch, equal[items]) for items, batch in different.items())


def _replica_cost(job: PlanJob, split: ParallelSplit, batch: Batch) -> SplitCost:
    parts: dict[str, float] = {}
    collectives: dict[str, float] = {}
    moved = flops = 0
    sent = 0.0
    tokens = sum(new * times for (new, _), times in batch.items())
    for kind in job.model.kinds:
        layer = job.layer(kind, split.tp)
        shard = _busiest(layer, batch, split.cp)
        time, counts = layer_time(layer, batch, job.cluster.machine, shard), count(layer, batch, shard)
        stored = -(-tokens // split.cp)
        write = write_time(layer, stored, job.cluster.machine)
        _add(parts, time.limit, kind.layers * time.work)
        _add(parts, LATENCY, kind.layers * time.latency)
        _add(parts, HBM, kind.layers * write)
        for collective in layer_collectives(job, split, tokens):
            seconds = collective.seconds(job.cluster) if tokens else 0.0
            _add(parts, COMMUNICATION, kind.layers * seconds)
            _add(collectives, collective.name, kind.layers * seconds)
            sent += kind.layers * collective.sent
        moved += kind.layers * (counts.bytes + write_bytes(layer, stored))
        flops += kind.layers * counts.flops
    return SplitCost(split, parts, collectives, moved, flops, sent, 0, 1, 0.0, 0.0, 0.0, 0)


def shares_weights(model: ModelShape, split: ParallelSplit) -> bool:
    """Whether all GPUs of a replica divide the projections. Otherwise only those of `tp` do, and each rank of `cp` has a copy."""
    return model.q_heads % split.gpus == 0


def layer_collectives(job: PlanJob, split: ParallelSplit, tokens: int) -> list[CollectiveCost]:
    """The collectives of one layer: the result of the output projection is summed over the GPUs that divide it; ranks that share a
    sequence exchange partial results, outputs and log-sum-exp in fp32, as `quire.distributed` does."""
    shared = shares_weights(job.model, split)
    ranks = split.gpus if shared else split.tp
    found = [all_reduce(tokens * job.model.hidden * 2, ranks, ranks, "all-reduce of the output projection")]
    if split.cp == 1:
        return found
    heads = tokens * job.model.q_heads // split.tp
    outputs, lses = 4 * heads * job.model.head_dim, 4 * heads
    group = split.cp, split.gpus
    if shared:  # each rank has the queries of its own heads, and needs the results of these alone
        queries = heads * job.model.head_dim * FORMATS[job.q_format].itemsize
        return [*found, all_gather(queries, *group, GATHER), all_to_all(outputs + lses, *group, EXCHANGE)]
    if outputs + lses < DIVIDED_FROM:
        return [*found, all_gather((outputs + lses) * split.cp, *group, EXCHANGE)]
    divided_merge = (all_gather(lses * split.cp, *group, EXCHANGE), all_to_all(outputs, *group, EXCHANGE))
    return [*found, *divided_merge, all_gather(outputs // 2, *group, MERGED)]


def kept_tokens(job: PlanJob, kind: LayerKind, lengths: tuple[int, int], cp: int) -> int:
    """Tokens of a sequence that a GPU keeps in a layer: whole pages, the most of any rank."""
    new, context = lengths
    first = 0
    if kind.window is not None and not job.whole_cache:
        first = max(0, context + 1 - kind.window)
    pages = -(-(new + context) // job.page_size) - first // job.page_size
    return -(-pages // cp) * job.page_size


def _busiest(layer: LayerShape, batch: Batch, cp: int) -> PageShard:
    """The rank with the most keys to read, the first of several. Without a window it is the first: no rank has more pages, and only
    the last page may be incomplete."""
    if cp == 1 or layer.window is None:
        return PageShard(0, cp)
    keys, size = np.zeros(cp, dtype=np.int64), layer.page_size
    for (new, context), times in batch.items():
        if new:
            first, end = max(0, context + 1 - layer.window), new + context
            pages = np.arange(first // size, -(-end // size), dtype=np.int64)
            seen = np.minimum((pages + 1) * size, end) - np.maximum(pages * size, first)
            np.add.at(keys, pages % cp, times * seen)
    return PageShard(int(keys.argmax()), cp)


def _add(into: dict[str, float], name: str, seconds: float) -> None:
    into[name] = into.get(name, 0.0) + seconds


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]
