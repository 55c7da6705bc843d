"""All figures of a run as one dict, which is what `--json` writes, and as the cells of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from quire.bench.limits import Limits
from quire.bench.measurement import Measurement, compared
from quire.cache.format import FORMATS
from quire.platform import Platform


class DisplayUnit(NamedTuple):
    name: str
    factor: float
    form: str

    def __call__(self, value: float | None) -> str:
        return "" if value is None else format(value * self.factor, self.form)


UNITS = {
    "cpu": (DisplayUnit("ms", 1.0, ".1f"), DisplayUnit("GB/s", 1.0, ".1f"), DisplayUnit("GFLOP/s", 1.0, ".0f")),
    "cuda": (DisplayUnit("us", 1e3, ".1f"), DisplayUnit("TB/s", 1e-3, ".2f"), DisplayUnit("TFLOP/s", 1e-3, ".0f")),
}
"""For milliseconds, gigabytes per second and gigaflops."""
SHARE, RATIO = DisplayUnit("", 1.0, ".0%"), DisplayUnit("", 1.0, ".2f")
PRECISION = {"cpu": "fp32", "cuda": "bf16"}
"""Of the matrix product that measures arithmetic."""


def report(
    device: str,
    platform: Platform,
    limits: Limits,
    rows: Iterable[Measurement],
    *,
    software: Mapping[str, str],
    missing: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything that was measured, and where. `missing` says of peers that are not here why."""
    bounds = {"read_gigabytes_per_second": limits.bytes / 1e9, f"{PRECISION[device]}_gigaflops": limits.flops / 1e9}
    if device != "cpu":
        bounds["copy_gigabytes_per_second"] = limits.copied / 1e9
    return {
        "device": device,
        "platform": platform.to_dict(),
        "software": dict(software),
        "limits": bounds,
        "missing": dict(missing or {}),
        "rows": compared(rows),
    }


def verdict(report: Mapping[str, Any]) -> int:
    """The exit status: 1 if one of Quire's own results was wrong, or could not be had or timed."""
    return 0 if all(row["right"] and row["milliseconds"] for row in report["rows"] if is_own(row)) else 1


def title(report: Mapping[str, Any]) -> str:
    device = device_of(report)
    _, rate, work = UNITS[device]
    limits, product = report["limits"], PRECISION[device]
    copies = f", copies {rate(limits['copy_gigabytes_per_second'])} {rate.name}" if "copy_gigabytes_per_second" in limits else ""
    return (
        f"{report['platform']['name']}: reads {rate(limits['read_gigabytes_per_second'])} {rate.name}{copies}, multiplies "
        f"{work(limits[f'{product}_gigaflops'])} {work.name} in {product} (measured in this run)"
    )


def table(report: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head, and a line for each row."""
    time, rate, work = UNITS[device_of(report)]
    graph = any(row.get("graph_milliseconds") for row in report["rows"])
    head = ("workload", "implementation", time.name, "+-", rate.name, work.name, "of limit", "error / allowed", "x peer")
    return head + ((f"graph {time.name}", "graph x peer") if graph else ()), [
        (
            row["workload"],
            name_of(row),
            time(row["milliseconds"]) or ("wrong" if row["note"].startswith("wrong") else "failed"),
            SHARE(row["spread"]),
            rate(row["gigabytes_per_second"]),
            work(row["gigaflops"] or None),
            SHARE(row["of_limit"]),
            f"{'-' if row['error'] is None else format(row['error'], '.1e')} / {row['budget']:.1e}",
            RATIO(row["ratio"]),
            *((time(row["graph_milliseconds"]), RATIO(row["graph_ratio"])) if graph else ()),
        )
        for row in report["rows"]
    ]


def notes(report: Mapping[str, Any]) -> list[str]:
    """Why figures are missing, a line each."""
    of_rows = [f"{row['workload']}, {row['implementation']}: {row['note']}" for row in report["rows"] if row["note"]]
    return of_rows + [f"not measured: {name} ({reason})" for name, reason in report.get("missing", {}).items()]


def name_of(row: Mapping[str, Any]) -> str:
    """The implementation, with the precision of its queries where that is not the workload's."""
    marked = FORMATS[row["q_format"]].quantised and "fp8" not in row["implementation"]
    return f"{row['implementation']} (fp8 q)" if marked else row["implementation"]


def device_of(report: Mapping[str, Any]) -> str:
    return str(report.get("device", "cpu"))


def is_own(row: Mapping[str, Any]) -> bool:
    """Whether it is a measurement of Quire."""
    return bool(row.get("own", row["implementation"] == "quire"))
