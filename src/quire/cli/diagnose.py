"""`quire diagnose`: what is wrong with a recorded call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import torch

from quire.cli.check import check_call
from quire.cli.command import INTERRUPTED, Args, Argument, Command, Option, Readable, Whole, answer, is_quiet
from quire.cli.progress import announce
from quire.conformance.recording.record import Recorded, load
from quire.conformance.recording.replay import Verdict, here, then
from quire.conformance.reporting.terminal import Printer, printer
from quire.dispatch.catalogue import CATALOGUE
from quire.errors import ArgumentError

HELP = """Runs a recorded call again on this machine, compares what it returned then and now with the reference, and names the
fault."""
EXAMPLES = """\
examples:
  quire diagnose call.safetensors   run a recorded call again, compare with the reference, name the fault
  quire diagnose call.safetensors --kernel triton-mixed
                                    the same on another kernel of this machine
  quire example rocm_story          a reported failure, reproduced and explained

exit status: 0 if both results are correct and the contract holds, 1 if not, 2 invalid arguments, 130 interrupted: what was found
until then is shown
"""
PARAMETERS: list[click.Parameter] = [
    Argument("file", "calls that quire.record saved", metavar="FILE", required=False, type=Readable()),
    Option("--kernel", metavar="NAME", help="the kernel to run it with (default: chosen for this machine)"),
    Option("--device", metavar="NAME", help="device (cuda if there is one, else cpu)"),
    Option("--call", type=Whole(0), default=0, help="which call of the file, from 0 (0)"),
]


def run(args: Args) -> int:
    if args.file is None:
        raise ArgumentError("FILE", "nothing", "a file that quire.record saved")
    names = [kernel.name for kernel in CATALOGUE if kernel.operation == "attend"]
    if args.kernel is not None and args.kernel not in names:
        raise ArgumentError("--kernel", args.kernel, ", ".join(names))
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    calls = load(args.file, device)
    if args.call >= len(calls):
        raise ArgumentError("--call", args.call, f"0 to {len(calls) - 1}: {args.file} has {len(calls)}")
    call = calls[args.call]
    contract, verdicts, interrupted = check_call(call), list[Verdict](), False
    try:
        announce("comparing what the call returned with the reference", is_quiet(args))
        verdicts.append(then(call))
        if all(violation["harmless"] for violation in contract["violations"]):
            announce("running the call again", is_quiet(args))
            verdicts.append(here(call, args.kernel))
        else:
            verdicts.append(Verdict(f"this machine, {device}", "raised", reason="not run: the call violates the contract"))
    except KeyboardInterrupt:
        interrupted = True
    correct = contract["holds"] and not interrupted and all(verdict.status == "correct" for verdict in verdicts)
    found = {"file": args.file, "call": args.call, "contract": contract, "correct": correct, "interrupted": interrupted}
    found["verdicts"] = [verdict.to_dict() for verdict in verdicts]

    answer(args, found, lambda: _report(f"call {args.call} of {args.file}", call, contract, verdicts, interrupted))
    return INTERRUPTED if interrupted else 0 if correct else 1


def _report(title: str, call: Recorded, contract: dict[str, Any], verdicts: Sequence[Verdict], interrupted: bool) -> None:
    """Prints the diagnosis."""
    sheet = printer()
    sheet.heading(f"{title}: quire.{contract['operation']}")
    sheet.text(contract["problem"])
    for violation in call.violations():
        sheet.quote(str(violation))
    if contract["lost_tokens"]:
        tokens = contract["lost_tokens"]
        sheet.item(
            "WRONG", "lost in the write", f"tokens {tokens} of k and v: their slots do not hold the values that were written"
        )
    for verdict in verdicts:
        _show(verdict, sheet)
    if interrupted:
        sheet.item("stopped", "interrupted before the diagnosis was complete")


def _show(verdict: Any, show: Printer) -> None:
    word = {"correct": "ok", "wrong": "WRONG", "raised": "raised"}[verdict.status]
    if verdict.finding is None:
        show.item(word, verdict.of, verdict.reason or f"error {verdict.error:.2g} of the budget")
        return
    finding = verdict.finding
    lines = [
        finding.summary,
        f"at {finding.where}",
        f"{verdict.wrong} elements beyond the error budget, the largest error that rounding explains",
    ]
    if len(finding.equivalent_faults) > 1:
        others = ", ".join(name for name in finding.equivalent_faults if name != finding.fault)
        lines.append(f"indistinguishable in this call: {others}")
    show.item(word, f"{verdict.of}: {finding.fault}", *lines)
    show.table(("nearest predictions", "distance in budgets"), [(name, f"{off:.3g}") for name, off in finding.ranking[:5]])


COMMAND = Command("diagnose", run, HELP, PARAMETERS, EXAMPLES)
