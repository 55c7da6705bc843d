"""`quire check`: whether a recorded call keeps the contract, and whether the tokens that it wrote are in their slots."""

from __future__ import annotations

from typing import Any

from quire.cli.command import INTERRUPTED, Args, Argument, Command, Readable, answer
from quire.conformance.recording.record import Recorded, load

HELP = "Lists the rules of the contract that a recorded call violates, and where. Nothing is run again."
EXAMPLES = """\
examples:
  quire check call.safetensors            every call of a file that quire.record wrote
  quire check call.safetensors --json     for programs

exit status: 0 if every call keeps the contract, 1 if one does not, 2 invalid arguments, 130 interrupted
"""


def run(args: Args) -> int:
    calls = load(args.file)
    results: list[dict[str, Any]] = []
    interrupted = False
    try:
        for call in calls:
            results.append(check_call(call))
    except KeyboardInterrupt:
        interrupted = True
    texts = [_text(number, call, found) for number, (call, found) in enumerate(zip(calls, results))]
    texts += [f"interrupted after {len(results)} of {len(calls)} calls"] if interrupted else []
    answer(args, {"file": args.file, "calls": results, "interrupted": interrupted}, "\n\n".join(texts))
    return INTERRUPTED if interrupted else 0 if all(found["holds"] for found in results) else 1


def check_call(call: Recorded) -> dict[str, Any]:
    """The result for one call, as in the JSON output."""
    found, lost = call.violations(), call.lost_tokens()
    return {
        "operation": call.metadata["operation"],
        "problem": str(call.problem),
        "device": call.metadata["device"],
        "error": call.metadata["error"],
        "violations": [violation.to_dict() for violation in found],
        "lost_tokens": lost,
        "holds": not lost and not call.metadata["error"] and all(violation.harmless for violation in found),
    }


def _text(number: int, call: Recorded, found: dict[str, Any]) -> str:
    saved = call.metadata["pages"]
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


COMMAND = Command(
    "check", run, HELP, [Argument("file", "calls that quire.record saved", metavar="FILE", type=Readable())], EXAMPLES
)
