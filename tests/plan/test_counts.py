"""Bytes and FLOPs of a plan against a count that enumerates every query and every key."""

from __future__ import annotations

import itertools
import random

import pytest

from quire.bench.workloads import CUDA_WORKLOADS
from quire.plan.counts import LayerShape, PageShard, count

LAYER = LayerShape(q_heads=4, kv_heads=2, head_dim=8, page_size=4)


def enumerated(layer: LayerShape, sequences: list[tuple[int, int]], shard: PageShard) -> tuple[int, int]:
    """(keys, pairs): the query at position p sees key j if p - window < j <= p, on the rank that has page j // page_size."""
    keys = pairs = 0
    for new, context in sequences:
        seen = set()
        for p in range(context, context + new):
            for j in range(p + 1):
                if (layer.window is None or j > p - layer.window) and j // layer.page_size % shard.ranks == shard.rank:
                    seen.add(j)
                    pairs += 1
        keys += len(seen)
    return keys, pairs


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_counts_are_exact(window: int | None, ranks: int) -> None:
    layer = LayerShape(4, 2, 8, page_size=4, window=window)
    sequences = list(itertools.product((0, 1, 2, 5, 9), (0, 1, 3, 4, 11, 16)))
    for rank in range(ranks):
        shard = PageShard(rank, ranks)
        for one in sequences:
            found = count(layer, [one], shard)
            assert (found.keys, found.pairs) == enumerated(layer, [one], shard), (one, shard)
        found = count(layer, sequences, shard)
        assert (found.keys, found.pairs) == enumerated(layer, sequences, shard)


def test_counts_of_random_layers() -> None:
    draw = random.Random(0)
    for _ in range(60):
        layer = LayerShape(8, 4, 16, draw.randint(1, 9), window=draw.choice([None, draw.randint(1, 40)]))
        batch = [(draw.randint(0, 12), draw.randint(0, 40)) for _ in range(draw.randint(1, 4))]
        ranks = draw.randint(1, 4)
        shard = PageShard(draw.randrange(ranks), ranks)
        found = count(layer, batch, shard)
        assert (found.keys, found.pairs) == enumerated(layer, batch, shard)


def test_ranks_share_the_work() -> None:
    batch = [(7, 100), (1, 13), (30, 0)]
    for window in (None, 9):
        layer = LayerShape(4, 2, 8, 4, window=window)
        shards = [count(layer, batch, PageShard(rank, 3)) for rank in range(3)]
        whole = count(layer, batch)
        assert sum(one.pairs for one in shards) == whole.pairs and sum(one.keys for one in shards) == whole.keys


def test_bytes_and_flops_follow_from_the_counts() -> None:
    found = count(LayerShape(4, 2, 8, 4, kv_format="e4m3fn"), [(3, 10)])
    keys, pairs, tokens = 13, 11 + 12 + 13, 3
    assert found.bytes == keys * 2 * 2 * 8 * 1 + tokens * 4 * 8 * (2 + 2)
    assert found.flops == pairs * 4 * 8 * 2 * 2  # heads, elements, two products, multiplication and addition
    assert count(LayerShape(4, 2, 8, 4), [(3, 10)]).bytes - found.bytes == keys * 2 * 2 * 8


def test_eight_bit_queries_have_sixteen_bit_outputs() -> None:
    assert LayerShape(4, 2, 8, q_format="e4m3fn").token_bytes == 4 * 8 * (1 + 2)


@pytest.mark.parametrize("workload", [w for w in CUDA_WORKLOADS if w.operation == "attend"], ids=lambda w: w.label)
def test_counts_are_those_of_the_bench(workload: object) -> None:
    w = workload
    shape = w.q_heads, w.kv_heads, w.head_dim, w.page_size, w.dtype, w.cache_format, w.window  # type: ignore[attr-defined]
    layer = LayerShape(*shape, scales=w.scales)  # type: ignore[attr-defined]
    found = count(layer, w.sequences)  # type: ignore[attr-defined]
    assert (found.bytes, found.flops) == (w.bytes, w.flops)  # type: ignore[attr-defined]


def test_nothing_costs_nothing() -> None:
    assert count(LAYER, []) == count(LAYER, [(0, 100)]) == (0, 0, 0, 0, 0)
