"""`quire bench`: the kernels of this machine beside their peers, as ratios in one run."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from quire.dispatch.platform import Platform
from quire.errors import ArgumentError

HELP = "measure the kernels beside their peers, each result checked before it is timed"
EXAMPLES = """\
examples:
  quire bench --device cpu                    every workload
  quire bench --only 'decode.*bf16'           some of them
  quire bench --json bench.json               for programs ('-' for standard output)

A peer of the CPU kernels is what a user of torch would write: gather the pages with index_select, pack the group as query rows,
call SDPA for each sequence. It runs in a process with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, without which it can die.

exit status: 0 if every result was right, 1 otherwise
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--only", metavar="REGEX", default="", help="workloads whose name matches")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON, '-' for standard output and nothing else")


def run(args: argparse.Namespace) -> int:
    from quire.bench.limits import cpu_limits
    from quire.bench.run import measure
    from quire.bench.workloads import CPU_WORKLOADS

    try:
        chosen = [w for w in CPU_WORKLOADS if re.search(args.only, w.label)]
    except re.error as error:
        raise ArgumentError("--only", repr(args.only), f"a regular expression ({error})") from None
    if not chosen:
        raise ArgumentError("--only", repr(args.only), "a match for one of: " + "; ".join(w.label for w in CPU_WORKLOADS))
    platform, limits = Platform.detect("cpu"), cpu_limits()
    with _progress(len(chosen)) as tell:
        measured = measure(chosen, limits, tell=tell)
    report: dict[str, Any] = {
        "platform": platform.to_dict(),
        "limits": {"read_gigabytes_per_second": limits.bytes / 1e9, "fp32_gigaflops": limits.flops / 1e9},
        "rows": [row.to_dict() | {"ratio": _ratio(row, measured)} for row in measured],
    }
    if args.json == "-":
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if args.json not in (None, "-"):
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    return 0 if all(row.right for row in measured) else 1


def _ratio(row: Any, measured: list[Any]) -> float | None:
    """How many times as fast as the best peer on the same workload."""
    peers = [m.milliseconds for m in measured if m.workload == row.workload and m.contestant != "quire" and m.milliseconds]
    return min(peers) / row.milliseconds if row.contestant == "quire" and row.milliseconds and peers else None


HEAD = ("workload", "who", "ms", "+-", "GB/s", "GFLOP/s", "of limit", "error / allowed", "x peer")


def _print(report: dict[str, Any]) -> None:
    limits = report["limits"]
    title = (
        f"{report['platform']['name']}: reads {limits['read_gigabytes_per_second']:.1f} GB/s, multiplies "
        f"{limits['fp32_gigaflops']:.0f} GFLOP/s in fp32 (measured in this run)"
    )
    rows = [_cells(row) for row in report["rows"]]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [HEAD, *rows]) for i in range(len(HEAD))]
        print(title)
        for line in [HEAD, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(HEAD):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for row, cells in zip(report["rows"], rows):
        style = "" if row["right"] else "red"
        table.add_row(*cells, style="bold" if row["contestant"] == "quire" and not style else style)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def figure(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return (
        row["workload"],
        row["contestant"],
        figure(row["milliseconds"], ".1f") or row["note"],
        figure(row["spread"], ".0%"),
        figure(row["gigabytes_per_second"], ".1f"),
        figure(row["gigaflops"], ".0f"),
        figure(row["of_limit"], ".0%"),
        f"{row['error']:.1e} / {row['budget']:.1e}",
        figure(row["ratio"], ".2f"),
    )


class _progress:
    """A bar on a terminal, nothing elsewhere: the table that follows says it all."""

    def __init__(self, total: int):
        self.total = total
        self.bar: Any = None

    def __enter__(self) -> Any:
        if not sys.stderr.isatty():
            return lambda name: None
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            return lambda name: print(f"{name} ...", file=sys.stderr)
        self.bar = Progress(console=Console(stderr=True), transient=True)
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        return lambda name: self.bar.update(task, description=name, advance=1)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
