"""`quire doctor`: the machine, the versions, which kernels can run here, and whether their results are correct."""

from __future__ import annotations

import json
import platform as host
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import click
import torch

import quire
from quire.cli import version
from quire.cli.command import INTERRUPTED, Args, Command, Option, answer, flag, is_quiet
from quire.cli.engines import MISSING, describe_engine, engine_rows, missing_engines
from quire.cli.progress import progress
from quire.cli.self_check import self_check
from quire.cli.sheet import show, write
from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.choose import OPERATIONS, choose
from quire.dispatch.kernel import BUILD
from quire.dispatch.summary import Line
from quire.kernels.native import library
from quire.platform import Platform, cpu_flags
from quire.problem import Extent, Problem

HELP = """Shows the machine, the versions, the kernels and the installed engines, and checks every kernel that can run here against
the reference, each in a subprocess: a kernel that crashes is reported, too."""
EXAMPLES = """\
examples:
  quire doctor                       one screen
  quire doctor --all                 every kernel with its errors, every limit that does not hold, every engine
  quire doctor --json                for programs
  quire doctor --output doctor.json  for a bug report

exit status: 0 if every kernel that can run here is correct, 1 otherwise, 130 interrupted: the kernels that were checked are shown.
Engines do not affect it.
"""

PACKAGES = ("torch", "triton", "numpy")
AMX_NOTE = (
    "this CPU advertises AMX under a hypervisor: where the hypervisor hides AMX's palette, torch's own bf16 matmul dies with "
    "SIGILL. Quire's kernels do not call it; for other torch code set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts."
)
COLORS = {"correct": "bold green", "WRONG": "bold red", "verdict": "bold", "note": "yellow"}
PARAMETERS: list[click.Parameter] = [
    flag("--all", "every kernel with its errors, and every limit that does not hold", default=False),
    Option("--check", nargs=2, hidden=True),
]


def run(args: Args) -> int:
    if args.check:
        print(json.dumps(self_check(*args.check)))
        return 0
    report = examine(quiet=is_quiet(args))
    answer(args, report, (lambda: write(_text(report), COLORS)) if args.all else lambda: show(_short(report), COLORS))
    return INTERRUPTED if report["interrupted"] else 0 if report["healthy"] else 1


def examine(quiet: bool = True) -> dict[str, Any]:
    """The machine and its kernels, ready for JSON. An interrupt ends it with the kernels that were checked until then."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    kernels: list[dict[str, Any]] = []
    interrupted = False
    try:
        with progress(len(devices) * len(CATALOGUE), quiet=quiet) as tell:
            for device in devices:
                for row in _kernels(device):
                    kernels.append(row)
                    tell(f"{row['operation']} {row['kernel']}")
    except KeyboardInterrupt:
        interrupted = True
    return {
        "versions": {"python": host.python_version(), "quire": quire.__version__, **{name: version(name) for name in PACKAGES}},
        "machine": {device: Platform.detect(device).to_dict() for device in devices},
        "notes": [_native(), _compile_cache(), *([AMX_NOTE] if {"amx_bf16", "hypervisor"} <= cpu_flags() else [])],
        "kernels": kernels,
        "engines": engine_rows(),
        "interrupted": interrupted,
        "healthy": not interrupted and not any(map(_is_wrong, kernels)),
    }


def _native() -> str:
    """Which instruction set the native kernels use here, or why there are none and what would help."""
    if not library.FILE.exists():
        return f"the native CPU kernels are not built, so torch's operators run on this CPU; to get them: {BUILD}"
    try:
        found = library.library()
    except quire.KernelError as error:
        return str(error)
    *others, best = found.levels
    return f"the native CPU kernels use {best}" + (f"; this CPU also runs {', '.join(others)}" if others else "")


def _compile_cache() -> str:
    """Where compiled GPU kernels are kept."""
    if find_spec("triton") is None:
        return "Triton is not installed, so there is no compile cache"
    from triton import knobs

    return f"compiled GPU kernels are kept in {knobs.cache.dir}"


def _kernels(device: str) -> Iterator[dict[str, Any]]:
    """Every kernel of the catalogue on a device: why it cannot run there, or what its check says."""
    platform = Platform.detect(device)
    problem = Problem(q_heads=8, kv_heads=2, head_dim=64, page_size=16, device=device)
    extent = Extent(seqs=4, tokens=19, max_q_len=16, max_kv_len=64)
    results: dict[str, tuple[dict[str, list[dict[str, Any]]], str | None]] = {}
    for operation in OPERATIONS:
        for kernel in (one for one in CATALOGUE if one.operation == operation):
            # Kernels for shared prefixes are checked with a batch that has some.
            asked, size = problem.replace(prefixes=kernel.shares > 0), extent._replace(saved_keys=kernel.shares)
            ((_, findings),) = choose(asked, size, platform, operation=operation, catalogue=(kernel,)).candidates
            refusals = [str(finding) for finding in findings if not finding.holds]
            if not refusals and kernel.name not in results:
                results[kernel.name] = run_check((sys.executable, "-m", "quire", "doctor", "--check", kernel.name, device))
            checks, fault = ({}, None) if refusals else results[kernel.name]
            row = {"operation": operation, "kernel": kernel.name, "device": device, "summary": kernel.summary}
            yield {**row, "refusals": refusals, "checks": checks.get(operation, []), "fault": fault}


def run_check(command: Sequence[str], timeout: float = 600) -> tuple[dict[str, list[dict[str, Any]]], str | None]:
    """The checks that a subprocess prints, and what went wrong with it. A wrong kernel may end its process."""
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {}, f"gave no result in {timeout:g} s"
    if child.returncode < 0:
        return {}, f"died with {signal.Signals(-child.returncode).name}"
    if child.returncode:
        return {}, (child.stderr.strip().splitlines() or [f"ended with status {child.returncode}"])[-1]
    return json.loads(child.stdout), None


def _is_wrong(row: dict[str, Any]) -> bool:
    return bool(row["fault"]) or any(check["ok"] is False for check in row["checks"])


def _outcome(report: dict[str, Any]) -> str:
    if any(map(_is_wrong, report["kernels"])):
        return "at least one kernel gives wrong results"
    return "interrupted" if report["interrupted"] else "every kernel that can run here is correct"


def _short(report: dict[str, Any]) -> list[Line]:
    """One screen: the correct kernels by the types that were checked, and those that cannot run here by their first reason."""
    lines = [Line("versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items()))]
    lines += [Line("machine", str(Platform.detect(device))) for device in report["machine"]]
    lines += [Line("note", note) for note in report["notes"]]
    correct: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for row in report["kernels"]:
        name = f"{row['kernel']} ({row['operation']}, {row['device']})"
        if row["refusals"]:
            refused.setdefault(row["refusals"][0], []).append(f"{row['kernel']} ({row['operation']})")
        elif _is_wrong(row):
            lines.append(Line("WRONG", f"{name}: {_verdict(row).removeprefix('WRONG: ')}"))
        else:
            types = ", ".join(check["type"] for check in row["checks"] if check["ok"])
            correct.setdefault(types or "nothing to check", []).append(name)
    lines += [Line("correct", f"{', '.join(names)}: {types}") for types, names in correct.items()]
    lines += [Line("cannot run", f"{', '.join(names)}: {reason}") for reason, names in refused.items()]
    lines += [Line("engine", describe_engine(row)) for row in report["engines"] if row["state"] != MISSING]
    missing = missing_engines(report["engines"])
    lines += [Line("engine", f"not installed: {', '.join(missing)}")] if missing else []
    return [*lines, Line("verdict", _outcome(report))]


def _text(report: dict[str, Any]) -> str:
    """Everything."""
    lines = ["versions", "  " + ", ".join(f"{name} {number}" for name, number in report["versions"].items()), "machine"]
    lines += [f"  {Platform.detect(device)}" for device in report["machine"]]
    lines += [f"  note: {note}" for note in report["notes"]]
    lines.append("kernels")
    for row in report["kernels"]:
        lines.append(f"  {row['operation']:6} {row['kernel']} on {row['device']}: {_verdict(row)}")
    lines.append("engines")
    lines += [f"  {describe_engine(row, everything=True)}" for row in report["engines"]]
    return "\n".join((*lines, f"verdict: {_outcome(report)}"))


def _verdict(row: dict[str, Any]) -> str:
    if row["refusals"]:
        return f"cannot run here ({'; '.join(row['refusals'])})"
    if row["fault"]:
        return f"WRONG: {row['fault']}"
    words = {
        True: "correct in {type} (error {error:.2g})",
        False: "WRONG in {type} (error {error:.2g}, allowed {allowed:g})",
        None: "no {type}",
    }
    return ", ".join(words[check["ok"]].format(**check) for check in row["checks"])


COMMAND = Command("doctor", run, HELP, PARAMETERS, EXAMPLES)
