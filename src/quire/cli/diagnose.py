"""`quire diagnose`: what is wrong with a recorded call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import torch

from quire.cli.check import answer as contract_of
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
  quire example rocm_story          a failure of the field, rebuilt and solved

exit status: 0 if nothing is wrong, 1 if something is, 2 an argument is wrong, 130 interrupted: what was found until then is shown
"""
PARAMETERS: list[click.Parameter] = [
    Argument("file", "calls that quire.record saved", metavar="FILE", required=False, type=Readable()),
    Option("--kernel", metavar="NAME", help="the kernel to run it with (the one that fits this machine)"),
    Option("--device", metavar="NAME", help="where to run it (cuda if there is one, else cpu)"),
    Option("--call", type=Whole(0), default=0, help="which call of the file, from 0 (0)"),
    Option("--story", hidden=True, metavar="NAME"),
]


def run(args: Args) -> int:
    if args.story is not None:
        raise ArgumentError("--story", args.story, "none: the story is an example now; run `quire example rocm_story`")
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
    contract, verdicts, interrupted = contract_of(call), list[Verdict](), False
    try:
        announce("comparing what the call returned with the reference", is_quiet(args))
        verdicts.append(then(call))
        if all(violation["harmless"] for violation in contract["violations"]):
            announce("running the call again", is_quiet(args))
            verdicts.append(here(call, args.kernel))
        else:
            verdicts.append(Verdict(f"this machine, {device}", "raised", reason="not run: the call breaks the contract"))
    except KeyboardInterrupt:
        interrupted = True
    right = contract["holds"] and not interrupted and all(verdict.status == "right" for verdict in verdicts)
    found = {"file": args.file, "call": args.call, "contract": contract, "right": right, "interrupted": interrupted}
    found["verdicts"] = [verdict.to_dict() for verdict in verdicts]

    answer(args, found, lambda: _report(f"call {args.call} of {args.file}", call, contract, verdicts, interrupted))
    return INTERRUPTED if interrupted else 0 if right else 1


def _report(title: str, call: Recorded, contract: dict[str, Any], verdicts: Sequence[Verdict], interrupted: bool) -> None:
    """Prints what was found."""
    sheet = printer()
    sheet.heading(f"{title}: quire.{contract['operation']}")
    sheet.text(contract["problem"])
    for violation in call.violations():
        sheet.quote(str(violation))
    if contract["lost_tokens"]:
        tokens = contract["lost_tokens"]
        sheet.item("WRONG", "lost in the write", f"tokens {tokens} of k and v: their slots do not hold what was written there")
    for verdict in verdicts:
        _show(verdict, sheet)
    if interrupted:
        sheet.item("stopped", "interrupted before the diagnosis was complete")


def _show(verdict: Any, show: Printer) -> None:
    word = {"right": "ok", "wrong": "WRONG", "raised": "raised"}[verdict.status]
    if verdict.finding is None:
        show.item(word, verdict.of, verdict.reason or f"off by {verdict.error:.2g} of what its precision may lose")
        return
    finding = verdict.finding
    lines = [finding.summary, f"at {finding.where}", f"{verdict.wrong} elements beyond what precision may lose"]
    if len(finding.alike) > 1:
        lines.append(f"on this call the same as: {', '.join(name for name in finding.alike if name != finding.fault)}")
    show.item(word, f"{verdict.of}: {finding.fault}", *lines)
    show.table(("nearest predictions", "off by, in budgets"), [(name, f"{off:.3g}") for name, off in finding.ranking[:5]])


COMMAND = Command("diagnose", run, HELP, PARAMETERS, EXAMPLES)
