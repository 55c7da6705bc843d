"""Workloads are data: what they count is checked against loops, and against figures of other people's measurements."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.bench.workloads import CPU_WORKLOADS, CUDA_WORKLOADS, Workload, parse_batch
from quire.errors import ArgumentError

NAMED = {w.label: w for w in CUDA_WORKLOADS}


@pytest.mark.parametrize("workloads", [CPU_WORKLOADS, CUDA_WORKLOADS], ids=["cpu", "cuda"])
def test_labels_differ_and_workloads_travel_as_json(workloads: tuple[Workload, ...]) -> None:
    assert len({w.label for w in workloads}) == len(workloads)
    for workload in workloads:
        assert Workload.from_json(workload.to_json()) == workload


def test_a_label_says_what_is_unusual() -> None:
    assert Workload("w", ((1, 0),)).label == "w, bf16"
    w = Workload("w", ((1, 0),), "fp16", 4, 2, 64, 32, format="e4m3fn", window=7, form="context")
    assert w.label == "w, fp16, 4/2 heads, head_dim 64, pages of 32, e4m3fn cache, window 7, context form"


def test_bytes_and_flops_are_counted_by_hand() -> None:
    w = Workload("w", ((1, 3), (2, 1)), "bf16", q_heads=4, kv_heads=2, head_dim=8)
    assert w.bytes == (2 * (4 + 3) * 2 * 8 + 2 * 3 * 4 * 8) * 2
    assert w.flops == 4 * (4 + (2 + 3)) * 4 * 8
    assert replace(w, format="e4m3fn").bytes == 2 * (4 + 3) * 2 * 8 + 2 * (2 * 3 * 4 * 8)
    written = replace(w, format="e4m3fn", operation="write")
    assert (written.bytes, written.flops) == (2 * 3 * 2 * 8 * (2 + 1), 0)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 100])
@pytest.mark.parametrize("row", [(1, 0), (1, 8), (4, 0), (4, 3), (7, 5), (3, 20)], ids=str)
def test_counts_match_a_loop(row: tuple[int, int], window: int | None) -> None:
    new, context = row
    reach = window or 10**9
    seen = [range(max(0, p + 1 - reach), p + 1) for p in range(context, context + new)]
    w = Workload("w", (row,), q_heads=1, kv_heads=1, head_dim=1, window=window)
    assert w.flops == 4 * sum(map(len, seen))
    assert w.bytes == 2 * 2 * (len(set().union(*seen)) + new)


# Times and rates that others reached on an H200: bytes or operations follow from them.
@pytest.mark.parametrize(
    "label, microseconds, terabytes, teraflops",
    [
        ("decode 1 x 8192, bf16", 25.1, 1.34, None),
        ("decode 1 x 131072, bf16", 142.1, 3.78, None),
        ("decode 64 x 4096, bf16, 64/64 heads", 1904.4, 4.51, None),
        ("decode 64 x 4096, bf16, e4m3fn cache", 204.7, 2.63, None),
        ("decode 128 ragged, 16 to 16384, bf16", 424.6, 3.56, None),
        ("decode 64 x 8192, bf16, window 1024", 83.3, 3.24, None),
        ("verify 64 x 4 over 4096, bf16", 261.6, 4.12, None),
        ("prefill 1 x 8192, bf16", 934.1, None, 589),
        ("prefill 1 x 2048 over 30720, bf16", 1743.9, None, 611),
        ("prefill 8 x 1024 over 1024, bf16", 393.2, None, 525),
        ("prefill 1 x 8192, bf16, e4m3fn cache", 904.1, None, 608),
    ],
)
def test_counts_match_published_rates(label: str, microseconds: float, terabytes: float | None, teraflops: float | None) -> None:
    w = NAMED[label]
    if terabytes:
        assert w.bytes / microseconds / 1e6 == pytest.approx(terabytes, abs=0.006)
    if teraflops:
        assert w.flops / microseconds / 1e6 == pytest.approx(teraflops, abs=0.6)


def test_the_batch_of_vllms_test_is_that_of_seed_zero() -> None:
    draw = random.Random(0)
    new, context = ([draw.randint(16, 1024) for _ in range(10)] for _ in "qc")
    found = [w for w in CUDA_WORKLOADS if "mixed-batch test" in w.name]
    assert {w.dtype for w in found} == {"fp16", "bf16"} and {w.form for w in found} == {"full", "context"}
    for w in found:
        assert w.sequences == tuple(zip([*new[:-1], 1], context))
        assert (w.q_heads, w.kv_heads, w.head_dim, w.page_size) == (64, 64, 128, 32)


def test_ragged_lengths_are_log_uniform() -> None:
    lens = [context + 1 for _, context in NAMED["decode 128 ragged, 16 to 16384, bf16"].sequences]
    assert len(lens) == 128 and 16 <= min(lens) and max(lens) <= 16384
    assert 48 <= sum(n < 512 for n in lens) <= 80


@pytest.mark.parametrize(
    "spec, rows",
    [
        ("q2k", ((2048, 0),)),
        ("q1s1k", ((1, 1023),)),
        ("8q1s1k", ((1, 1023),) * 8),
        ("q4s1k", ((4, 1020),)),
        ("2q2k_32q1s1k", ((2048, 0),) * 2 + ((1, 1023),) * 32),
        ("q7s7_2q1s500", ((7, 0), (1, 499), (1, 499))),
    ],
)
def test_batches_in_the_words_of_vllm(spec: str, rows: tuple[tuple[int, int], ...]) -> None:
    assert parse_batch(spec).sequences == rows
    assert parse_batch(spec).label == f"{spec}, bf16"


@pytest.mark.parametrize("spec", ["", "2k", "q", "q1k1", "q1_", "q2s1", "q0", "0q1", "q1m", "-1q1", "q1s"])
def test_bad_batches_are_refused(spec: str) -> None:
    with pytest.raises(ArgumentError, match="--batch"):
        parse_batch(spec)
