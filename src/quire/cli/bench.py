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
  quire bench --stream chat                         the steps of a serving engine, the same for all contestants
  quire bench --stream agents --device cuda --html page.html     the same on a GPU, with a timeline
  quire bench --host                                how long a call keeps the host
  quire bench --pool                                how long the page pool takes for a step
  quire bench --json bench.json                     for programs ('-' for standard output)
  quire bench --from bench.json --html page.html    the picture of an earlier run, on any machine

A peer of the CPU kernels is what a user of torch would write: gather the pages with index_select, pack the group as query rows,
call SDPA for each sequence. It runs in a process with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, without which it can die. Others are
vLLM's own kernel, with --vllm (vec: the same without AMX), and FlexAttention, with --flex. The peers of the GPU kernels are other
libraries, if they can be imported: vllm_chunked, vllm_unified, fa3, flashinfer. docs/benchmarks.md says what is measured and how.

exit status: 0 if every result of Quire's was right, 1 otherwise, 2 for a bad argument; times change nothing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stream", choices=["chat", "documents", "agents"], help="replay a serving stream instead of the workloads")
    add("--host", action="store_true", help="measure how long a call keeps the host, instead of the workloads")
    add("--pool", action="store_true", help="measure the page pool instead of the workloads")
    add("--seed", metavar="N", type=int, help="stream: the seed of the trace (default: 0)")
    add("--layers", metavar="N", type=int, help="stream: layers of each step (default: 4 on a CPU, 32 on a GPU)")
    add("--steps", metavar="N", type=int, help="stream: steps of the trace (default: 96 on a CPU, 512 on a GPU)")
    add("--device", choices=["cpu", "cuda"], help="where to measure (default: cpu; of --host: whatever is here)")
    add("--only", metavar="REGEX", help="workloads whose name matches")
    add("--batch", metavar="SPEC", action="append", help="a batch in vLLM's words, such as 2q2k_32q1s1k, instead of the workloads")
    add("--peers", metavar="NAMES", help="GPU: the peers to measure, joined by commas (default: all that can be imported)")
    add("--vllm", metavar="PYTHON", help="CPU: an interpreter with vLLM for CPUs, which is measured too")
    add("--flex", action="store_true", help="CPU: FlexAttention too, which is compiled for each workload: some seconds each")
    add(
        "--turns",
        metavar="N",
        type=int,
        help="how often each contestant gets its turn (default: 4 on a CPU, 3 on a GPU, 1 in a stream)",
    )
    add("--dirty", action="store_true", help="GPU: fill the L2 cache by writing before each run, as do_bench does, not by reading")
    add("--graph", action="store_true", help="GPU: measure captured graphs too")
    add("--json", metavar="FILE", help="also write the figures as JSON, '-' for standard output and nothing else")
    add("--html", metavar="FILE", help="also write them as a page with pictures")
    add("--from", metavar="FILE", dest="source", help="measure nothing: take the figures that --json wrote")


MODES = {
    "--stream": ("--device", "--peers", "--vllm", "--turns", "--seed", "--layers", "--steps", "--html"),
    "--host": ("--device",),
    "--pool": (),
    "": ("--device", "--only", "--batch", "--peers", "--vllm", "--flex", "--turns", "--dirty", "--graph", "--html"),
}
"""What may stand beside the option that says what is measured; `--json` may stand beside all."""


def run(args: argparse.Namespace) -> int:
    figures = _read(args) if args.source is not None else _measure(args)
    if args.json == "-":
        print(json.dumps(figures, indent=2))
    else:
        _print(figures)
    if args.source is None:
        _save(args, figures)
    if args.html is not None:
        with open(args.html, "w", encoding="utf-8") as file:
            file.write(_page(figures))
    return _verdict(figures)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, apart from those that say where figures come from and go."""
    apart = ("json", "html", "source", "verb", "run", "parser")
    values = {name: value for name, value in vars(args).items() if name not in apart}
    return {f"--{name}": value for name, value in values.items() if value is not None and value is not False}


def _mode(args: argparse.Namespace) -> str:
    """The option that says what is measured. What does not belong beside it is refused."""
    given = _given(args)
    modes = [mode for mode in MODES if mode in given]
    if len(modes) > 1:
        raise ArgumentError(modes[1], given[modes[1]], f"one of {', '.join(filter(None, MODES))}, not beside {modes[0]}")
    mode = modes[0] if modes else ""
    html = {} if args.html is None else {"--html": args.html}
    for name, value in (given | html).items():
        if name != mode and name not in MODES[mode]:
            belongs = [other for other, names in MODES.items() if other and name in names]
            allowed = f"only beside {' or '.join(belongs)}" if not mode and belongs else f"nothing beside {mode}"
            raise ArgumentError(name, value, allowed)
    for name in ("--turns", "--layers", "--steps"):
        if name in given and given[name] < 1:
            raise ArgumentError(name, given[name], "1 or more")
    return mode


def _read(args: argparse.Namespace) -> dict[str, Any]:
    for name, value in _given(args).items():
        raise ArgumentError(name, value, "nothing beside --from, which measures nothing")
    try:
        with open(args.source, encoding="utf-8") as file:
            figures = json.load(file)
        kind = figures.get("kind", "") if isinstance(figures, dict) else ""
        needed = {"stream": {"trace", "model", "rows"}, "figures": {"rows"}}.get(kind, {"platform", "limits", "rows"})
        if not (isinstance(figures, dict) and needed <= figures.keys()):
            raise ValueError(f"no {', '.join(sorted(needed))} in it")
        if kind == "figures" and args.html is not None:
            raise ArgumentError("--html", args.html, "nothing beside figures of --host or --pool, which have no page")
    except (OSError, ValueError) as error:
        raise ArgumentError("--from", repr(args.source), f"a file that `quire bench --json` wrote ({error})") from None
    return figures


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    mode, given, on_gpu = _mode(args), _given(args), args.device == "cuda"
    for name in ("--peers", "--dirty", "--graph"):
        if name in given and not on_gpu:
            raise ArgumentError(name, given[name], "only beside --device cuda")
    for name in ("--vllm", "--flex", *(("--turns",) if mode == "--stream" else ())):
        if name in given and on_gpu:
            raise ArgumentError(name, given[name], "only beside --device cpu")
    if mode == "--stream":
        return _measure_stream(args)
    if mode == "--host":
        return _measure_host(args)
    if mode == "--pool":
        from quire.bench.pool import measure_pool

        return _figures("page pool", measure_pool())
    return (_measure_gpu if on_gpu else _measure_cpu)(args)


def _measure_stream(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from quire.bench.peers import load_streams
    from quire.bench.stream import report, run, setup
    from quire.platform import Platform

    device = args.device or "cpu"
    spec = setup.default_spec(args.stream, device, args.seed or 0).with_counts(args.layers, args.steps)
    platform = Platform.detect(device)
    if device == "cpu":
        names, turns = [*run.ALWAYS, *([run.VLLM] if args.vllm else [])], args.turns or 1
        missing = {} if args.vllm else {run.VLLM: "no interpreter with vLLM for CPUs was given: --vllm PYTHON"}
        with _progress(len(names) * turns * spec.engine.steps) as tell:
            results = run.measure_cpu(spec, vllm=args.vllm, turns=turns, tell=tell)
        threads = torch.get_num_threads()
        return report.report(device, platform, spec, results, software=_software(), missing=missing, threads=threads)
    from quire.bench.timing import capture

    peers, missing = load_streams(None if args.peers is None else [name for name in args.peers.split(",") if name])
    # Each contestant call by call and with graphs, each replayed for its times and for its attention times.
    with _progress(4 * (1 + len(peers)) * spec.engine.steps) as tell:
        results = run.measure_gpu(spec, peers, capture=capture, tell=tell)
    return report.report(device, platform, spec, results, software=_software(), missing=missing)


def _measure_host(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    rows: list[Any] = []
    if args.device != "cuda":
        from quire.bench.figures import Figure, of_cpu_host
        from quire.bench.host import measure_cpu_host

        try:
            rows += of_cpu_host(measure_cpu_host())
        except quire.KernelError as error:
            rows.append(Figure("attend and step on the CPU", None, note=str(error)))
    if args.device == "cuda" or (args.device is None and torch.cuda.is_available()):
        from quire.bench.host_gpu import measure_gpu_host
        from quire.platform import Platform

        Platform.detect("cuda")  # says so if there is none
        rows += measure_gpu_host()
    return _figures("host", rows)


def _figures(title: str, rows: Sequence[Any]) -> dict[str, Any]:
    from quire.bench.figures import figures

    return {"kind": "figures", "title": title, "software": _software(), "rows": [row.to_dict() for row in figures(rows)]}


def _page(figures: Mapping[str, Any]) -> str:
    from quire.bench.page import page
    from quire.bench.stream.page import page as stream_page

    return (stream_page if figures.get("kind") == "stream" else page)(figures)


def _verdict(figures: Mapping[str, Any]) -> int:
    from quire.bench.report import verdict
    from quire.bench.stream.report import verdict as stream_verdict

    if figures.get("kind") == "figures":
        return 0
    return (stream_verdict if figures.get("kind") == "stream" else verdict)(figures)


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
    figures: dict[str, Any] = {}
    with _progress(len(chosen), lines=True) as tell:
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
            figures = report("cuda", platform, bounds, rows, software=_software(), missing=missing)
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
    from quire.bench.figures import Figure
    from quire.bench.figures import table as table_of_figures
    from quire.bench.report import notes, table, title
    from quire.bench.stream import report as stream

    if figures.get("kind") == "figures":
        rows = [Figure(row["name"], row["value"], row["limit"], row["note"]) for row in figures["rows"]]
        _print_table(figures["title"], *table_of_figures(rows), ["red" if row.passed is False else "" for row in rows])
        return
    if figures.get("kind") == "stream":
        title, table, notes = stream.title, stream.table, stream.notes
    marks = [
        "red" if not row["right"] else "bold" if row.get("own", row["contestant"] == "quire") else "" for row in figures["rows"]
    ]
    _print_table(title(figures), *table(figures), marks)
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
