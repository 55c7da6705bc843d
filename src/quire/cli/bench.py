"""`quire bench`: the kernels of this machine beside their peers, as ratios in one run."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import quire
from quire.cli import version
from quire.errors import ArgumentError

HELP = "measure the kernels beside their peers, each result checked before it is timed"
EXAMPLES = """\
examples:
  quire bench                                       every workload of the CPU
  quire bench --device cuda --html page.html        every workload of the GPU, and a picture
  quire bench --only 'decode.*bf16'                 some of them
  quire bench --vllm venv/bin/python                beside vLLM's CPU kernel, installed in an environment of its own
  quire bench --device cuda --batch 2q2k_32q1s1k    a batch of your own: 2 sequences of 2048 new tokens, 32 decodes at 1024
  quire bench --device cuda --peers fa3 --graph     one peer, and the same as captured graphs
  quire bench --json bench.json                     for programs ('-' for standard output)
  quire bench --from bench.json --html page.html    the picture of an earlier run, on any machine

A peer of the CPU kernels is what a user of torch would write: gather the pages with index_select, pack the group as query rows,
call SDPA for each sequence. It runs in a process with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, without which it can die. Others are
vLLM's own kernel, with --vllm (vec: the same without AMX), and FlexAttention, with --flex. The peers of the GPU kernels are other
libraries, if they can be imported: vllm_chunked, vllm_unified, fa3, flashinfer. docs/benchmarks.md says what is measured and how.

exit status: 0 if every result of Quire's was right, 1 otherwise, 2 for a bad argument
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="where to measure (default: cpu)")
    add("--only", metavar="REGEX", help="workloads whose name matches")
    add("--batch", metavar="SPEC", action="append", help="a batch in vLLM's words, such as 2q2k_32q1s1k, instead of the workloads")
    add("--peers", metavar="NAMES", help="GPU: the peers to measure, joined by commas (default: all that can be imported)")
    add("--vllm", metavar="PYTHON", help="CPU: an interpreter with vLLM for CPUs, which is measured too")
    add("--flex", action="store_true", help="CPU: FlexAttention too, which is compiled for each workload: some seconds each")
    add("--turns", metavar="N", type=int, help="how often each contestant gets its turn (default: 4 on a CPU, 3 on a GPU)")
    add("--dirty", action="store_true", help="GPU: fill the L2 cache by writing before each run, as do_bench does, not by reading")
    add("--graph", action="store_true", help="GPU: measure captured graphs too")
    add("--host", action="store_true", help="GPU: measure also how long a call keeps the host")
    add("--json", metavar="FILE", help="also write the figures as JSON, '-' for standard output and nothing else")
    add("--html", metavar="FILE", help="also write them as a page with pictures")
    add("--from", metavar="FILE", dest="source", help="measure nothing: take the figures that --json wrote")


def run(args: argparse.Namespace) -> int:
    from quire.bench.page import page
    from quire.bench.report import verdict

    figures = _read(args) if args.source is not None else _measure(args)
    if args.json == "-":
        print(json.dumps(figures, indent=2))
    else:
        _print(figures)
    if args.source is None:
        _save(args, figures)
    if args.html is not None:
        with open(args.html, "w", encoding="utf-8") as file:
            file.write(page(figures))
    return verdict(figures)


def _read(args: argparse.Namespace) -> dict[str, Any]:
    measuring = {"--device": args.device, "--only": args.only, "--batch": args.batch, "--peers": args.peers, "--turns": args.turns}
    measuring |= {"--vllm": args.vllm, "--flex": args.flex or None} | _gpu_switches(args)
    for name, value in measuring.items():
        if value is not None:
            raise ArgumentError(name, value, "nothing beside --from, which measures nothing")
    try:
        with open(args.source, encoding="utf-8") as file:
            figures = json.load(file)
        if not (isinstance(figures, dict) and {"platform", "limits", "rows"} <= figures.keys()):
            raise ValueError("no platform, limits and rows in it")
    except (OSError, ValueError) as error:
        raise ArgumentError("--from", repr(args.source), f"a file that `quire bench --json` wrote ({error})") from None
    return figures


def _gpu_switches(args: argparse.Namespace) -> dict[str, Any]:
    return {"--dirty": args.dirty or None, "--graph": args.graph or None, "--host": args.host or None}


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    for name, value in ({"--peers": args.peers} | _gpu_switches(args)).items():
        if value is not None and not on_gpu:
            raise ArgumentError(name, value, "only beside --device cuda")
    for name, value in (("--vllm", args.vllm), ("--flex", args.flex or None)):
        if value is not None and on_gpu:
            raise ArgumentError(name, value, "only beside --device cpu")
    if args.turns is not None and args.turns < 1:
        raise ArgumentError("--turns", args.turns, "1 or more")
    return (_measure_gpu if on_gpu else _measure_cpu)(args)


def _measure_cpu(args: argparse.Namespace) -> dict[str, Any]:
    from quire.bench import limits, run, workloads
    from quire.bench.report import report
    from quire.platform import Platform

    chosen = _chosen(args, workloads.CPU_WORKLOADS)
    platform, bounds = Platform.detect("cpu"), limits.cpu_limits()
    with _progress(len(chosen)) as tell:
        rows: list[Any] = []
        contestants = run.EVERYONE if args.flex else run.ALWAYS
        for row in run.measure(chosen, bounds, contestants, turns=args.turns or run.TURNS, tell=tell, vllm=args.vllm):
            rows.append(row)
            # After every row: a run that is cut short has told what it knew.
            _save(args, report("cpu", platform, bounds, rows, software=_software()))
    return report("cpu", platform, bounds, rows, software=_software())


def _measure_gpu(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from quire.bench import gpu, timing, workloads
    from quire.bench.contestants import OWN_ON_CUDA, device_copy
    from quire.bench.limits import gpu_limits
    from quire.bench.peers import load
    from quire.bench.report import report
    from quire.platform import Platform

    chosen = _chosen(args, workloads.CUDA_WORKLOADS)
    platform = Platform.detect("cuda")
    peers, missing = load(None if args.peers is None else [name for name in args.peers.split(",") if name])
    from quire.bench.gpu_read import reads

    contestants = OWN_ON_CUDA | {"copy": device_copy} | peers
    timer = partial(timing.by_events, dirty=args.dirty)
    bounds = gpu_limits(timer, reads, torch.device("cuda"))
    rows: list[Any] = []
    host: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    with _progress(len(chosen), lines=True) as tell:
        if args.host:
            tell(workloads.HOST_WORKLOAD.label)
            host = gpu.host_times(workloads.HOST_WORKLOAD, contestants, timing.on_the_host)
        for row in gpu.measure(
            chosen,
            bounds,
            contestants,
            timer=timer,
            capture=timing.capture if args.graph else None,
            turns=args.turns or gpu.TURNS,
            tell=tell,
        ):
            rows.append(row)
            # After every row: a run that is cut short has told what it knew.
            figures = report("cuda", platform, bounds, rows, software=_software(), missing=missing, host=host)
            _save(args, figures)
    return figures


def _chosen(args: argparse.Namespace, workloads: Sequence[Any]) -> list[Any]:
    from quire.bench.workloads import parse_batch

    if args.batch is not None:
        workloads = [parse_batch(spec) for spec in args.batch]
    try:
        chosen = [w for w in workloads if re.search(args.only or "", w.label)]
    except re.error as error:
        raise ArgumentError("--only", repr(args.only), f"a regular expression ({error})") from None
    if not chosen:
        raise ArgumentError("--only", repr(args.only), "a match for one of: " + "; ".join(w.label for w in workloads))
    return chosen


def _software() -> dict[str, str]:
    return {"quire": quire.__version__, "torch": version("torch"), "triton": version("triton")}


def _save(args: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    if args.json not in (None, "-"):
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


def _print(figures: Mapping[str, Any]) -> None:
    from quire.bench.report import host_table, notes, table, title

    marks = [
        "red" if not row["right"] else "bold" if row.get("own", row["contestant"] == "quire") else "" for row in figures["rows"]
    ]
    _print_table(title(figures), *table(figures), marks)
    if figures.get("host"):
        print()
        _print_table("", *host_table(figures), [""] * len(figures["host"]))
    for note in notes(figures):
        print(note)


def _print_table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], marks: Sequence[str]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        print(title, end="\n" if title else "")
        for line in [head, *lines]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for cells, mark in zip(lines, marks):
        table.add_row(*cells, style=mark)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


class _progress:
    """A bar on a terminal. Elsewhere nothing, or, where a run is long, a line for each workload."""

    def __init__(self, total: int, lines: bool = False):
        self.total, self.lines = total, lines
        self.bar: Any = None

    def __enter__(self) -> Callable[[str], None]:
        start = time.perf_counter()
        if not sys.stderr.isatty():
            if not self.lines:
                return lambda name: None
            return lambda name: print(f"{time.perf_counter() - start:5.0f} s  {name}", file=sys.stderr, flush=True)
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
