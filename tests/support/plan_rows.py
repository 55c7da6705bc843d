"""The times that were measured on an H200, read from the documents, and what the time model of `quire plan` says about them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.bench.cuda_workloads import DECODE, PREFILL
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
        return LayerShape(w.q_heads, w.kv_heads, w.head_dim, w.page_size, self.q_format, w.cache_format, w.window, w.options)

    def predicted(self, rates: Rates = FITTED, kernels: dict[str, LongRates] = LONG_KERNELS) -> float:
        """Microseconds, by the model with these parameters."""
        if self.workload.operation == "write":
            return 1e6 * write_time(self.layer, self.workload.tokens, H200, rates)
        name = self.kernel or long_kernel(self.layer, self.workload)
        found = kernels[name]
        found = found._replace(flops=found.flops * prefill_factor(name, self.layer))
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


def table(document: str, heading: str, nth: int = 0) -> list[dict[str, str]]:
    """The rows of the first or a later table below a heading."""
    text = (DOCS / document).read_text(encoding="utf-8")
    below = text[re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE).end() :]  # type: ignore[union-attr]
    lines = re.findall(r"(?:^\|.*\n)+", below, re.MULTILINE)[nth].splitlines()
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


_PLAIN, _DECODE = WORKLOADS["prefill 1 x 8192"], WORKLOADS["decode 64 x 4096"]
_BYTES = replace(_PLAIN, format="e4m3fn")
_BY_NAME = {workload.label.replace(", bf16", ""): workload for workload in (*PREFILL, *DECODE)}
TODAY: dict[str, tuple[Workload, ...]] = {
    "1 x 8192": (_PLAIN,),
    "1 x 8192, pages of 1; 64; 544": tuple(replace(_PLAIN, page_size=size) for size in (1, 64, 544)),
    "1 x 8192, sinks": (replace(_PLAIN, options=("sinks",)),),
    "1 x 8192, head_dim 64, 64/8 heads": (replace(_PLAIN, head_dim=64, q_heads=64),),
    "1 x 8192, head_dim 80; 96": tuple(replace(_PLAIN, head_dim=dim) for dim in (80, 96)),
    "1 x 8192, head_dim 256": (replace(_PLAIN, head_dim=256),),
    "1 x 8192, window 1024; 128": tuple(replace(_PLAIN, window=window) for window in (1024, 128)),
    "1 x 8192, softcap": (replace(_PLAIN, options=("softcap",)),),
    "8 x 1024 over 1024": (WORKLOADS["prefill 8 x 1024 over 1024"],),
    "16 x 128 over 2000": (_BY_NAME["prefill 16 x 128 over 2000"],),
    "64 ragged to 512": (_BY_NAME["prefill 64 ragged to 512"],),
    "1 x 512 over 100000": (_BY_NAME["prefill 1 x 512 over 100000"],),
    "1 x 8192, e4m3 cache, bf16 queries (FA3: fp8 queries)": (_BYTES,),
    "the same with head_dim 64; 256": tuple(replace(_BYTES, head_dim=dim) for dim in (64, 256)),
    "decode 1 x 1024": (_BY_NAME["decode 1 x 1024"],),
    "decode 8 x 300": (_BY_NAME["decode 8 x 300"],),
    "decode 1 x 4096, 64/8 heads": (_BY_NAME["decode 1 x 4096, 64/8 heads"],),
    "decode 4 x 2048, head_dim 64": (_BY_NAME["decode 4 x 2048, head_dim 64"],),
    "decode 64 x 4096; e4m3 cache": (_DECODE, replace(_DECODE, format="e4m3fn")),
    "verify 1 x 5 over 2000": (_BY_NAME["verify 1 x 5 over 2000"],),
    "verify 16 x 16 over 4096, 64/8 heads": (_BY_NAME["verify 16 x 16 over 4096, 64/8 heads"],),
    "mixed: 1 x 512 over 512 + 31 decodes at 1024": (_BY_NAME["mixed: 1 x 512 over 512 + 31 decodes at 1024"],),
    "prefill 1 x 128 over 2000": (_BY_NAME["prefill 1 x 128 over 2000"],),
    "prefill 1 x 512 over 2000": (replace(_PLAIN, name="", sequences=((512, 2000),)),),
    "prefill 1 x 2048": (replace(_PLAIN, name="", sequences=((2048, 0),)),),
}
"""Rows of the tables of the current code, which name several workloads in one row: those that the model describes."""


def rows_of_today() -> list[Row]:
    """The times of the current code: for each workload of a row one, that of a captured graph if there are two."""
    found = []
    for row in (*table("performance.md", TODAYS), *table("performance.md", TODAYS, 1)):
        name, *cells = row.values()
        workloads = TODAY.get(name, ())
        times = [float(re.findall(r"[\d.]+", part)[-1]) for part in cells[0].split(";")] if workloads else []
        assert len(times) == len(workloads)
        for i, (workload, time) in enumerate(zip(workloads, times)):
            found.append(Row(TODAYS, name if len(times) == 1 else f"{name} ({i + 1})", time, workload))
    assert len({row.name.split(" (")[0] for row in found}) == len({name.split(" (")[0] for name in TODAY})
    return found


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


TODAYS = "Measured on 19 November 2026"
ALL_KERNELS, LATER, OTHER_RUN = "All implementations", "Decode after later changes", "H200: other runs"
GLUON, WRITES = "Long sequences on Hopper (Gluon)", "Writes and host time"
RATES_FIT = {
    ("read", "unit_start"): [(LATER, name) for name in ("decode 64 x 4096", "decode 256 x 1024")],
    ("latency",): [(LATER, "decode 1 x 8192"), (TODAYS, "decode 1 x 1024")],
    ("short_flops",): [(TODAYS, "verify 16 x 16 over 4096, 64/8 heads")],
    ("mixed_read",): [(TODAYS, "mixed: 1 x 512 over 512 + 31 decodes at 1024")],
    ("convert",): [(LATER, "decode 64 x 4096, e4m3 cache")],
    ("convert_fp8_queries",): [(ALL_KERNELS, "decode 64 x 4096, e4m3 cache, fp8 queries")],
    ("write_latency",): [(WRITES, "write 8192 tokens, bf16")],
}
KERNELS_FIT = {
    ("gluon-mixed", "flops", "tile_start"): [
        (TODAYS, name) for name in ("1 x 8192", "8 x 1024 over 1024", "1 x 512 over 100000", "16 x 128 over 2000")
    ],
    ("gluon-mixed-bytes", "flops"): [(TODAYS, "1 x 8192, e4m3 cache, bf16 queries (FA3: fp8 queries)")],
    ("triton-mixed", "flops"): [(GLUON, "prefill 1 x 8192")],
    ("triton-mixed, 8-bit queries", "flops"): [(ALL_KERNELS, "prefill 1 x 8192, e4m3 cache, fp8 queries")],
}
FACTORS_FIT = (
    "1 x 8192, head_dim 64, 64/8 heads",
    "1 x 8192, head_dim 80; 96 (1)",
    "1 x 8192, head_dim 80; 96 (2)",
    "1 x 8192, head_dim 256",
    "the same with head_dim 64; 256 (1)",
    "the same with head_dim 64; 256 (2)",
    "1 x 8192, softcap",
)
"""The rows of today that a factor of `prefill_factor` is fitted to, one each."""
FIT_KEYS = {key for keys in (*RATES_FIT.values(), *KERNELS_FIT.values()) for key in keys} | {(TODAYS, name) for name in FACTORS_FIT}
"""The rows that the parameters are fitted to, by parameters."""


def all_rows() -> list[Row]:
    """Every time of Quire's own kernels on an H200 that the documents have for the current kernels."""
    return [
        *rows_of_today(),
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
