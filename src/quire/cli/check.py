"""`quire check`: whether a recorded call keeps the contract, and whether the tokens that it wrote are where they belong."""

from __future__ import annotations

from typing import Any

from quire.cli.command import INTERRUPTED, Args, Argument, Command, Readable
from quire.cli.command import answer as give
from quire.conformance.recording.record import Recorded, load

HELP = "Says which rules of the contract a recorded call breaks, and where. Nothing is run again."
EXAMPLES = """\
examples:
  quire check call.safetensors            every call of a file that quire.record wrote
  quire check call.safetensors --json     for programs

exit status: 0 if every call keeps the contract, 1 if one does not, 2 an argument is wrong, 130 interrupted
"""


def run(args: Args) -> int:
    calls = load(args.file)
    answers: list[dict[str, Any]] = []
    interrupted = False
    try:
        for call in calls:
            answers.append(answer(call))
    except KeyboardInterrupt:
        interrupted = True
    words = [_words(number, call, found) for number, (call, found) in enumerate(zip(calls, answers))]
    words += [f"interrupted after {len(answers)} of {len(calls)} calls"] if interrupted else []
    give(args, {"file": args.file, "calls": answers, "interrupted": interrupted}, "\n\n".join(words))
    return INTERRUPTED if interrupted else 0 if all(found["holds"] for found in answers) else 1


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


COMMAND = Command(
    "check", run, HELP, [Argument("file", "calls that quire.record saved", metavar="FILE", type=Readable())], EXAMPLES
)
