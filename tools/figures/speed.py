"""Speed relative to other libraries, and the roofline."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from matplotlib import pyplot
from matplotlib.axes import Axes
from style import COLORS, LIGHT, size, titled
from tables import CPU, GPU, LIMITS, number

from quire.bench.workloads import CPU_WORKLOADS, CUDA_WORKLOADS, Workload

CLOSE = {"FlashAttention-3": ("FlashAttention-3", "o"), "FlashInfer": ("FlashInfer", "s")}
FAR = {
    "vLLM `unified_attention`": ("vLLM unified_attention", "^"),
    "vLLM `chunked_prefill_paged_decode`": ("vLLM chunked_prefill_paged_decode", "D"),
}
"""Libraries, by column of the table: their names and markers. Those of each panel."""
BEYOND = 1.5
"""Ratios above it are arrows at the end of the linear axis, with their numbers."""


def speed(narrow: bool = False) -> Any:
    """Every workload of the H200 table: the time of each library over Quire's."""
    figure, (close, far) = pyplot.subplots(1, 2, figsize=size(narrow, 8.6, 6.4, 8.6), layout="constrained", sharey=True)
    shifts = (0.03, 0.32) if narrow else (-0.2, 0.2)  # on a phone the name of the workload is above its markers
    for axes, libraries, first in ((close, CLOSE, 0), (far, FAR, 2)):
        for nth, (column, (label, marker)) in enumerate(libraries.items()):
            points = [(number(row[column]) / number(row["Quire"]), i) for i, row in enumerate(GPU) if row[column]]
            draw_ratios(axes, points, marker, COLORS[first + nth], label, shifts[nth], linear=axes is close)
        for row in range(len(GPU)):  # on a phone not through the names
            axes.plot([1, 1], [row - (0.14 if narrow else 0.5), row + 0.5], color=LIGHT["ink"], linewidth=1.2, zorder=2)
        axes.grid(axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        for row in range(0, len(GPU), 2):
            axes.axhspan(row - 0.5, row + 0.5, color=LIGHT["soft"], zorder=0)
        side, place = ("left", 0.0) if narrow else ("center", 0.5)
        axes.legend(loc=f"lower {side}", bbox_to_anchor=(place, 1.0), fontsize=7 if narrow else 8.5, handletextpad=0.1, borderpad=0)
    close.set_xlim(0.45, 1.58)
    close.set_xticks((0.5, 0.75, 1, 1.25, 1.5), ("0.5", "0.75", "1", "1.25", "1.5") if not narrow else ("0.5", "", "1", "", "1.5"))
    far.set_xscale("log")
    far.set_xlim(0.7, 130)
    ticks = (1, 2, 5, 10, 20, 50, 100) if not narrow else (1, 10, 100)
    far.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    far.minorticks_off()
    names = [row["workload"] for row in GPU]
    if narrow:
        close.set_yticks(range(len(GPU)), [""] * len(GPU))
        close.set_zorder(2)  # names reach into the other panel
        close.patch.set_visible(False)
        for i, name in enumerate(names):
            close.text(0.46, i - 0.36, name, fontsize=7.5, va="center", zorder=4).set_in_layout(False)
    else:
        close.set_yticks(range(len(GPU)), names)
    close.set_ylim(len(GPU) - 0.5, -0.5)
    figure.supxlabel("time of the library / time of Quire (right of 1: Quire is faster)", fontsize=10 if not narrow else 8)
    return figure


def draw_ratios(
    axes: Axes, points: list[tuple[float, int]], marker: str, color: str, label: str, shift: float, linear: bool
) -> None:
    """The ratios of one library. Markers of the two libraries of a panel are apart, so that none hides another; on the linear axis
    a ratio beyond the end is an arrow with its number."""
    inside = [(x, y) for x, y in points if not linear or x <= BEYOND]
    axes.plot(
        [x for x, _ in inside], [y + shift for _, y in inside], marker, color=color, label=label, markersize=6, zorder=3, mew=0
    )
    for x, y in points:
        if linear and x > BEYOND:
            axes.plot(1.53, y + shift, ">", color=color, markersize=6, zorder=3, markeredgewidth=0)
            axes.text(1.49, y + shift, f"{x:.1f}", ha="right", va="center", fontsize=8)


class Series(NamedTuple):
    """Points of one kind in a roofline: FLOP per byte, rate, and the kind of workload."""

    label: str
    color: str
    marker: str
    points: list[tuple[float, float, str]]


def roofline(narrow: bool = False) -> Any:
    """Arithmetic intensity against the rate reached, below the limits that were measured on the same machine."""
    shape = (2, 1) if narrow else (1, 2)
    figure, (gpu, cpu) = pyplot.subplots(*shape, figsize=size(narrow, 8.6, 4.4, 7.6), layout="constrained")
    limit = LIMITS["H200"]
    workloads = {plain_name(workload): workload for workload in CUDA_WORKLOADS}
    points: dict[str, list[tuple[float, float, str]]] = {"bf16 cache": [], "e4m3 cache": []}
    for row in GPU:
        if "fp8 queries" not in row["workload"]:
            workload, seconds = workloads[row["workload"]], number(row["Quire"]) * 1e-6
            kind = "e4m3 cache" if "e4m3" in row["workload"] else "bf16 cache"
            points[kind].append((workload.flops / workload.bytes, workload.flops / seconds / 1e12, row["workload"]))
    draw_roof(gpu, number(limit["read bandwidth"]), number(limit["matrix product"]), "TB/s", "TFLOP/s", "bf16", COLORS[0])
    below = (9, -11)
    series = [Series(kind, COLORS[i], "os"[i], points[kind]) for i, kind in enumerate(points)]
    draw_series(gpu, series, dict.fromkeys(("decode", "verify", "prefill", "mixed"), below))
    gpu.set_ylabel("TFLOP/s")
    titled(gpu, "H200, bf16 queries", narrow)
    series = []
    for nth, dtype in enumerate(("bf16", "fp32")):
        limit = LIMITS[f"two EPYC cores, {dtype}"]
        draw_roof(cpu, number(limit["read bandwidth"]), number(limit["matrix product"]), "GB/s", "GFLOP/s", dtype, COLORS[nth])
    for label, color, marker in (("bf16", 0, "o"), ("bf16, 8-bit cache", 3, "s"), ("fp16", 2, "^"), ("fp32", 1, "D")):
        series.append(Series(label, COLORS[color], marker, cpu_points(label)))
    draw_series(cpu, series, {"decode": below, "mixed": below, "prefill": (-46, 12)})
    cpu.set_ylabel("GFLOP/s")
    titled(cpu, "Two CPU cores", narrow)
    return figure


def cpu_points(label: str) -> list[tuple[float, float, str]]:
    """The rows of the CPU table with queries of one type."""
    workloads = {workload.label: workload for workload in CPU_WORKLOADS}
    found = []
    for row in CPU:
        workload = workloads[row["workload"]]
        kind = workload.dtype + (", 8-bit cache" if "cache" in row["workload"] else "")
        if kind == label:
            found.append((workload.flops / workload.bytes, number(row["GFLOP/s"]), row["workload"]))
    return found


def plain_name(workload: Workload) -> str:
    """A workload as the H200 table names it: bf16 is the default there, and e4m3 is e4m3fn."""
    return workload.label.replace(", bf16", "").replace("e4m3fn", "e4m3")


def draw_roof(axes: Axes, bandwidth: float, peak: float, reads: str, works: str, label: str, color: str) -> None:
    ridge = peak / bandwidth
    xs = [0.6, ridge, 30000.0]
    axes.plot(xs, [min(peak, bandwidth * x) for x in xs], color=color, linewidth=1.4, zorder=1)
    axes.text(30000, peak * 1.05, f"{label}: {peak:g} {works}", ha="right", fontsize=8)
    if label == "bf16":
        axes.text(ridge / 9, peak / 9 * 1.25, f"{bandwidth:g} {reads}", ha="right", fontsize=8)


def draw_series(axes: Axes, series: list[Series], kinds: dict[str, tuple[int, int]]) -> None:
    """The points, a name beside the middle of each kind of workload (at this offset in points), and a legend."""
    for one in series:
        xs, ys, _ = zip(*one.points)
        axes.plot(xs, ys, one.marker, color=one.color, markersize=5, markeredgewidth=0, label=one.label, alpha=0.85)
    for kind, offset in kinds.items():
        cluster = [(x, y) for one in series for x, y, name in one.points if name.startswith(kind)]
        middle = [math.exp(sum(map(math.log, values)) / len(values)) for values in zip(*cluster)]
        axes.annotate(kind, (middle[0], middle[1]), xytext=offset, textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [10**power * digit for power in (0, 1, 2) for digit in (1, 2, 5)]
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in ticks if low <= tick <= high], [f"{tick}" for tick in ticks if low <= tick <= high])
    axes.tick_params(axis="y", which="minor", length=0, labelleft=False)
    axes.set_xlabel("FLOP per byte")
    axes.grid(linewidth=0.6)
    axes.legend(loc="lower right", fontsize=8.5)
