"""The times that were measured on an H200, read from the documents, and what the time model of `quire plan` says about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.bench.workloads import CUDA_WORKLOADS, Workload
from quire.plan.counts import LayerShape
from quire.plan.kernel_rates import FITTED, LONG_KERNELS, LongRates, Rates, prefill_factor
from quire.plan.machines import MACHINES
from quire.plan.step_time import layer_time, write_time

DOCS = Path(__file__).parents[2] / "docs"
H200 = MACHINES["h200"]
FP8_QUERIES = ", fp8 queries"


@dataclass(frozen=True)
class Row:
    """One measured time."""

    source: str
    name: str
    microseconds: float
    workload: Workload
    q_format: str = "bf16"
    kernel: str | None = None
    """The kernel for long queries that was measured, if the dispatcher would choose another one."""

    @property
    def key(self) -> tuple[str, str]:
        return self.source, self.name

    @property
    def layer(self) -> LayerShape:
        w = self.workload
        return LayerShape(w.q_heads, w.kv_heads, w.head_dim, w.page_size, self.q_format, w.cache_format, w.window)

    def predicted(self, rates: Rates = FITTED, kernels: dict[str, LongRates] = LONG_KERNELS) -> float:
        """Microseconds, by the model with these parameters."""
        if self.workload.operation == "write":
            return 1e6 * write_time(self.layer, self.workload.tokens, H200, rates)
        name = self.kernel or long_kernel(self.layer, self.workload)
        found = kernels[name]
        found = found._replace(flops=found.flops * prefill_factor(self.layer))
        return 1e6 * layer_time(self.layer, self.workload.sequences, H200, rates=rates, long_kernel=found).seconds

    @property
    def error(self) -> float:
        return self.predicted() / self.microseconds - 1


def long_kernel(layer: LayerShape, workload: Workload) -> str:
    """The entry of LONG_KERNELS that the model uses for a workload; any if no query is long."""
    from quire.plan.step_time import kernel_of

    name = kernel_of(layer, max(new for new, _ in workload.sequences), max(map(sum, workload.sequences)), H200)
    if name == "triton-mixed" and layer.q_format == "e4m3fn":
        name += ", 8-bit queries"
    return name if name in LONG_KERNELS else "gluon-mixed"


def short_name(workload: Workload) -> str:
    """The name of a workload in the documents."""
    return workload.label.replace(", bf16", "").replace("e4m3fn", "e4m3")


WORKLOADS = {short_name(workload): workload for workload in CUDA_WORKLOADS}


def table(document: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading."""
    text = (DOCS / document).read_text(encoding="utf-8")
    below = text[re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE).end() :]  # type: ignore[union-attr]
    lines = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE).group().splitlines()  # type: ignore[union-attr]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def read(document: str, heading: str, column: str = "Quire") -> list[Row]:
    """The measured rows of a table of workloads."""
    found = []
    for row in table(document, heading):
        name = row["workload"]
        workload = WORKLOADS[name.removesuffix(FP8_QUERIES)]
        found.append(Row(heading, name, float(row[column]), workload, "e4m3fn" if name.endswith(FP8_QUERIES) else workload.dtype))
    return found


def vllm_test_rows() -> list[Row]:
    """The batch of vLLM's test: fp16, bf16, and the form in which new tokens are arguments."""
    base = "batch of vLLM's mixed-batch test"
    names = {
        "fp16": f"{base}, fp16, 64/64 heads, pages of 32",
        "bf16": f"{base}, 64/64 heads, pages of 32",
        "fp16, context form": f"{base}, fp16, 64/64 heads, pages of 32, context form",
    }
    heading = "The batch of vLLM's test"
    rows = {row["workload"]: float(row["Quire"]) for row in table("performance.md", heading)}
    return [Row(heading, name, rows[name], WORKLOADS[label], WORKLOADS[label].dtype) for name, label in names.items()]


def triton_prefill_rows() -> list[Row]:
    """Prefill by Triton's kernel: the first row of the log of Gluon's kernel."""
    first = table("experiments.md", GLUON)[0]
    assert first["change"].startswith("Triton's kernel")
    times = [float(time) for time in re.findall(r"[\d.]+", first["gave"])]
    names = ("prefill 1 x 8192", "prefill 1 x 2048 over 30720")
    return [Row(GLUON, name, time, WORKLOADS[name], kernel="triton-mixed") for name, time in zip(names, times)]


def write_rows() -> list[Row]:
    rows = {row["measurement"]: row["Quire"] for row in table("performance.md", WRITES)}
    names = {"write 8192 tokens, bf16": "write 8192", "write 8192 tokens into e4m3": "write 8192, e4m3 cache"}
    return [Row(WRITES, name, float(rows[name].split()[0]), WORKLOADS[label]) for name, label in names.items()]


ALL_KERNELS, LATER, OTHER_RUN = "All implementations", "Decode after later changes", "H200: other runs"
GLUON, WRITES = "Long sequences on Hopper (Gluon)", "Writes and host time"
RATES_FIT = {
    ("read", "latency", "unit_start"): [(LATER, name) for name in ("decode 1 x 8192", "decode 64 x 4096", "decode 256 x 1024")],
    ("convert",): [(LATER, "decode 64 x 4096, e4m3 cache")],
    ("convert_fp8_queries",): [(ALL_KERNELS, "decode 64 x 4096, e4m3 cache, fp8 queries")],
    ("write_latency",): [(WRITES, "write 8192 tokens, bf16")],
}
KERNELS_FIT = {
    ("gluon-mixed", "flops", "tile_start"): [(ALL_KERNELS, "prefill 1 x 8192"), (ALL_KERNELS, "prefill 8 x 1024 over 1024")],
    ("gluon-mixed-bytes", "flops"): [(ALL_KERNELS, "prefill 1 x 8192, e4m3 cache")],
    ("triton-mixed", "flops"): [(GLUON, "prefill 1 x 8192")],
    ("triton-mixed, 8-bit queries", "flops"): [(ALL_KERNELS, "prefill 1 x 8192, e4m3 cache, fp8 queries")],
}
FIT_KEYS = {key for keys in (*RATES_FIT.values(), *KERNELS_FIT.values()) for key in keys}
"""The rows that the parameters are fitted to, by parameters."""


def all_rows() -> list[Row]:
    """Every time of Quire's own kernels on an H200 that the documents have for the current kernels."""
    return [
        *read("performance.md", ALL_KERNELS),
        *read("performance.md", LATER),
        *read("experiments.md", OTHER_RUN),
        *vllm_test_rows(),
        *triton_prefill_rows(),
        *write_rows(),
    ]


def solve(rows: list[Row], start: dict[str, float], apply) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """The parameters whose predictions have the least squared relative error, by Gauss-Newton steps in their logarithms.
    `apply(parameters)` gives the rates and kernels that `Row.predicted` takes."""
    names, values = list(start), np.log(list(start.values()))

    def residuals(logs: np.ndarray) -> np.ndarray:
        given = apply(dict(zip(names, np.exp(logs))))
        return np.log([row.predicted(*given) / row.microseconds for row in rows])

    for _ in range(40):
        now = residuals(values)
        slopes = np.stack([(residuals(values + 1e-4 * axis) - now) / 1e-4 for axis in np.eye(len(names))], 1)
        values = values - np.linalg.lstsq(slopes, now, rcond=None)[0]
    return dict(zip(names, np.exp(values)))
