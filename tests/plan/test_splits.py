"""Parallel splits: the best is the minimum of all, replication and capacity are counted."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import replace

import pytest

from quire.errors import ArgumentError
from quire.plan import splits
from quire.plan.communication import LINK_LATENCY, LINK_PART, NETWORK_LATENCY, all_gather, all_reduce, all_to_all
from quire.plan.counts import LayerShape, Lengths, PageShard, count
from quire.plan.machines import MACHINES, Cluster, cluster_of
from quire.plan.models import MODELS, LayerKind
from quire.plan.splits import (
    COMMUNICATION,
    Batch,
    ParallelSplit,
    PlanJob,
    all_costs,
    cost_of,
    divided,
    kept_tokens,
    layer_collectives,
    least_gpus,
    memory_of,
    possible_splits,
)
from quire.plan.step_time import FLOPS, HBM, layer_time, write_bytes, write_time

DECODES = ((1, 8191),) * 16
JOB = PlanJob(MODELS["llama-3-8b"], DECODES, cluster_of("8xH200"))


def naive_splits(q_heads: int, kv_heads: int, gpus: int) -> set[ParallelSplit]:
    found = set()
    for tp, cp, dp in itertools.product(range(1, gpus + 1), repeat=3):
        if tp * cp * dp == gpus and q_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0):
            found.add(ParallelSplit(tp, cp, dp))
    return found


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "llama-3.2-3b", "gemma-3-1b", "qwen3-14b"])
@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 16])
def test_every_possible_split_is_enumerated_once(name: str, gpus: int) -> None:
    found = list(possible_splits(MODELS[name], gpus))
    assert len(found) == len(set(found)) and set(found) == naive_splits(MODELS[name].q_heads, MODELS[name].kv_heads, gpus)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "gemma-3-27b", "gpt-oss-20b"])
@pytest.mark.parametrize("batch", [DECODES, ((1, 131071),), ((2048, 6144), *DECODES), ((4096, 0),)], ids=len)
@pytest.mark.parametrize("gpus", ["4xH200", "16xMI300X"])
def test_the_best_is_the_minimum(name: str, batch: tuple[tuple[int, int], ...], gpus: str) -> None:
    job = PlanJob(MODELS[name], batch, cluster_of(gpus))
    costs = all_costs(job)
    fitting = [cost_of(job, split) for split in naive_splits(job.model.q_heads, job.model.kv_heads, job.cluster.gpus)]
    assert costs[0].seconds == min(cost.seconds for cost in fitting if cost.fits)
    assert [cost.fits for cost in costs] == sorted((cost.fits for cost in costs), reverse=True)
    assert len(costs) == len(fitting)


def test_one_gpu_is_the_sum_of_its_layers() -> None:
    job = replace(JOB, model=MODELS["gemma-3-27b"], cluster=cluster_of("H200"))
    (cost,) = all_costs(job)
    seconds, moved, flops = 0.0, 0, 0
    for kind in job.model.kinds:
        layer = LayerShape(32, 16, 128, 16, window=kind.window)
        counts = count(layer, DECODES)
        seconds += kind.layers * (layer_time(layer, DECODES, MACHINES["h200"]).seconds + write_time(layer, 16, MACHINES["h200"]))
        moved += kind.layers * (counts.bytes + write_bytes(layer, 16))
        flops += kind.layers * counts.flops
    assert cost.seconds == pytest.approx(seconds) and (cost.bytes, cost.flops) == (moved, flops)
    assert cost.parts[COMMUNICATION] == 0 and cost.sent == 0 and cost.limit == HBM


def test_fewer_key_heads_than_ranks_are_replicated() -> None:
    job = replace(JOB, model=MODELS["qwen3-30b-a3b"])  # 4 key heads
    by_tp = {
        split.tp: cost_of(job, split) for split in possible_splits(job.model, 8) if split.dp == 1 and split.cp == 8 // split.tp
    }
    eight, four = cost_of(job, ParallelSplit(8, 1, 1)), cost_of(job, ParallelSplit(4, 2, 1))
    assert (eight.kv_heads, eight.replication) == (1, 2) and (four.kv_heads, four.replication) == (1, 1)
    assert eight.cache == pytest.approx(2 * four.cache), "each key head is stored twice"
    assert eight.bytes > 1.9 * four.bytes and eight.flops == four.flops
    assert all(cost.replication * 4 == cost.kv_heads * tp for tp, cost in by_tp.items())
    assert sum(8 * cost.cache / cost.replication for cost in (eight, four)) == pytest.approx(16 * four.cache)


def test_tensor_parallel_ranks_have_equal_parts() -> None:
    one, two = cost_of(JOB, ParallelSplit(1, 1, 8)), cost_of(JOB, ParallelSplit(2, 1, 4))
    whole = replace(JOB, cluster=cluster_of("H200"))
    layer, half = whole.layer(LayerKind(1, None)), whole.layer(LayerKind(1, None), 2)
    assert (half.q_heads, half.kv_heads) == (16, 4)
    assert 2 * count(half, DECODES).bytes == count(layer, DECODES).bytes
    assert one.bytes == two.bytes and one.weights == 2 * two.weights


def test_context_parallel_time_is_that_of_the_rank_with_the_most_keys() -> None:
    job = replace(JOB, sequences=((1, 4 * 16 * 8 + 3),))  # 33 pages: rank 0 of 4 has 9, the others 8
    cost = cost_of(job, ParallelSplit(1, 4, 2))
    layer = job.layer(LayerKind(1, None))
    times = [layer_time(layer, job.sequences, job.cluster.machine, PageShard(rank, 4)).seconds for rank in range(4)]
    attention = cost.seconds - cost.parts[COMMUNICATION] - 32 * write_time(layer, 1, job.cluster.machine)
    assert attention == pytest.approx(32 * max(times)) and max(times) > min(times)


def test_context_parallel_ranks_divide_a_prefill() -> None:
    layer = JOB.layer(LayerKind(1, None))
    whole, part = (layer_time(layer, [(2048, 30720)], JOB.cluster.machine, PageShard(0, ranks)).work for ranks in (1, 4))
    # The start of a tile is not divided.
    assert part == pytest.approx(whole / 4, rel=0.08)


def test_collectives() -> None:
    machine = MACHINES["h200"]
    cluster = Cluster(machine, 16)
    assert all_reduce(1e9, 4, 4).sent == 1.5e9 and all_gather(1e9, 4, 4).sent == all_to_all(1e9, 4, 4).sent == 0.75e9
    assert all_reduce(1e9, 8, 8).seconds(cluster) == pytest.approx(LINK_LATENCY + 1.75e9 / (LINK_PART * machine.link))
    assert all_reduce(1e9, 2, 16).seconds(cluster) == pytest.approx(NETWORK_LATENCY + 1e9 / (LINK_PART * machine.network))
    assert all_reduce(1e9, 1, 1).seconds(cluster) == 0


def test_collectives_of_a_layer() -> None:
    names = {
        split: [one.name for one in layer_collectives(JOB, split, 16)] for split in (ParallelSplit(8, 1, 1), ParallelSplit(2, 4, 1))
    }
    assert len(names[ParallelSplit(8, 1, 1)]) == 1 and len(names[ParallelSplit(2, 4, 1)]) == 3
    reduced, queries, partial = layer_collectives(JOB, ParallelSplit(2, 4, 1), 16)
    assert reduced.sent == 2 * 16 * 4096 * 2 * 7 / 8  # 8 GPUs sum tokens x hidden, 2 bytes
    assert queries.sent == 16 * 16 * 128 * 2 * 3 / 4  # tokens, heads of the group, elements, 2 bytes; to 3 of 4 ranks
    assert partial.sent == 16 * 16 * (128 + 1) * 4 * 3 / 4  # outputs and log-sum-exp in fp32


def test_ranks_that_cannot_divide_the_heads_have_copies_of_the_weights() -> None:
    job = replace(JOB, model=MODELS["gemma-3-1b"])  # 4 query heads
    split = ParallelSplit(2, 4, 1)
    assert memory_of(job, split).weights == job.model.weight_bytes / 2
    assert memory_of(job, ParallelSplit(2, 2, 2)).weights == job.model.weight_bytes / 4
    reduced, exchange = layer_collectives(job, split, 16)
    assert reduced.ranks == 2 and reduced.sent == 16 * 1152 * 2
    partial = 16 * 2 * 4 * (256 + 1)  # tokens, heads of the rank, fp32
    assert exchange.sent == 3 * partial, "to 3 other ranks"
    _, lses, outputs, merged = layer_collectives(job, split, 1024)  # more than a mebibyte: the merge is divided
    rows = 1024 * 2
    assert lses.sent == 3 * rows * 4 and outputs.sent == rows * 256 * 4 * 3 / 4 and merged.sent == rows * 256 * 2 * 3 / 4


def test_a_slow_network_changes_the_best_split() -> None:
    job = replace(JOB, cluster=cluster_of("16xH200"), sequences=((1, 500_000),))
    fast = replace(job, cluster=job.cluster._replace(machine=replace(job.cluster.machine, per_node=16)))
    assert all_costs(job)[0].seconds > all_costs(fast)[0].seconds
    assert all_costs(fast)[0].split.gpus == 16


def sizes(found: tuple[tuple[Batch, int], ...]) -> list[int]:
    """How many sequences each replica has."""
    return sorted(batch.total() for batch, replicas in found for _ in range(replicas))


def test_sequences_are_divided_over_replicas() -> None:
    batch = ((2048, 6144), *DECODES)
    found = divided(replace(JOB, sequences=batch), 2)
    assert sum((one for one, _ in found), Counter()) == Counter(batch)
    assert sizes(found) == [1, 16], "the prefill takes longer than all decodes"
    more = divided(replace(JOB, sequences=((2048, 6144), *DECODES * 4)), 2)
    assert 8 <= min(sizes(more)) <= 24, "and now less: some decodes are beside it"
    assert sizes(divided(JOB, 8)) == [2] * 8
    assert sizes(divided(replace(JOB, sequences=DECODES[:3]), 8)) == [0] * 5 + [1] * 3


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "runs",
    [
        ((2.5, (1, 100), 1000),),
        ((50.0, (2048, 0), 2), (1.0, (1, 100), 201), (0.25, (1, 10), 77)),
        ((7.0, (64, 0), 5), (3.0, (32, 0), 4), (0.0, (0, 0), 3)),
    ],
)
def test_runs_of_equal_sequences_are_divided_as_one_by_one(
    runs: tuple[tuple[float, tuple[int, int], int], ...], replicas: int
) -> None:
    loads, expected = [0.0] * replicas, [Counter[tuple[int, int]]() for _ in range(replicas)]
    for load, one, times in runs:
        for _ in range(times):
            i = loads.index(min(loads))
            loads[i] += load
            expected[i][one] += 1
    found = splits._balanced(runs, replicas)
    assert Counter({frozenset(batch.items()): times for batch, times in found}) == Counter(
        frozenset(batch.items()) for batch in expected
    )


def test_the_work_of_a_plan_does_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """100000 sequences of one length are no more work than a few: counted in steps of the division."""
    steps = Counter[str]()
    step = heapq.heapreplace

    def counted(heap: list[tuple[float, int]], item: tuple[float, int]) -> tuple[float, int]:
        steps["heap"] += 1
        return step(heap, item)

    monkeypatch.setattr(splits.heapq, "heapreplace", counted)
    all_costs(replace(JOB, sequences=((1, 4095),) * 100_000, cluster=cluster_of("64xH200")))
    assert steps["heap"] <= 2 * 64


@pytest.mark.parametrize("window", [None, 20, 100, 1000])
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_busiest_rank(cp: int, window: int | None) -> None:
    layer = LayerShape(8, 2, 64, 16, window=window)
    for batch in (Counter({(1, 52): 1}), Counter({(1, 527): 3, (40, 100): 2, (0, 9): 1}), Counter({(33, 0): 1})):
        keys = [count(layer, batch, PageShard(rank, cp)).keys for rank in range(cp)]
        assert splits._busiest(layer, batch, cp) == PageShard(keys.index(max(keys)), cp)


def test_capacity() -> None:
    machine = MACHINES["h200"]
    token = 2 * 8 * 128 * 2 * 32  # K and V of 8 heads in 32 layers, bf16
    job = replace(JOB, cluster=cluster_of("H200"))
    memory = memory_of(job, ParallelSplit(1, 1, 1))
    assert memory.cache == 16 * 8192 * token and memory.weights == JOB.model.weight_bytes
    assert memory.most_sequences == int((0.9 * machine.memory - memory.weights) // (8192 * token))
    full = replace(job, sequences=((1, 8191),) * memory.most_sequences)
    assert memory_of(full, ParallelSplit(1, 1, 1)).fits
    more = replace(job, sequences=((1, 8191),) * (memory.most_sequences + 1))
    assert not memory_of(more, ParallelSplit(1, 1, 1)).fits and cost_of(more, ParallelSplit(1, 1, 1)).limit == "capacity"
    assert least_gpus(more) == 2 and least_gpus(job) == 1
    assert memory_of(replace(job, kv_format="e4m3fn"), ParallelSplit(1, 1, 1)).cache * 2 == memory.cache


@pytest.mark.parametrize(
    "gpus, lengths",
    [
        ("6xL40S", ((1, 39_999),) * 7),
        ("5xL40S", ((1, 39_999),) * 7),
        ("2xL40S", ((1, 99_999),) * 64),
        ("64xL40S", ((1, 99_999),) * 64),
        ("H200", ((1, 99_999),) * 3),
    ],
)
def test_the_least_number_of_gpus(gpus: str, lengths: Lengths) -> None:
    """It is one that `--gpus` accepts, it holds the batch, and no smaller one does."""
    job = PlanJob(MODELS["qwen3-32b"], lengths, cluster_of(gpus))
    kind = job.cluster.machine.name
    needed = least_gpus(job)
    assert needed is not None
    for number in range(1, needed + 1):
        try:
            other = replace(job, cluster=cluster_of(f"{number}x{kind}"))
        except ArgumentError:
            assert number != needed
            continue
        assert any(cost.fits for cost in all_costs(other)) == (number == needed)


def test_the_fullest_replica_has_to_fit() -> None:
    """The slowest replica has the prefill, the fullest one the decodes."""
    job = replace(JOB, sequences=((8192, 0), *((1, 8191),) * 64), cluster=cluster_of("2xH200"))
    cost = cost_of(job, ParallelSplit(1, 1, 2))
    assert cost.cache == 64 * 8192 * 2 * 8 * 128 * 2 * 32 and cost.limit == FLOPS


def test_window_layers_keep_the_pages_of_the_window() -> None:
    window = LayerKind(1, 1024)
    assert kept_tokens(JOB, LayerKind(1, None), (1, 8191), 1) == 8192
    assert kept_tokens(JOB, window, (1, 8191), 1) == 1024
    assert kept_tokens(JOB, window, (1, 8192), 1) == 1024 + 16, "the window begins and ends within a page"
    assert kept_tokens(JOB, window, (1, 10), 1) == 16
    assert kept_tokens(replace(JOB, whole_cache=True), window, (1, 8191), 1) == 8192
    assert kept_tokens(JOB, LayerKind(1, None), (1, 8191), 3) == 171 * 16


@pytest.mark.parametrize("given, gpus, name", [("8xH200", 8, "H200"), ("h100", 1, "H100"), ("16 x mi300x", 16, "MI300X")])
def test_gpus(given: str, gpus: int, name: str) -> None:
    found = cluster_of(given)
    assert (found.gpus, found.machine.name) == (gpus, name) and found.nodes == -(-gpus // 8)
    assert cluster_of("NVIDIA A100 80GB").machine.name == "A100" and cluster_of("A100-40GB").machine.memory == 40e9


@pytest.mark.parametrize("given", ["8xH20", "0xH200", "12xH200", "", "x", "99999xH200", "8x"])
def test_wrong_gpus(given: str) -> None:
    with pytest.raises(ArgumentError, match="--gpus: given"):
        cluster_of(given)


def test_other_machines_have_other_kernels() -> None:
    layer = LayerShape(32, 8, 128)
    batch = [(2048, 6144)]
    h200, h100, a100 = (layer_time(layer, batch, MACHINES[name]) for name in ("h200", "h100", "a100"))
    assert h200.kernel == h100.kernel == "gluon-mixed" and a100.kernel == "triton-mixed"
    assert h100.seconds == pytest.approx(h200.seconds, rel=0.01) and a100.seconds > 3 * h100.seconds
    decode = [layer_time(layer, [(1, 131071)], MACHINES[name]).work for name in ("h200", "h100")]
    assert decode[1] / decode[0] == pytest.approx(4.8 / 3.35, rel=1e-3)


def test_a_head_that_no_kernel_has_is_refused_by_its_size() -> None:
    job = replace(JOB, model=replace(JOB.model, head_dim=600))
    with pytest.raises(ArgumentError, match=r"--model: given head_dim 600; allowed: head_dim 1 to 512 \(triton-decode on H200\)"):
        all_costs(job)
