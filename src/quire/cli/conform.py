"""`quire conform`: is a paged-attention function right, and if not, what is wrong with it?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quire.cli.command import (
    INTERRUPTED,
    Args,
    Argument,
    ChoiceOf,
    Command,
    Count,
    Number,
    OneOfNames,
    Option,
    Readable,
    Whole,
    Writable,
    answer,
    flag,
    is_quiet,
)
from quire.cli.progress import progress
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.conformance.cases.case import Case
    from quire.conformance.reporting.report import Finding, Report, Result

SHOWN = 8
"""How much of a long list a summary shows."""
NOTHING_RAN = 3
"""The exit status of a run that computed nothing."""
HELP = "Runs any paged-attention function through cases that can fail, and names what is wrong with it."
EXAMPLES = """\
examples:
  quire conform cpu                                     our own kernel of this CPU, in seconds
  quire conform my_kernel.py:attention --level standard a function of yours; 20 lines make an adapter (quire example 05)
  quire conform vllm.unified_attention --html out.html  a peer that is installed, and a report with figures
  quire conform triton-mixed --level standard --jobs 16 on a GPU: 16 processes, which compile in parallel
  quire conform triton-mixed --case 'window q_lens=1,9 kv_lens=40,50 window=7,0'
                                                        one case again, from the line that a report prints
  quire conform --power --level standard                plant every fault in every case: what can the suite see?
  quire conform --compare                               how many of the faults do other projects' tests see?

A function takes its tensors by name: q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, and an argument for each
feature it supports: window, alibi, sinks, causal, mask, positions, k_scale, v_scale, new_k, new_v, lse, ... A feature it has no
argument for is one it does not support; `SUPPORTS = {"page_size": (16, 32)}` in its file declares finer limits.
`python -c 'import quire.conformance.runner.target as t; help(t)'` has the whole signature, docs/faults.md every fault.

exit status: 0 if the target is right in every case that it supports, 1 if not, 2 an argument is wrong, 3 nothing was computed:
every case was refused or skipped, 130 interrupted: what was found until then is reported
"""
_WHAT, _HOW, _ALONE = "what is tested", "how it is run", "without a target"


def _targets() -> tuple[str, ...]:
    from quire.conformance.runner.target import OURS

    return OURS


PARAMETERS: list[click.Parameter] = [
    Argument(
        "target",
        "a kernel of ours, a peer, file.py:function or package.module:function",
        required=False,
        metavar="[TARGET]",
        type=OneOfNames(_targets, files=True),
    ),
    Option(
        "--level",
        type=ChoiceOf(("smoke", "standard", "full")),
        default="smoke",
        group=_WHAT,
        help="how much: seconds, minutes, or all (smoke)",
    ),
    Option("--only", metavar="REGEX", group=_WHAT, help="cases whose name matches"),
    Option("--case", metavar="LINE", group=_WHAT, help="one case, from the line that was printed for it"),
    Option(
        "--known",
        metavar="FILE",
        type=Readable(),
        group=_WHAT,
        help="known failures, a line each: target, case, why; one that passes is reported",
    ),
    Option("--device", metavar="NAME", group=_HOW, help="where to run it (where the target says)"),
    Option(
        "--timeout", metavar="SECONDS", type=Number(0, "seconds"), default=120.0, group=_HOW, help="how long a call may take (120)"
    ),
    Option(
        "--within",
        metavar="SECONDS",
        type=Number(0, "seconds"),
        default=float("inf"),
        group=_HOW,
        help="begin no case after so long; those that are left are reported as skipped (no limit)",
    ),
    Option(
        "--jobs",
        type=Count,
        default=1,
        group=_HOW,
        help="share the cases among N processes; on a GPU most of the time goes into compiling (1)",
    ),
    flag("--in-process", "run a function or a peer in this process (for a debugger), not in a subprocess", _HOW),
    flag("--power", "plant every fault in every case, and prove that each case sees what it must", _ALONE),
    Option(
        "--names",
        metavar="N",
        type=Whole(0),
        default=0,
        group=_ALONE,
        help="with --power: also diagnose every N-th planted fault (none)",
    ),
    flag("--compare", "plant the same faults under other suites' inputs and tolerances", _ALONE),
    Option("--junit", metavar="FILE", type=Writable(), group="output", help="write JUnit XML"),
    Option("--html", metavar="FILE", type=Writable(), group="output", help="write a report with figures"),
]


def run(args: Args) -> int:
    if args.power and args.compare:
        raise ArgumentError("--compare", "beside --power", "one of them")
    if args.power or args.compare:
        from quire.cli import conform_power

        if args.target is not None:
            raise ArgumentError(
                "TARGET", args.target, "none beside --power or --compare: faults are planted in a kernel of the kit's"
            )
        return conform_power.power(args, find_cases(args)) if args.power else conform_power.compare(args)
    if args.target is None:
        raise ArgumentError("TARGET", "nothing", "a kernel, a peer or file.py:function; or --power, or --compare")
    if args.names:
        raise ArgumentError("--names", args.names, "only beside --power")
    return _conform(args)


def find_cases(args: Args) -> list[Case]:
    from quire.conformance.cases.case import Case
    from quire.conformance.cases.suite import cases

    if args.case is not None:
        if args.only is not None:
            raise ArgumentError("--only", args.only, "none beside --case, which is one case")
        if "=" not in args.case:
            return [_case_named(args.case.strip())]
        case = Case.parse(args.case)
        for q_len, kv_len in zip(case.q_lens, case.kv_lens):
            if q_len > kv_len and case.causal == "yes":
                raise ArgumentError("--case", f"q_len {q_len} over kv_len {kv_len}", "at least q_len: kv_lens count the new tokens")
        return [case]
    try:
        found = [case for case in cases(args.level) if re.search(args.only or "", case.name)]
    except re.error as error:
        raise ArgumentError("--only", repr(args.only), f"a regular expression ({error})") from None
    if not found:
        raise ArgumentError("--only", repr(args.only), "a match for one of: " + ", ".join(case.name for case in cases(args.level)))
    return found


def _case_named(name: str) -> Case:
    """A case of the suite. A name alone says nothing about a case that is not there."""
    from quire.conformance.cases.suite import cases

    known = {case.name: case for case in cases("full")}
    if name not in known:
        raise ArgumentError("--case", repr(name), "NAME FIELD=VALUE ..., as it was printed, or the name of a case of the suite")
    return known[name]


def _check_device(target: str, device: str | None) -> None:
    """Raises if a kernel of ours would run on a GPU and there is none. Any other target looks for its own device."""
    import torch

    from quire.conformance.runner.target import is_ours, ours

    no_gpu = not torch.cuda.is_available()
    if (device or "").startswith("cuda") and no_gpu:
        raise ArgumentError("--device", device, "a device that torch sees: there is no CUDA or ROCm device here")
    if is_ours(target) and device is None and ours(target).device.startswith("cuda") and no_gpu:
        raise ArgumentError("TARGET", target, "cpu, torch or native: there is no CUDA or ROCm device here")


def _conform(args: Args) -> int:
    from quire.conformance.runner import known_failures as known
    from quire.conformance.runner.jobs import conform_in
    from quire.conformance.runner.run import conform
    from quire.conformance.runner.subprocess_target import apart
    from quire.conformance.runner.target import find, is_ours

    cases = find_cases(args)
    _check_device(args.target, args.device)

    def reasons(name: str) -> dict[str, str]:
        return known.read(args.known, name) if args.known else {}

    with ExitStack() as stack:
        here = args.in_process or is_ours(args.target)
        target = None
        if args.jobs == 1:
            alone = apart(args.target, args.device, args.timeout)
            target = find(args.target, args.device) if here else stack.enter_context(alone)
        tell = stack.enter_context(progress(len(cases), quiet=is_quiet(args)))

        def each(result: Result) -> None:
            tell(result.case.name, _line(result))

        if target is not None:
            report = conform(target, cases, args.level, known=reasons(target.name), each=each, within=args.within)
        else:
            how = {"device": args.device, "seconds": args.timeout, "in_process": here}
            report = conform_in(args.jobs, args.target, cases, args.level, **how, known=reasons, each=each, within=args.within)
    report = replace(report, unmatched=known.unmatched(reasons(report.target)))
    answer(args, lambda: json.loads(report.to_json()), _summary(report))
    if args.junit:
        Path(args.junit).write_text(report.to_junit(), encoding="utf-8")
    if args.html:
        from quire.conformance.reporting.html_report import html_report

        Path(args.html).write_text(html_report(report), encoding="utf-8")
    return exit_status(report)


def exit_status(report: Report) -> int:
    """What a run of the suite means to a program."""
    if report.interrupted:
        return INTERRUPTED
    return NOTHING_RAN if not report.answered and not report.unexpected else report.exit_code


def _line(result: Result) -> str:
    """One case in one line."""
    mark = {"right": "ok     ", "refused": "ok     ", "unsupported": "-      ", "wrong": "WRONG  ", "raised": "RAISED "}[
        result.status
    ]
    said = {
        "right": f"error {result.error:.2f} of the budget",
        "refused": f"refused, as it should: {result.reason}",
        "unsupported": f"skipped: {result.reason}",
    }.get(result.status, "")
    if result.failed:
        said = "; ".join(str(finding) for finding in result.findings) or result.reason
    if result.known:
        said = f"known ({result.known}): {said}" if result.failed else f"KNOWN TO FAIL, BUT RIGHT ({result.known})"
    return f"{mark}{result.case.name:28} {said}"


STATUS_WORDS = {
    "right": "right",
    "wrong": "wrong",
    "raised": "without a result",
    "refused": "rightly refused",
    "unsupported": "skipped",
}


def _summary(report: Report) -> str:
    """What a person can act on: counts, what failing cases have in common, the findings, and the verdict."""
    counts = report.counts()
    counted = ", ".join(f"{counts[status]} {word}" for status, word in STATUS_WORDS.items() if counts[status])
    lines = ["", f"{counted}, {report.seconds:.1f} s"]
    if report.contrast:
        lines += ["", f"Fails {report.contrast}."]
    for finding, cases in report.findings:
        lines += ["", *_finding(report, finding, cases)]
    if report.unmatched:
        lines += ["", f"known failures that no case is named after: {', '.join(report.unmatched)}"]
    return "\n".join((*lines, "", f"verdict: {_verdict(report)}"))


def _finding(report: Report, finding: Finding, cases: Sequence[str]) -> Iterator[str]:
    """The lines of one finding."""
    ways = report.ways(finding)
    given = f" ({ways[0][0]})" if len(ways) == 1 and ways[0][0] else ""
    which = f"in {len(cases)} case{'s' if len(cases) > 1 else ''}"
    if finding.contrast:
        which = finding.contrast if finding.contrast.startswith("in all") else f"{finding.contrast}, {which}"
    yield f"{finding.title}{given}, {which}"
    yield f"  {finding.summary}"
    if len(ways) == 1 and len(cases) > 1:
        yield f"  in         {_few(cases)}"
    elif len(ways) > 1:
        yield from (f"  with       {way or 'no parameters'}: {_few(which)}" for way, which in ways[:SHOWN])
        if len(ways) > SHOWN:
            yield f"             and {len(ways) - SHOWN} more ways"
    if str(finding.where):
        yield f"  at         {finding.where}{f': {finding.values}' if finding.values else ''}"
    yield from (f"  keys       {line}" for line in finding.picture.splitlines())
    others = [name for name in finding.alike if name != finding.fault]
    if others:
        yield f"  or         {', '.join(others)}, which give the same result here"
    yield from (f"  probe      {line}" for line in finding.evidence)
    yield f"  reproduce  quire conform {report.target} --case '{finding.reproduce}'"


def _few(cases: Sequence[str]) -> str:
    return ", ".join(cases[:SHOWN]) + (f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else "")


def _verdict(report: Report) -> str:
    failed = [result for result in report.results if result.failed]
    mended = [result.case.name for result in report.unexpected if result.known]
    if any(not result.known for result in failed):
        return "WRONG"
    if not report.answered:
        return "NOTHING WAS COMPUTED: every case was refused or skipped"
    if mended:
        return f"known failures that are right now, so the list is out of date: {', '.join(mended)}"
    return "wrong only where that is known" if failed else "the target is right in every case that it supports"


COMMAND = Command("conform", run, HELP, PARAMETERS, EXAMPLES)
