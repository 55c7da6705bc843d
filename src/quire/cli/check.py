"""`quire check`: whether a recorded call keeps the contract, and whether the tokens that it wrote are where they belong."""

from __future__ import annotations

import argparse
import json
from typing import Any

from quire.conformance.record import Recorded, load

HELP = "say which rules of the contract a recorded call breaks, and where"
EXAMPLES = """\
examples:
  quire check call.safetensors            every call of a file that quire.record wrote
  quire check call.safetensors --json     for programs

exit status: 0 if every call keeps the contract, 1 if one does not, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="calls that quire.record saved")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    calls = load(args.file)
    answers = [answer(call) for call in calls]
    if args.json:
        print(json.dumps({"file": args.file, "calls": answers}, indent=2))
    else:
        print("\n\n".join(_words(number, call, found) for number, (call, found) in enumerate(zip(calls, answers))))
    return 0 if all(found["holds"] for found in answers) else 1


def answer(call: Recorded) -> dict[str, Any]:
    """What was found, for programs."""
    found, lost = call.violations(), call.lost_tokens()
    return {
        "operation": call.notes["operation"],
        "problem": str(call.problem),
        "device": call.notes["device"],
        "error": call.notes["error"],
        "violations": [violation.to_dict() for violation in found],
        "lost_tokens": lost,
        "holds": not lost and not call.notes["error"] and all(violation.harmless for violation in found),
    }


def _words(number: int, call: Recorded, found: dict[str, Any]) -> str:
    saved = call.notes["pages"]
    lines = [
        f"call {number}: quire.{found['operation']} on {found['device']}, {saved['saved']} of {saved['of']} pages saved",
        f"  {found['problem']}",
    ]
    if found["error"]:
        lines.append(f"  it raised {found['error']}")
    lines += [str(violation) for violation in call.violations()]
    if found["lost_tokens"]:
        lines.append(f"[residency] rows {found['lost_tokens']} of k and v: their slots do not hold what was written")
    if found["holds"]:
        lines.append("  it keeps the contract")
    return "\n".join(lines)
