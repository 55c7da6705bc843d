"""Speed relative to the peers, and the roofline."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from style import COLORS, LIGHT
from tables import CPU, GPU, LIMITS, number

from quire.bench.workloads import CPU_WORKLOADS, CUDA_WORKLOADS, Workload

PEERS = {
    "FlashAttention-3": ("FlashAttention-3", "o"),
    "FlashInfer": ("FlashInfer", "s"),
    "vLLM `unified_attention`": ("vLLM unified_attention", "^"),
    "vLLM `chunked_prefill_paged_decode`": ("vLLM chunked_prefill_paged_decode", "D"),
}


def speed() -> Any:
    """Every workload of the H200 table: the time of each peer over Quire's."""
    figure, axes = pyplot.subplots(figsize=(8.6, 6.4), layout="constrained")
    for (column, (label, marker)), color in zip(PEERS.items(), COLORS):
        points = [(number(row[column]) / number(row["Quire"]), i) for i, row in enumerate(GPU) if row[column]]
        axes.plot(*zip(*points), marker, color=color, label=label, markersize=6.5, zorder=3, markeredgewidth=0)
    axes.axvline(1, color=LIGHT["ink"], linewidth=1.2, zorder=2)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20, 50, 100)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(GPU)), [row["workload"] for row in GPU])
    axes.set_ylim(len(GPU) - 0.4, -0.6)
    axes.grid(axis="both", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("time of the peer / time of Quire (right of 1x: Quire is faster)")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8.5, columnspacing=1.2, handletextpad=0.3)
    return figure


def roofline() -> Any:
    """Arithmetic intensity against the rate reached, below the limits that were measured on the same machine."""
    figure, (gpu, cpu) = pyplot.subplots(1, 2, figsize=(8.6, 3.9), layout="constrained")
    limit = LIMITS["H200"]
    workloads = {plain_name(workload): workload for workload in CUDA_WORKLOADS}
    points = []
    for row in GPU:
        workload = workloads.get(row["workload"])
        if workload is not None:
            seconds = number(row["Quire"]) * 1e-6
            points.append((workload.flops / workload.bytes, workload.flops / seconds / 1e12, row["workload"]))
    draw_roof(gpu, number(limit["read bandwidth"]), number(limit["matrix product"]), "TFLOP/s", points, COLORS[0], "bf16")
    gpu.set_title("H200", fontsize=10)
    for dtype, color in (("fp32", COLORS[1]), ("bf16", COLORS[0])):
        limit = LIMITS[f"two EPYC cores, {dtype}"]
        rows = [row for row in CPU if row["workload"].endswith(f", {dtype}") and number(row["GFLOP/s"])]
        points = [(intensity(row["workload"], dtype), number(row["GFLOP/s"]), row["workload"]) for row in rows]
        draw_roof(cpu, number(limit["read bandwidth"]), number(limit["matrix product"]), "GFLOP/s", points, color, dtype)
    cpu.set_title("two CPU cores", fontsize=10)
    cpu.legend(loc="lower right", fontsize=8.5)
    return figure


def plain_name(workload: Workload) -> str:
    """A workload as the H200 table names it: bf16 is the default there, and e4m3 is e4m3fn."""
    return workload.label.replace(", bf16", "").replace("e4m3fn", "e4m3")


def intensity(name: str, dtype: str) -> float:
    (found,) = (workload for workload in CPU_WORKLOADS if workload.label == name)
    assert found.dtype == dtype
    return found.flops / found.bytes


def draw_roof(axes: Axes, bandwidth: float, peak: float, unit: str, points: list[Any], color: str, label: str) -> None:
    ridge = peak / bandwidth
    xs = [0.3, ridge, 2 * max([ridge, *(x for x, _, _ in points)])]
    axes.plot(xs, [min(peak, bandwidth * x) for x in xs], color=color, linewidth=1.4)
    xs, ys, _ = zip(*points)
    axes.plot(xs, ys, "o", color=color, markersize=5.5, markeredgewidth=0, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel(unit)
    axes.grid(linewidth=0.6)
