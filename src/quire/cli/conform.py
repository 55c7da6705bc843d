"""`quire conform`: is a paged-attention function right, and if not, what is wrong with it?"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.conformance.case import Case
    from quire.conformance.power import Power
    from quire.conformance.report import Report, Result

SHOWN = 8
"""How much of a long list a summary shows."""
HELP = "put any paged-attention function to the test, and name what is wrong with it"
EXAMPLES = """\
examples:
  quire conform cpu                                     our own kernel of this CPU, in seconds
  quire conform my_kernel.py:attention --level standard a function of yours; 20 lines make an adapter (examples/05)
  quire conform vllm.unified_attention --html page.html a peer that is installed, and a page with pictures
  quire conform triton-mixed --level standard --jobs 16 on a GPU: a process a core, which compile beside each other
  quire conform triton-mixed --case 'window q_lens=1,9 kv_lens=40,50 window=7,0'
                                                        one case again, from the line that a report prints
  quire conform --power --level standard                plant every fault in every case: what can the suite see?
  quire conform --compare                               how many of the faults do other projects' tests see?

A function takes its tensors by name: q, k_pages, v_pages, page_table, kv_lens, q_starts, out, scale, and whatever else it supports:
window, softcap, alibi, sinks, causal, mask, positions, k_scale, v_scale, new_k, new_v, lse, ... A feature it has no argument for is
one it does not support; `SUPPORTS = {"page_size": (16, 32)}` in its file declares finer limits.
`python -c 'import quire.conformance.target as t; help(t)'` has the whole signature, docs/faults.md every fault.

exit status: 0 if the target is right wherever it was asked, 1 if not or if it computed no case at all, 2 for a bad
argument, 130 if it was interrupted: what was found until then is reported all the same
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="a kernel of ours, a peer, file.py:function or package.module:function")
    add(
        "--level",
        choices=["smoke", "standard", "full"],
        default="smoke",
        help="how much: seconds, minutes, or all (default: smoke)",
    )
    add("--device", metavar="NAME", help="where to run it (default: where the target says)")
    add("--only", metavar="REGEX", help="cases whose name matches")
    add("--case", metavar="LINE", help="one case, from the line that was printed for it")
    add("--timeout", metavar="SECONDS", type=float, default=120.0, help="how long a call may take (default: 120)")
    add(
        "--within",
        metavar="SECONDS",
        type=float,
        default=float("inf"),
        help="begin no case after so long; those that are left are reported as not asked (default: all are asked)",
    )
    add(
        "--jobs",
        metavar="N",
        type=int,
        default=1,
        help="share the cases among N processes, each with the target in it: on a GPU most of the time goes into compiling, "
        "and a core a process makes minutes of that one; the report is the same (default: 1)",
    )
    add(
        "--in-process",
        action="store_true",
        help="run a function or a peer in this process (for a debugger), not in one of its own that may crash or hang",
    )
    add("--known", metavar="FILE", help="failures that are known, a line each: target, case, why; one that passes is reported")
    add(
        "--power",
        action="store_true",
        help="no target: plant every fault in every case, and prove that each case sees what it must",
    )
    add(
        "--names",
        metavar="N",
        type=int,
        default=0,
        help="with --power: also have every N-th planted fault diagnosed (1: all; an hour)",
    )
    add("--compare", action="store_true", help="no target: plant the same faults under other suites' inputs and tolerances")
    add("--json", action="store_true", help="for programs")
    add("--junit", metavar="FILE", help="also write JUnit XML")
    add("--html", metavar="FILE", help="also write a page with pictures")


def run(args: argparse.Namespace) -> int:
    if args.power and args.compare:
        raise ArgumentError("--compare", "beside --power", "one of them")
    if args.power or args.compare:
        if args.target is not None:
            raise ArgumentError(
                "TARGET", args.target, "none beside --power or --compare: faults are planted in a kernel of the kit's"
            )
        return _power(args) if args.power else _compare(args)
    if args.target is None:
        raise ArgumentError("TARGET", None, "a kernel, a peer or file.py:function; or --power, or --compare")
    return _conform(args)


def _cases(args: argparse.Namespace) -> list[Case]:
    from quire.conformance.case import Case
    from quire.conformance.suite import cases

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
    from quire.conformance.suite import cases

    known = {case.name: case for case in cases("full")}
    if name not in known:
        raise ArgumentError("--case", repr(name), "NAME FIELD=VALUE ..., as it was printed, or the name of a case of the suite")
    return known[name]


def _check_device(target: str, device: str | None) -> None:
    """Raises if a kernel of ours would run on a GPU and there is none. Any other target looks for its own device."""
    import torch

    from quire.conformance.target import is_ours, ours

    no_gpu = not torch.cuda.is_available()
    if (device or "").startswith("cuda") and no_gpu:
        raise ArgumentError("--device", device, "a device that torch sees: there is no CUDA or ROCm device here")
    if is_ours(target) and device is None and ours(target).device.startswith("cuda") and no_gpu:
        raise ArgumentError("TARGET", target, "cpu, torch or native: there is no CUDA or ROCm device here")


def _conform(args: argparse.Namespace) -> int:
    from quire.conformance import known
    from quire.conformance.apart import apart
    from quire.conformance.jobs import conform_in
    from quire.conformance.run import conform
    from quire.conformance.target import find, is_ours

    cases = _cases(args)
    if args.timeout <= 0:
        raise ArgumentError("--timeout", args.timeout, "seconds above 0")
    if not args.within > 0:
        raise ArgumentError("--within", args.within, "seconds above 0")
    if args.jobs < 1:
        raise ArgumentError("--jobs", args.jobs, "1 or more")
    if args.names:
        raise ArgumentError("--names", args.names, "only beside --power")
    _check_device(args.target, args.device)
    for name, file in (("--junit", args.junit), ("--html", args.html)):
        # Before the cases run: what they find would be lost.
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ArgumentError(name, file, "a file in a folder that exists")

    def reasons(name: str) -> dict[str, str]:
        return known.read(args.known, name) if args.known else {}

    with ExitStack() as stack:
        here = args.in_process or is_ours(args.target)
        target = None
        if args.jobs == 1:
            alone = apart(args.target, args.device, args.timeout)
            target = find(args.target, args.device) if here else stack.enter_context(alone)
        tell = stack.enter_context(_Progress(len(cases), quiet=args.json))

        def each(result: Result) -> None:
            tell(result.case.name, _line(result))

        if target is not None:
            report = conform(target, cases, args.level, known=reasons(target.name), each=each, within=args.within)
        else:
            how = {"device": args.device, "seconds": args.timeout, "in_process": here}
            report = conform_in(args.jobs, args.target, cases, args.level, **how, known=reasons, each=each, within=args.within)
    report = replace(report, unmatched=known.unmatched(reasons(report.target)))
    if args.json:
        print(report.to_json())
    else:
        print(_summary(report))
    if args.junit:
        Path(args.junit).write_text(report.to_junit(), encoding="utf-8")
    if args.html:
        from quire.conformance.page import page

        Path(args.html).write_text(page(report), encoding="utf-8")
    return 130 if report.interrupted else report.exit_code


def _line(result: Result) -> str:
    """One case in one line."""
    mark = {"right": "ok     ", "refused": "ok     ", "unsupported": "-      ", "wrong": "WRONG  ", "raised": "RAISED "}[
        result.status
    ]
    said = {
        "right": f"error {result.error:.2f} of the budget",
        "refused": f"refused, as it should: {result.reason}",
        "unsupported": f"not asked: {result.reason}",
    }.get(result.status, "")
    if result.failed:
        said = "; ".join(str(finding) for finding in result.findings) or result.reason
    if result.known:
        said = f"known ({result.known}): {said}" if result.failed else f"KNOWN TO FAIL, BUT RIGHT ({result.known})"
    return f"{mark}{result.case.name:28} {said}"


def _summary(report: Report) -> str:
    """What a person can act on."""
    counts = report.counts()
    words = {
        "right": "right",
        "wrong": "wrong",
        "raised": "without an answer",
        "refused": "rightly refused",
        "unsupported": "not asked",
    }
    lines = [
        "",
        ", ".join(f"{counts[status]} {word}" for status, word in words.items() if counts[status]) + f", {report.seconds:.1f} s",
    ]
    for finding, cases in report.findings:
        ways = report.ways(finding)
        given = f" ({ways[0][0]})" if len(ways) == 1 and ways[0][0] else ""
        lines += ["", f"{finding.fault}{given}, in {len(cases)} case{'s' if len(cases) > 1 else ''}"]
        lines.append(f"  {finding.summary}")
        if len(ways) == 1:
            lines += [f"  in         {_few(cases)}"] if len(cases) > 1 else []
        else:
            lines += [f"  with       {way or 'no more to say'}: {_few(which)}" for way, which in ways[:SHOWN]]
            lines += [f"             and {len(ways) - SHOWN} more ways"] if len(ways) > SHOWN else []
        if str(finding.where):
            lines.append(f"  at         {finding.where}")
        alike = [name for name in finding.alike if name != finding.fault]
        if alike:
            lines.append(f"  here alike {', '.join(alike)}")
        lines += [f"  probe      {line}" for line in finding.evidence]
        lines.append(f"  again      quire conform {report.target} --case '{finding.reproduce}'")
    if report.unmatched:
        lines += ["", f"known failures that no case is named after: {', '.join(report.unmatched)}"]
    return "\n".join((*lines, "", f"verdict: {_verdict(report)}"))


def _few(cases: Sequence[str]) -> str:
    return ", ".join(cases[:SHOWN]) + (f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else "")


def _verdict(report: Report) -> str:
    failed = [result for result in report.results if result.failed]
    mended = [result.case.name for result in report.unexpected if result.known]
    if any(not result.known for result in failed):
        return "WRONG"
    if not report.answered:
        return "NOTHING WAS COMPUTED: every case was refused or not asked"
    if mended:
        return f"known failures that are right now, so the list is out of date: {', '.join(mended)}"
    return "wrong only where that is known" if failed else "the target is right wherever it was asked"


def _power(args: argparse.Namespace) -> int:
    from quire.conformance.blind import BLIND
    from quire.conformance.faults import CATALOGUE
    from quire.conformance.power import never_exposed, power

    cases = _cases(args)
    with _Progress(len(cases), quiet=args.json) as tell:
        found = power(cases, names=args.names, each=lambda one: tell(one.case.name, _power_line(one, BLIND)))
    errors = [f"{one.case.name}: an honest kernel fails" for one in found if one.alarm]
    errors += [
        f"{one.case.name}: lets {name} pass" for one in found for name in one.passed if name not in BLIND.get(one.case.name, ())
    ]
    never = never_exposed(found)
    named = [name == said for one in found for name, said in one.named.items()]
    if args.json:
        answer: dict[str, Any] = {
            "level": args.level,
            "faults": [fault.name for fault in CATALOGUE],
            "matrix": [one.to_dict() | {"blind": list(BLIND.get(one.case.name, ()))} for one in found],
            "never_exposed": never,
            "errors": errors,
        }
        if args.names:
            answer["named"] = {"right": sum(named), "of": len(named)}
        print(json.dumps(answer, indent=2))
    else:
        print(_matrix(found))
        pairs = sum(len(one.exposed) for one in found)
        print(f"\n{len(CATALOGUE)} faults, {len(cases)} cases: {pairs} pairs exposed; never exposed: {', '.join(never) or 'none'}")
        if args.names:
            print(f"named rightly: {sum(named)} of {len(named)}")
        for error in errors:
            print(f"ERROR {error}")
    # A level may leave faults to the next; a case may not let pass what it says it sees.
    return 1 if errors or (never and args.level != "smoke" and not (args.only or args.case)) else 0


def _power_line(found: Power, blind: dict[str, tuple[str, ...]]) -> str:
    late = [name for name in found.passed if name not in blind.get(found.case.name, ())]
    said = f"exposes {len(found.exposed)}, passes {len(found.passed)}" + (f", NOT STATED: {', '.join(late)}" if late else "")
    return f"{'ERROR  ' if late or found.alarm else 'ok     '}{found.case.name:28} {said}"


def _matrix(found: Sequence[Power]) -> str:
    """Faults by cases: # exposed, . passed, blank where it cannot occur."""
    from quire.conformance.faults import CATALOGUE

    width = max(len(fault.name) for fault in CATALOGUE)
    lines = ["", f"{'':{width}}  one column a case, in the order above: # exposed, . passed, blank where it cannot occur"]
    for fault in CATALOGUE:
        marks = "".join("#" if fault.name in one.exposed else "." if fault.name in one.passed else " " for one in found)
        lines.append(f"{fault.name:{width}}  {marks}".rstrip())
    return "\n".join(lines)


def _compare(args: argparse.Namespace) -> int:
    from quire.conformance.compare import SUITES, comparison
    from quire.conformance.faults import CATALOGUE
    from quire.conformance.power import never_exposed, power
    from quire.conformance.suite import cases

    ours = cases("standard")
    with _Progress(len(SUITES) + len(ours), quiet=args.json) as tell:
        rows = comparison(lambda name: tell(name, ""))
        found = power(ours, each=lambda one: tell(one.case.name, ""))
    missed = never_exposed(found)
    total = len(CATALOGUE)
    rows.append({"suite": "quire conform --level standard", "can": total, "exposed": total - len(missed), "missed": missed})
    if args.json:
        print(json.dumps({"faults": total, "suites": rows}, indent=2))
        return 0
    print(f"of {total} faults in the catalogue: how many can occur in a suite's cases, and how many does it expose?\n")
    print(f"{'suite':64} {'can occur':>9} {'exposed':>8}")
    for row in rows:
        print(f"{row['suite']!s:64} {row['can']!s:>9} {row['exposed']!s:>8}")
    return 0


class _Progress:
    """A bar on a terminal, a line for each case everywhere; nothing if quiet."""

    def __init__(self, total: int, quiet: bool):
        self.total, self.quiet = total, quiet
        self.bar: Any = None

    def __enter__(self) -> Callable[[str, str], None]:
        start = time.perf_counter()
        count = 0
        if not self.quiet and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress
            except ImportError:
                pass
            else:
                self.bar = Progress(console=Console(stderr=True), transient=True)
                self.bar.start()
                task = self.bar.add_task("", total=self.total)

        def tell(name: str, line: str) -> None:
            nonlocal count
            count += 1
            if self.bar is not None:
                self.bar.update(task, description=name, completed=count)
                if line:
                    self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            elif not self.quiet and line:
                print(line, flush=True)
            elif not self.quiet:
                print(f"{time.perf_counter() - start:5.0f} s  {name}", file=sys.stderr, flush=True)

        return tell

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
