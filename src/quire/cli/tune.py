"""`quire tune`: the entries of the tuning table that are fastest on this GPU."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from quire.cli.bench import _print_table, _software
from quire.cli.command import INTERRUPTED, Args, Command, Count, Option, answer, flag, is_quiet, save
from quire.cli.progress import progress
from quire.cli.sheet import write
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.bench.tune import SearchResult, Trial, TuningTarget

HELP = "Searches for the best tile sizes of the Triton kernels on this GPU, and prints them as entries of the tuning table."
EXAMPLES = """\
examples:
  quire tune --list                       the table as it is, and what would be tried; needs no GPU
  quire tune --quick                      fewer candidates, two workloads each
  quire tune --only 'decode.*head_dim 128'
  quire tune --output tune.json           every candidate with its times, updated after every entry of the table

How much a program computes at a time (keys a tile, stages, warps, programs a multiprocessor) is a table in
quire/kernels/triton/host/tuning.py: nothing is tuned while the library is used. This command makes entries for a GPU without one,
or for a new version of Triton. For each kernel, element size of the cache and head_dim it compiles the candidates (in --jobs
processes, seconds each), checks every result, times the correct ones on two to five workloads of `quire bench`, and selects the
best by the geometric mean of the times, timed once more in turns with the entry of the table. Candidates that do not compile,
need too much memory, spill registers, give wrong results or launch the same as another are listed and never chosen. An entry
takes hundreds of compilations: minutes, fewer with more CPUs or with --quick. The GPU should be idle. The entries of the Gluon
kernel, which is for Hopper only, are not searched.

To use the result, paste the printed entries into TABLE, above the first entry that matches this GPU now and in the order in which
they are printed (the first entry that matches is used); then run the tests and `quire bench --device cuda`.

exit status: 0 if a valid candidate was found for every entry, 1 otherwise, 2 an argument is wrong or there is no GPU, 130
interrupted: the entries that were found until then are printed
"""

SHOWN = 8
"""The fastest candidates of an entry that are printed; --json has all."""


PARAMETERS: list[click.Parameter] = [
    flag("--list", "measure nothing: print the table and the candidates"),
    Option("--only", metavar="REGEX", help="entries whose name matches, such as 'mixed.*8-bit'"),
    flag("--quick", "fewer candidates and workloads"),
    Option("--jobs", type=Count, help="processes that compile (one for each CPU)"),
]


def run(args: Args) -> int:
    from quire.bench.tune import rounds_of

    targets = _chosen(args)
    if args.list:
        answer(args, _listed(targets, args.quick), lambda: _list(targets, args.quick))
        return 0
    missing = _missing()
    if missing:
        raise click.UsageError(
            f"{missing}. Tuning measures on the GPU: it needs an NVIDIA or AMD GPU, a build of torch that sees it, and "
            "Triton. `quire tune --list` works anywhere",
            click.get_current_context(silent=True),
        )
    found: list[SearchResult] = []
    interrupted = False
    jobs = args.jobs or os.cpu_count() or 1
    rounds = sum(len(rounds_of(target.kernel, args.quick)) for target in targets)
    try:
        with progress(rounds, quiet=is_quiet(args)) as tell:
            for target in targets:
                found.append(tune(target, quick=args.quick, jobs=jobs, tell=tell))
                save(args, lambda: _report(found, args.quick))
    except KeyboardInterrupt:
        interrupted = True
    answer(args, lambda: _report(found, args.quick) | {"interrupted": interrupted}, lambda: _print(found))
    if interrupted:
        return INTERRUPTED
    return 0 if all(one.best is not None for one in found) else 1


def tune(target: TuningTarget, *, quick: bool, jobs: int, tell: Any) -> SearchResult:
    """Searches on this GPU."""
    from quire.bench.gpu import release_memory
    from quire.bench.timing import by_events
    from quire.bench.tune import CompilePool, GpuWorkload, duplicates, rounds_of, search
    from quire.platform import Platform

    platform = Platform.detect("cuda")
    workloads = target.workloads(quick)
    gpu_workloads = [GpuWorkload(target.kernel, workload) for workload in workloads]
    what = (target.kernel, workloads, platform)
    how = {"same": partial(duplicates, *what), "prepare": partial(CompilePool(jobs), *what), "progress": tell}
    found = search(target, target.current(platform), rounds_of(target.kernel, quick), gpu_workloads, by_events, **how)
    del gpu_workloads
    release_memory()
    return found


def _missing() -> str | None:
    from importlib.util import find_spec

    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    return None if find_spec("triton") else "Triton is not installed"


def _chosen(args: Args) -> list[TuningTarget]:
    from quire.bench.tune import TUNING_TARGETS

    try:
        chosen = [target for target in TUNING_TARGETS if re.search(args.only or "", target.label)]
    except re.error as error:
        raise ArgumentError("--only", repr(args.only), f"a regular expression ({error})") from None
    if not chosen:
        raise ArgumentError("--only", repr(args.only), "a match for one of: " + "; ".join(one.label for one in TUNING_TARGETS))
    return chosen


def _listed(targets: Sequence[TuningTarget], quick: bool) -> dict[str, Any]:
    from quire.bench.tune import literal, rounds_of
    from quire.kernels.triton.host.tuning import TABLE

    tried = {target.label: [dict(grid) for grid in rounds_of(target.kernel, quick)] for target in targets}
    return {"table": [literal(row) for row in TABLE], "rounds": tried}


def _list(targets: Sequence[TuningTarget], quick: bool) -> None:
    from quire.bench.tune import literal, rounds_of
    from quire.kernels.triton.host.tuning import TABLE

    lines = ["the table; the first entry that matches is used:", *(f"  {literal(row)}" for row in TABLE)]
    for target in targets:
        lines += ["", f"{target.label}, timed on: " + "; ".join(workload.name for workload in target.workloads(quick))]
        for number, grid in enumerate(rounds_of(target.kernel, quick), start=1):
            values = ", ".join(f"{name} {'/'.join(map(_short, tried))}" for name, tried in grid.items())
            lines.append(f"  round {number}, {math.prod(map(len, grid.values()))} candidates: {values}")
    write("\n".join(lines), {"round": "dim"})


def _short(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


def _report(found: Sequence[SearchResult], quick: bool) -> dict[str, Any]:
    from quire.platform import Platform

    rows = [one.to_dict() for one in found]
    return {"platform": Platform.detect("cuda").to_dict(), "software": _software(), "quick": quick, "rows": rows}


def _print(found: Sequence[SearchResult]) -> None:
    from quire.bench.tune import literal

    for one in found:
        timed = sorted((trial for trial in one.trials if trial.seconds), key=lambda trial: trial.mean)
        shown = timed[:SHOWN]
        marks = ["" if trial.fit else "red" for trial in shown]
        width = max((len(trial.seconds) for trial in shown), default=0)
        head = ("candidate", "fault", "spills", "mean us", *(w.name.partition(":")[0] for w in one.kind.workloads()[:width]))
        _print_table(one.kind.label, head, [_cells(one, trial) for trial in shown], marks)
        for words, count, spills, example in _faults(one):
            print(f"{count} rejected: {words}{f' (up to {spills})' if spills else ''}, such as {example}")
        print()
    print("entries to paste into TABLE of kernels/triton/host/tuning.py, above the first that matches this GPU now, in this order:")
    for one in found:
        if one.best is None:
            print(f"    # {one.kind.label}: no valid candidate")
        else:
            print(f"    {literal(one.best.row)},  # {_gain(one)}")


def _gain(one: SearchResult) -> str:
    if one.best is not None and one.best.row == one.current.row:
        return "unchanged: no candidate is faster"
    return (
        f"the table's entry was rejected: {one.current.fault}" if one.gain is None else f"{one.gain:.3f} times as fast as the table"
    )


def _cells(one: SearchResult, trial: Trial) -> tuple[str, ...]:
    spills = "?" if trial.spills is None else str(trial.spills)
    return (_words(one, trial), trial.fault, spills, *(f"{seconds * 1e6:.1f}" for seconds in (trial.mean, *trial.seconds)))


def _words(one: SearchResult, trial: Trial) -> str:
    """The parameters in which candidates differ, and whether it is the entry of the table."""
    names = [name for name in trial.row._fields if len({getattr(other.row, name) for other in one.trials}) > 1]
    words = " ".join(f"{name}={getattr(trial.row, name)}" for name in names)
    return words + " (the table's)" if trial.row == one.current.row else words


def _faults(one: SearchResult) -> list[tuple[str, int, int, str]]:
    """Every fault, how many candidates have it, the most that they spill, and one of them."""
    faults: dict[str, list[Trial]] = {}
    for trial in one.trials:
        if not trial.fit:
            faults.setdefault(trial.fault, []).append(trial)
    return [(fault, len(who), max(trial.spills or 0 for trial in who), _words(one, who[0])) for fault, who in faults.items()]


COMMAND = Command("tune", run, HELP, PARAMETERS, EXAMPLES)
