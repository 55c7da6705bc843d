"""`quire diagnose`: what is wrong with a recorded call, or the story of the seeds."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from quire.conformance.paper import Paper, paper
from quire.errors import ArgumentError

HELP = "say what is wrong with a recorded call, or tell the story of the seeds"
EXAMPLES = """\
examples:
  quire diagnose --story seeds      five documents about 8192 wrong numbers, solved in 15 to 30 seconds
  quire diagnose call.safetensors   run a recorded call again, compare with the reference, name the fault
  quire diagnose call.safetensors --kernel triton-mixed
                                    the same on another kernel of this machine

exit status: 0 if nothing is wrong (or the story holds), 1 if something is, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="a call that quire.record saved")
    parser.add_argument("--kernel", metavar="NAME", help="the kernel to run it with; by default the one that fits this machine")
    parser.add_argument("--device", metavar="NAME", help="where to run it (cuda if there is one, else cpu)")
    parser.add_argument("--call", type=int, default=0, metavar="N", help="which call of the file, from 0 (0)")
    parser.add_argument("--story", choices=("seeds",), help="rebuild a failure of the field and solve it")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.story is None):
        raise ArgumentError("FILE", "both FILE and --story" if args.story else None, "either a recorded call or --story seeds")
    return _file(args) if args.file else _story(args)


def _file(args: argparse.Namespace) -> int:
    from quire.cli.check import answer
    from quire.conformance.record import load
    from quire.conformance.replay import Verdict, here, then
    from quire.dispatch.catalogue import CATALOGUE

    names = [kernel.name for kernel in CATALOGUE if kernel.operation == "attend"]
    if args.kernel is not None and args.kernel not in names:
        raise ArgumentError("--kernel", args.kernel, ", ".join(names))
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    calls = load(args.file, device)
    if not 0 <= args.call < len(calls):
        raise ArgumentError("--call", args.call, f"0 to {len(calls) - 1}: {args.file} has so many")
    call = calls[args.call]
    contract = answer(call)
    verdicts = [then(call)]
    if contract["violations"] and not all(violation["harmless"] for violation in contract["violations"]):
        verdicts.append(Verdict(f"this machine, {device}", "raised", reason="not run: the call breaks the contract"))
    else:
        verdicts.append(here(call, args.kernel))
    right = contract["holds"] and all(verdict.status == "right" for verdict in verdicts)
    if args.json:
        found = [verdict.to_dict() for verdict in verdicts]
        print(json.dumps({"file": args.file, "call": args.call, "contract": contract, "verdicts": found, "right": right}, indent=2))
        return 0 if right else 1
    show = paper()
    show.heading(f"call {args.call} of {args.file}: quire.{contract['operation']}")
    show.text(contract["problem"])
    for violation in call.violations():
        show.quote(str(violation))
    if contract["lost_tokens"]:
        rows = contract["lost_tokens"]
        show.item("WRONG", "lost in the write", f"rows {rows} of k and v: their slots do not hold what was written there")
    for verdict in verdicts:
        _show(verdict, show)
    return 0 if right else 1


def _show(verdict: Any, show: Paper) -> None:
    word = {"right": "ok", "wrong": "WRONG", "raised": "raised"}[verdict.status]
    if verdict.finding is None:
        show.item(word, verdict.of, verdict.reason or f"off by {verdict.error:.2g} of what its precision may lose")
        return
    finding = verdict.finding
    lines = [finding.summary, f"at {finding.where}", f"{verdict.wrong} elements beyond what precision may lose"]
    if len(finding.alike) > 1:
        lines.append(f"on this call the same as: {', '.join(name for name in finding.alike if name != finding.fault)}")
    show.item(word, f"{verdict.of}: {finding.fault}", *lines)
    show.grid(("nearest predictions", "off by, in budgets"), [(name, f"{off:.3g}") for name, off in finding.ranking[:5]])


def _story(args: argparse.Namespace) -> int:
    from quire.conformance.story import seeds
    from quire.conformance.telling import tell

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)

    story = seeds(progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(story.to_dict(), indent=2))
    else:
        tell(story, paper())
    return 0 if story.holds else 1
