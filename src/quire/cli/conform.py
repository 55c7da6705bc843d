"""`quire conform`: whether a paged-attention function is correct, and what is wrong if it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

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
"""Entries of a long list that a summary shows."""
NOTHING_RAN = 3
"""The exit status of a run that computed nothing."""
HELP = "Runs any function that attends over a paged cache, or writes it, through test cases, and names what is wrong with it."
EXAMPLES = """\
examples:
  quire conform cpu                                     Quire's kernel for this CPU, in seconds
  quire conform my_kernel.py:attention --level standard a function of yours; an adapter takes 20 lines (quire example 05)
  quire conform my_kernel.py:write --level standard     the same of a cache write, fused with RoPE or not (quire example 14)
  quire conform write.cpu                               Quire's own write
  quire conform vllm.unified_attention --html out.html  an installed peer, and a report with figures
  quire conform triton-mixed --level standard --jobs 16 on a GPU: 16 processes, which compile in parallel
  quire conform triton-mixed --case 'window q_lens=1,9 kv_lens=40,50 window=7,0'
                                                        one case again, from the line that a report prints
  quire conform --power --level standard                inject every fault into every case: which are detected?
  quire conform --compare                               how many of the faults do other projects' tests detect?

A function takes its tensors by name: q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, and an argument for each
feature it supports: window, alibi, sinks, causal, mask, positions, k_scale, v_scale, new_k, new_v, lse, ... Cases with a
feature that it has no argument for are skipped. A function with an argument k is a write: k, v, k_pages, v_pages, slots, and
k_scale, v_scale, cos, sin, positions, interleaved, q, q_out, k_norm, q_norm, hadamard, ...
 `SUPPORTS = {"page_size": (16, 32)}` in its file declares finer limits.
`python -c 'import quire.conformance.runner.target as t; help(t)'` prints the whole signature; docs/faults.md lists the faults.

statuses: correct; wrong; raised: an exception, a crash or a hang; refused: an exception beyond the declared limits, as expected;
skipped: not run

exit status: 0 if the target is correct in every case that was run, 1 if not, 2 invalid arguments, 3 nothing was computed: every
case was refused or skipped, 130 interrupted: what was found until then is reported
"""
_WHAT, _HOW, _ALONE = "what is tested", "how it is run", "without a target"


def _targets() -> tuple[str, ...]:
    from quire.conformance.runner.find_target import OURS

    return OURS


PARAMETERS: list[click.Parameter] = [
    Argument(
        "target",
        "a kernel of Quire, a peer, file.py:function or module:function",
        required=False,
        metavar="[TARGET]",
        type=OneOfNames(_targets, files=True),
    ),
    Option(
        "--level",
        type=ChoiceOf(("smoke", "standard", "full")),
        default="smoke",
        group=_WHAT,
        help="smoke: seconds; standard: up to a minute; full: minutes (smoke)",
    ),
    Option("--only", metavar="REGEX", group=_WHAT, help="only the cases whose name matches"),
    Option("--case", metavar="LINE", group=_WHAT, help="one case, by its name or by the line that a report prints"),
    Option(
        "--known",
        metavar="FILE",
        type=Readable(),
        group=_WHAT,
        help="known failures, one per line: target, case, reason; reports those that pass",
    ),
    Option("--device", metavar="NAME", group=_HOW, help="device (default: declared by the target)"),
    Option("--timeout", metavar="SECONDS", type=Number(0, "seconds"), default=120.0, group=_HOW, help="time limit of a call (120)"),
    Option(
        "--within",
        metavar="SECONDS",
        type=Number(0, "seconds"),
        default=float("inf"),
        group=_HOW,
        help="start no new case after SECONDS; remaining cases are reported as skipped (no limit)",
    ),
    Option(
        "--jobs",
        type=Count,
        default=1,
        group=_HOW,
        help="divide the cases over N processes; on a GPU most of the time is compilation (1)",
    ),
    flag("--in-process", "run a function or a peer in this process (for a debugger), not in a subprocess", _HOW),
    flag("--power", "inject every fault into every case, and verify that the cases detect them", _ALONE),
    Option(
        "--names",
        metavar="N",
        type=Whole(0),
        default=0,
        group=_ALONE,
        help="with --power: also diagnose every N-th injected fault (none)",
    ),
    flag("--compare", "inject the same faults under the inputs and tolerances of other suites", _ALONE),
    Option("--junit", metavar="FILE", type=Writable(), group="output", help="write JUnit XML"),
    Option("--html", metavar="FILE", type=Writable(), group="output", help="write a report with figures"),
]


def run(args: Args) -> int:
    if args.power and args.compare:
        raise ArgumentError("--compare", "with --power", "one of the two")
    if args.power or args.compare:
        from quire.cli import conform_power

        _refuse_unused(args)
        every = [*find_cases(args, ("attend", "write"))] if args.power else []
        return conform_power.power(args, every) if args.power else conform_power.compare(args)
    if args.target is None:
        raise ArgumentError("TARGET", "nothing", "a kernel, a peer or file.py:function; or --power, or --compare")
    if args.names:
        raise ArgumentError("--names", args.names, "only with --power")
    return _conform(args)


def _refuse_unused(args: Args) -> None:
    """Raises about an option that --power or --compare does not use."""
    mode = "--power" if args.power else "--compare"
    if args.target is not None:
        raise ArgumentError("TARGET", args.target, f"none with {mode}: faults are injected into a kernel of the kit")
    unused = ["known", "device", "within", "jobs", "in_process", "junit", "html", "timeout"]
    unused += [] if args.power else ["only", "case", "level", "names"]
    context = click.get_current_context()
    for name in unused:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ArgumentError(f"--{name.replace('_', '-')}", getattr(args, name), f"none with {mode}, which does not use it")


def find_cases(args: Args, operations: Sequence[str]) -> list[Case]:
    """The case of `--case`, or the cases of the level that operations have and `--only` matches."""
    from quire.conformance.cases.case import Case
    from quire.conformance.cases.suite import cases

    if args.case is not None:
        if args.only is not None:
            raise ArgumentError("--only", args.only, "none with --case, which is one case")
        if "=" not in args.case:
            return [_case_named(args.case.strip())]
        if "=" in (args.case.split() or ["="])[0]:
            raise ArgumentError("--case", repr(args.case), "NAME FIELD=VALUE ...: it begins with the name of the case")
        case = Case.parse(args.case)
        for q_len, kv_len in zip(case.q_lens, case.kv_lens):
            if q_len > kv_len and case.causal == "yes":
                raise ArgumentError("--case", f"q_len {q_len} over kv_len {kv_len}", "at least q_len: kv_lens count the new tokens")
        return [case]
    every = [case for operation in operations for case in cases(args.level, operation)]
    try:
        found = [case for case in every if re.search(args.only or "", case.name)]
    except re.error as error:
        raise ArgumentError("--only", repr(args.only), f"a regular expression ({error})") from None
    if not found:
        raise ArgumentError("--only", repr(args.only), "a match for one of: " + ", ".join(case.name for case in every))
    return found


def _case_named(name: str) -> Case:
    """A case of the suite, by its name."""
    from quire.conformance.cases.suite import all_cases

    known = {case.name: case for case in all_cases()}
    if name not in known:
        raise ArgumentError("--case", repr(name), "NAME FIELD=VALUE ..., as it was printed, or the name of a case of the suite")
    return known[name]


def _check_device(target: str, device: str | None) -> None:
    """Raises if a kernel of Quire would run on a GPU and there is none. Other targets check their own device."""
    import torch

    from quire.conformance.runner.find_target import find, is_ours

    no_gpu = not torch.cuda.is_available()
    if (device or "").startswith("cuda") and no_gpu:
        raise ArgumentError("--device", device, "a device that torch sees: there is no CUDA or ROCm device here")
    if is_ours(target) and device is None and find(target).device.startswith("cuda") and no_gpu:
        raise ArgumentError("TARGET", target, "cpu, torch or native, or write.cpu: there is no CUDA or ROCm device here")


def _conform(args: Args) -> int:
    from quire.conformance.runner import known_failures as known
    from quire.conformance.runner.find_target import find, is_ours
    from quire.conformance.runner.jobs import conform_in
    from quire.conformance.runner.run import conform
    from quire.conformance.runner.subprocess_target import in_subprocess

    _check_device(args.target, args.device)

    def reasons(name: str) -> dict[str, str]:
        return known.read(args.known, name) if args.known else {}

    with ExitStack() as stack:
        here = args.in_process or is_ours(args.target)
        target = None
        if args.jobs == 1:
            subprocess = in_subprocess(args.target, args.device, args.timeout)
            target = find(args.target, args.device) if here else stack.enter_context(subprocess)
        cases = find_cases(args, (target.operation if target is not None else _operation(args, here),))
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


def _operation(args: Args, here: bool) -> str:
    """What a target does, for a run in several processes."""
    from quire.conformance.runner.find_target import find
    from quire.conformance.runner.subprocess_target import in_subprocess

    if here:
        return find(args.target, args.device).operation
    with in_subprocess(args.target, args.device, args.timeout) as target:
        return target.operation


def exit_status(report: Report) -> int:
    """The exit status of a run."""
    if report.interrupted:
        return INTERRUPTED
    return NOTHING_RAN if not report.computed and not report.unexpected else report.exit_code


def _line(result: Result) -> str:
    """One case in one line."""
    status = result.status.upper() if result.failed else result.status
    text = result.reason
    if result.status == "correct":
        text = f"error {result.error:.2f} of the budget"
    elif result.failed:
        text = "; ".join(str(finding) for finding in result.findings) or result.reason
    if result.known:
        text = f"known ({result.known}): {text}" if result.failed else f"KNOWN TO FAIL, BUT CORRECT ({result.known})"
    return f"{status:8} {result.case.name:28} {text}"


def _summary(report: Report) -> str:
    """The text of a report: counts, what failing cases have in common, the findings, and the verdict."""
    from quire.conformance.reporting.report import BUDGETS

    counts = report.counts()
    counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    lines = ["", f"{counted}, {report.seconds:.1f} s"]
    if counts["correct"] or counts["wrong"]:
        lines.append(BUDGETS)
    if report.undiagnosed:
        lines.append(f"{report.undiagnosed} of the failing cases were not diagnosed; --case diagnoses one.")
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
        which = finding.contrast if finding.contrast.startswith("in ") else f"{finding.contrast}, {which}"
    yield f"{finding.title}{given}, {which}"
    yield f"  {finding.summary}"
    if finding.undiagnosed:
        yield f"  note       {finding.undiagnosed} failing cases were not diagnosed: they may have this fault or others"
    if len(ways) == 1 and len(cases) > 1:
        yield f"  in         {_few(cases)}"
    elif len(ways) > 1:
        yield from (f"  with       {way or 'no parameters'}: {_few(which)}" for way, which in ways[:SHOWN])
        if len(ways) > SHOWN:
            yield f"             and {len(ways) - SHOWN} other parameters"
    if str(finding.where):
        yield f"  at         {finding.where}{f': {finding.values}' if finding.values else ''}"
    yield from (f"  keys       {line}" for line in finding.picture.splitlines())
    others = [name for name in finding.equivalent_faults if name != finding.fault]
    if others:
        yield f"  or         indistinguishable in this case: {', '.join(others)}"
    yield from (f"  probe      {line}" for line in finding.evidence)
    yield f"  reproduce  quire conform {report.target} --case '{finding.reproduce}'"


def _few(cases: Sequence[str]) -> str:
    return ", ".join(cases[:SHOWN]) + (f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else "")


def _verdict(report: Report) -> str:
    failed = [result for result in report.results if result.failed]
    passing = [result.case.name for result in report.unexpected if result.known]
    if any(not result.known for result in failed):
        return "WRONG"
    if report.not_started:
        why = "interrupted" if report.interrupted else "incomplete: the time limit was reached"
        return f"{why}; {report.not_started} of {len(report.results)} cases were not run, the others are correct"
    if not report.computed:
        return "NOTHING WAS COMPUTED: every case was refused or skipped"
    if passing:
        return f"known failures that now pass: {', '.join(passing)}; remove them from the file of --known"
    return "wrong only in known failures" if failed else "correct in every case that was run"


COMMAND = Command("conform", run, HELP, PARAMETERS, EXAMPLES)
