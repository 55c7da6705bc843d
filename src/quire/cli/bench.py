"""`quire bench`: measures the kernels of this machine against other libraries, as ratios in one run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

import quire
from quire.cli import version
from quire.cli.command import (
    INTERRUPTED,
    SCHEMA,
    Args,
    ChoiceOf,
    Command,
    Count,
    Option,
    Readable,
    Whole,
    Writable,
    answer,
    flag,
    is_quiet,
    save,
)
from quire.cli.progress import progress
from quire.cli.sheet import write
from quire.errors import ArgumentError

HELP = """Measures the kernels against other libraries in one run. Each result is checked before it is timed; no time is reported
for a wrong result."""
EXAMPLES = """\
examples:
  quire bench                                       every workload of the CPU
  quire bench --device cuda --html out.html         every workload of the GPU, and a report with figures
  quire bench --only 'decode.*bf16'                 some of them
  quire bench --device cuda --set features          other workloads: known (without --set), prefill, decode, features, all
  quire bench --vllm venv/bin/python                vLLM's CPU kernel, too, from its own environment
  quire bench --device cuda --batch 2q2k_32q1s1k    a batch of your own: 2 sequences of 2048 new tokens, 32 decodes at 1024
  quire bench --device cuda --peers fa3 --graph     one peer, and the same as captured graphs
  quire bench --stream chat                         the steps of a serving engine, the same for all implementations
  quire bench --stream agents --device cuda --html out.html      the same on a GPU, with a timeline
  quire bench --host                                host time of a call
  quire bench --pool                                time of the page pool for a step
  quire bench --output bench.json                   for programs, updated after every workload; --json prints it
  quire bench --from bench.json --html out.html     the report of an earlier run, on any machine

The baseline of the CPU kernels is what a user of torch would write: gather the pages with index_select, pack the group as query
rows, call SDPA for each sequence. It runs in a subprocess with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, without which torch may crash
on CPUs that advertise AMX. Others are vLLM's own kernel, with --vllm (vec: the same without AMX), and FlexAttention, with --flex.
The peers of the GPU kernels are other libraries, if they can be imported: vllm_chunked, vllm_unified, fa3, flashinfer.
docs/benchmarks.md describes what is measured and how.

exit status: 0 if every result of Quire was correct, 1 otherwise, 2 an argument is wrong, 130 interrupted: the results until then
are shown. Times do not affect it.
"""


SETS = ("known", "prefill", "decode", "features", "all")
"""The sets of workloads for GPUs: those of `quire.bench.cuda_workloads`, which imports torch."""
_MODE, _STREAM, _WHERE, _HOW = "what is measured", "with --stream", "device and baselines", "how"
PARAMETERS: list[click.Parameter] = [
    Option("--stream", type=ChoiceOf(("chat", "documents", "agents")), group=_MODE, help="the steps of a serving engine"),
    flag("--host", "host time of a call", _MODE),
    flag("--pool", "the page pool", _MODE),
    Option("--set", type=ChoiceOf(SETS), group=_MODE, help="GPU: the set of workloads (known)"),
    Option("--only", metavar="REGEX", group=_MODE, help="workloads whose name matches"),
    Option(
        "--batch",
        metavar="SPEC",
        multiple=True,
        group=_MODE,
        help="a batch such as 2q2k_32q1s1k; may be repeated",
    ),
    Option("--seed", type=Whole(0), group=_STREAM, help="the seed of the trace (0)"),
    Option("--layers", type=Count, group=_STREAM, help="layers of each step (4 on a CPU, 32 on a GPU)"),
    Option("--steps", type=Count, group=_STREAM, help="steps of the trace (96 on a CPU, 512 on a GPU)"),
    Option("--device", type=ChoiceOf(("cpu", "cuda")), group=_WHERE, help="the device (cpu; with --host: every available device)"),
    Option("--peers", metavar="NAMES", group=_WHERE, help="GPU: the peers, joined by commas (all that can be imported)"),
    Option("--vllm", metavar="PYTHON", group=_WHERE, help="CPU: an interpreter with vLLM for CPUs, which is measured, too"),
    flag("--flex", "CPU: FlexAttention, too, which is compiled for each workload: some seconds each", _WHERE),
    Option("--repetitions", type=Count, group=_HOW, help="how often each is measured (4 on a CPU, 3 on a GPU, 1 in a stream)"),
    flag("--dirty", "GPU: fill the L2 cache by writing before each run, as do_bench does, not by reading", _HOW),
    flag("--graph", "GPU: measure captured graphs, too", _HOW),
    Option("--html", metavar="FILE", type=Writable(), group="output", help="write a report with figures"),
    Option(
        "--from",
        "source",
        metavar="FILE",
        type=Readable(),
        group="output",
        help="measure nothing: read the results that --output wrote",
    ),
]


MODES = {
    "--stream": ("--device", "--peers", "--vllm", "--repetitions", "--seed", "--layers", "--steps", "--html"),
    "--host": ("--device",),
    "--pool": (),
    "": ("--device", "--set", "--only", "--batch", "--peers", "--vllm", "--flex", "--repetitions", "--dirty", "--graph", "--html"),
}
"""The options that can be combined with each mode; `--json` and `--output` can be combined with all."""


def run(args: Args) -> int:
    figures = _read(args) if args.source is not None else _measure(args)
    answer(args, figures, lambda: _print(figures))
    if args.html is not None:
        Path(args.html).write_text(_report(figures), encoding="utf-8")
    return INTERRUPTED if figures.get("interrupted") else _verdict(figures)


def _given(args: Args) -> dict[str, Any]:
    """The options that were given, except those for input and output of results."""
    excluded = ("json", "output", "html", "source", "command")
    values = {name: value for name, value in vars(args).items() if name not in excluded}
    return {f"--{name}": value for name, value in values.items() if value not in (None, False, ())}


def _mode(args: Args) -> str:
    """The mode: what is measured. Options that do not belong to it are refused."""
    given = _given(args)
    modes = [mode for mode in MODES if mode in given]
    if len(modes) > 1:
        allowed = f"one of {', '.join(filter(None, MODES))}; {modes[0]} is given too"
        raise ArgumentError(modes[1], _shown(given[modes[1]], modes[0]), allowed)
    mode = modes[0] if modes else ""
    html = {} if args.html is None else {"--html": args.html}
    for name, value in (given | html).items():
        if name != mode and name not in MODES[mode]:
            belongs = [other for other, names in MODES.items() if other and name in names]
            allowed = f"only with {' or '.join(belongs)}" if not mode and belongs else f"none: it cannot be combined with {mode}"
            raise ArgumentError(name, _shown(value, mode or "no mode"), allowed)
    return mode


def _shown(value: Any, beside: str) -> Any:
    """A value as an error shows it. A flag has none: the option that it was combined with is shown."""
    return f"with {beside}" if value is True else value


def _read(args: Args) -> dict[str, Any]:
    for name, value in _given(args).items():
        raise ArgumentError(name, _shown(value, "--from"), "none: --from measures nothing")
    try:
        with open(args.source, encoding="utf-8") as file:
            figures = json.load(file)
        _check_results(figures)
    except (OSError, ValueError) as error:
        raise ArgumentError("--from", repr(args.source), f"a file that `quire bench --output` wrote ({error})") from None
    if figures.get("kind") == "figures" and args.html is not None:
        raise ArgumentError("--html", args.html, "none: results of --host and --pool have no HTML report")
    return figures


def _check_results(figures: Any) -> None:
    """Raises a ValueError if a value read from JSON is not a result of this command."""
    if not isinstance(figures, dict):
        raise ValueError("no object in it")
    if figures.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"its schema is {figures['schema']}, this version of Quire reads {SCHEMA}")
    kind = figures.get("kind", "")
    needed = {"stream": {"trace", "model", "rows"}, "figures": {"title", "rows"}}.get(kind, {"platform", "limits", "rows"})
    if not needed <= figures.keys():
        raise ValueError(f"no {', '.join(sorted(needed))} in it")
    try:
        _table(figures)
        _verdict(figures)
        if kind != "figures":
            _report(figures)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"its results are incomplete: {type(error).__name__} {error}") from None


def _measure(args: Args) -> dict[str, Any]:
    mode, given, on_gpu = _mode(args), _given(args), args.device == "cuda"
    for name in ("--set", "--peers", "--dirty", "--graph"):
        if name in given and not on_gpu:
            raise ArgumentError(name, _shown(given[name], "--device cpu"), "only with --device cuda")
    for name in ("--vllm", "--flex", *(("--repetitions",) if mode == "--stream" else ())):
        if name in given and on_gpu:
            raise ArgumentError(name, _shown(given[name], "--device cuda"), "only with --device cpu")
    if args.vllm is not None and shutil.which(args.vllm) is None:
        raise ArgumentError("--vllm", repr(args.vllm), "a Python interpreter that can be executed")
    if mode == "--stream":
        return _measure_stream(args)
    if mode == "--host":
        return _measure_host(args)
    if mode == "--pool":
        from quire.bench.pool import measure_pool

        return _collect_figures(args, "page pool", measure_pool())
    return (_measure_gpu if on_gpu else _measure_cpu)(args)


def _measure_stream(args: Args) -> dict[str, Any]:
    import torch

    from quire.bench.peers import load_streams
    from quire.bench.stream import report, run, setup
    from quire.platform import Platform

    device = args.device or "cpu"
    spec = setup.default_spec(args.stream, device, args.seed or 0).with_counts(args.layers, args.steps)
    platform = Platform.detect(device)
    if device == "cpu":
        names, repetitions = [*run.ALWAYS, *([run.VLLM] if args.vllm else [])], args.repetitions or 1
        missing = {} if args.vllm else {run.VLLM: "no interpreter with vLLM for CPUs was given: --vllm PYTHON"}
        how: dict[str, Any] = {"software": _software(), "missing": missing, "threads": torch.get_num_threads()}
        with progress(len(names) * repetitions * spec.engine.steps, quiet=is_quiet(args)) as tell:
            measured = run.measure_cpu(spec, vllm=args.vllm, repetitions=repetitions, progress=tell)
            return _collect(args, measured, lambda results: report.report(device, platform, spec, results, **how))
    from quire.bench.timing import capture

    peers, missing = load_streams(None if args.peers is None else [name for name in args.peers.split(",") if name])
    # Each implementation call by call and with graphs, each replayed for its times and for its attention times.
    with progress(4 * (1 + len(peers)) * spec.engine.steps, quiet=is_quiet(args)) as tell:
        measured = run.measure_gpu(spec, peers, capture=capture, progress=tell)
        how = {"software": _software(), "missing": missing}
        return _collect(args, measured, lambda results: report.report(device, platform, spec, results, **how))


def _measure_host(args: Args) -> dict[str, Any]:
    return _collect_figures(args, "host", _host_figures(args))


def _collect_figures(args: Args, title: str, measured: Iterable[Any]) -> dict[str, Any]:
    with progress(None, quiet=is_quiet(args)) as tell:

        def told() -> Iterator[Any]:
            for row in measured:
                tell(row.name)
                yield row

        return _collect(args, told(), partial(_figures, title))


def _host_figures(args: Args) -> Iterator[Any]:
    import torch

    if args.device != "cuda":
        from quire.bench.figures import Figure, of_cpu_host
        from quire.bench.host import measure_cpu_host

        try:
            yield from of_cpu_host(measure_cpu_host())
        except quire.KernelError as error:
            yield Figure("attend and step on the CPU", None, note=str(error))
    if args.device == "cuda" or (args.device is None and torch.cuda.is_available()):
        from quire.bench.host_gpu import measure_gpu_host
        from quire.platform import Platform

        Platform.detect("cuda")  # says so if there is none
        yield from measure_gpu_host()


def _figures(title: str, rows: Sequence[Any]) -> dict[str, Any]:
    return {"kind": "figures", "title": title, "software": _software(), "rows": [row.to_dict() for row in rows]}


def _report(figures: Mapping[str, Any]) -> str:
    from quire.bench.html_report import html_report
    from quire.bench.stream.html_report import html_report as stream_html_report

    return (stream_html_report if figures.get("kind") == "stream" else html_report)(figures)


def _verdict(figures: Mapping[str, Any]) -> int:
    from quire.bench.report import verdict
    from quire.bench.stream.report import verdict as stream_verdict

    if figures.get("kind") == "figures":
        return 0
    return (stream_verdict if figures.get("kind") == "stream" else verdict)(figures)


def _measure_cpu(args: Args) -> dict[str, Any]:
    from quire.bench import limits, run, workloads
    from quire.bench.report import report
    from quire.platform import Platform

    chosen = _chosen(args, workloads.CPU_WORKLOADS)
    platform, bounds = Platform.detect("cpu"), limits.cpu_limits()
    implementations = run.EVERYONE if args.flex else run.ALWAYS
    with progress(len(chosen), quiet=is_quiet(args), begins=True) as tell:
        repetitions = args.repetitions or run.REPETITIONS
        measured = run.measure(chosen, bounds, implementations, repetitions=repetitions, progress=tell, vllm=args.vllm)
        return _collect(args, measured, lambda rows: report("cpu", platform, bounds, rows, software=_software()))


def _collect(args: Args, measured: Iterable[Any], figures: Callable[[list[Any]], dict[str, Any]]) -> dict[str, Any]:
    """The figures of all rows. `--output` is written after every row; an interrupt ends the run with the rows until then."""
    rows: list[Any] = []
    try:
        for row in measured:
            rows.append(row)
            save(args, lambda: figures(rows))
    except KeyboardInterrupt:
        return figures(rows) | {"interrupted": True}
    return figures(rows)


def _measure_gpu(args: Args) -> dict[str, Any]:
    import torch

    from quire.bench import gpu, timing, workloads
    from quire.bench.implementations import OWN_ON_CUDA, device_copy
    from quire.bench.limits import gpu_limits
    from quire.bench.peers import load
    from quire.bench.report import report
    from quire.platform import Platform

    chosen = _chosen(args, workloads.CUDA_WORKLOADS if args.set is None else _set(args))
    platform = Platform.detect("cuda")
    peers, missing = load(None if args.peers is None else [name for name in args.peers.split(",") if name])
    from quire.bench.gpu_read import reads

    implementations = OWN_ON_CUDA | {"copy": device_copy} | peers
    timer = partial(timing.by_events, dirty=args.dirty)
    bounds = gpu_limits(timer, reads, torch.device("cuda"))
    with progress(len(chosen), quiet=is_quiet(args), begins=True) as tell:
        measured = gpu.measure(
            chosen,
            bounds,
            implementations,
            timer=timer,
            capture=timing.capture if args.graph else None,
            repetitions=args.repetitions or gpu.REPETITIONS,
            progress=tell,
        )
        how = {"software": _software(), "missing": missing}
        return _collect(args, measured, lambda rows: report("cuda", platform, bounds, rows, **how))


def _set(args: Args) -> Sequence[Any]:
    """The workloads of a set."""
    from quire.bench import cuda_workloads

    if args.batch:
        raise ArgumentError("--set", repr(args.set), "none with --batch, whose batches replace the workloads")
    return cuda_workloads.SETS[args.set]


def _chosen(args: Args, workloads: Sequence[Any]) -> list[Any]:
    from quire.bench.workloads import parse_batch

    if args.batch:
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


def _table(figures: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[str]], list[str], list[str]]:
    """The title, head, lines and colors of the lines of a table, and the notes below it."""
    from quire.bench.figures import Figure
    from quire.bench.figures import table as table_of_figures
    from quire.bench.report import notes, table, title
    from quire.bench.stream import report as stream

    if figures.get("kind") == "figures":
        rows = [Figure(row["name"], row["value"], row["limit"], row["note"]) for row in figures["rows"]]
        head, lines = table_of_figures(rows)
        return figures["title"], head, lines, ["red" if row.passed is False else "" for row in rows], []
    if figures.get("kind") == "stream":
        title, table, notes = stream.title, stream.table, stream.notes
    marks = [
        "red" if not row["right"] else "bold" if row.get("own", row["implementation"] == "quire") else "" for row in figures["rows"]
    ]
    head, lines = table(figures)
    return title(figures), head, lines, marks, list(notes(figures))


def _print(figures: Mapping[str, Any]) -> None:
    title, head, lines, marks, notes = _table(figures)
    _print_table(title, head, lines, marks)
    if figures.get("interrupted"):
        notes.append("interrupted: the workloads that were not measured are missing")
    write("\n".join(notes))


def _print_table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], marks: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < 2 else "right", overflow="fold", no_wrap=not sys.stdout.isatty())
    for cells, mark in zip(lines, marks):
        table.add_row(*cells, style=mark)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


COMMAND = Command("bench", run, HELP, PARAMETERS, EXAMPLES)
