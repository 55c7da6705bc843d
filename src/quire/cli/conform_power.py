"""`quire conform --power` and `--compare`: what the cases of the suite, and of other suites, can see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.cli.command import INTERRUPTED, Args, answer, is_quiet
from quire.cli.progress import progress
from quire.conformance.diagnosis.power import never_exposed
from quire.conformance.diagnosis.power import power as measure
from quire.conformance.faults import CATALOGUE

if TYPE_CHECKING:
    from quire.conformance.cases.case import Case
    from quire.conformance.diagnosis.power import Power


def power(args: Args, cases: Sequence[Case]) -> int:
    """Plants every fault in every case."""
    found, interrupted = _measure(args, cases)
    errors = [f"{one.case.name}: a correct kernel fails" for one in found if one.alarm]
    errors += [f"{one.case.name}: lets {name} pass" for one in found for name in one.missed]
    never = never_exposed(found)
    result: dict[str, Any] = {
        "level": args.level,
        "faults": [fault.name for fault in CATALOGUE],
        "matrix": [one.to_dict() for one in found],
        "never_exposed": never,
        "errors": errors,
        "interrupted": interrupted,
    }
    if args.names:
        named = [name == said for one in found for name, said in one.named.items()]
        result["named"] = {"right": sum(named), "of": len(named)}
    answer(args, result, "\n".join(_report(found, result)))
    # A level may leave faults to the next.
    whole = args.level != "smoke" and not (args.only or args.case)
    return INTERRUPTED if interrupted else 1 if errors or (never and whole) else 0


def _measure(args: Args, cases: Sequence[Case]) -> tuple[list[Power], bool]:
    """What each case sees, and whether an interrupt ended it."""
    found: list[Power] = []
    with progress(len(cases), quiet=is_quiet(args)) as tell:

        def each(one: Power) -> None:
            found.append(one)
            tell(one.case.name, _line(one))

        try:
            measure(cases, names=args.names, each=each)
        except KeyboardInterrupt:
            return found, True
    return found, False


def _line(found: Power) -> str:
    missed = f", MISSED: {', '.join(found.missed)}" if found.missed else ""
    said = f"exposes {len(found.exposed)}, passes {len(found.passed)}{missed}"
    return f"{'ERROR  ' if missed or found.alarm else 'ok     '}{found.case.name:28} {said}"


def _report(found: Sequence[Power], result: dict[str, Any]) -> list[str]:
    """The matrix, faults by cases, and what is wrong with it."""
    width = max(len(fault.name) for fault in CATALOGUE)
    lines = ["", f"{'':{width}}  one column a case, in the order above: # exposed, . passed, blank where it cannot occur"]
    for fault in CATALOGUE:
        marks = "".join("#" if fault.name in one.exposed else "." if fault.name in one.passed else " " for one in found)
        lines.append(f"{fault.name:{width}}  {marks}".rstrip())
    pairs = sum(len(one.exposed) for one in found)
    never = f"; never exposed: {', '.join(result['never_exposed']) or 'none'}" if not result["interrupted"] else ""
    lines += ["", f"{len(CATALOGUE)} faults, {len(found)} cases: {pairs} pairs exposed{never}"]
    if "named" in result:
        lines.append(f"named rightly: {result['named']['right']} of {result['named']['of']}")
    lines += [f"ERROR {error}" for error in result["errors"]]
    return [*lines, "interrupted: only the cases above were measured"] if result["interrupted"] else lines


def compare(args: Args) -> int:
    """Plants the same faults under other suites' inputs and tolerances."""
    from quire.conformance.cases.suite import cases
    from quire.conformance.diagnosis.other_suites import TOLERANCES, comparison

    ours = cases("standard")
    with progress(len(TOLERANCES) + len(ours), quiet=is_quiet(args)) as tell:
        suites = comparison(tell)
        found = measure(ours, each=lambda one: tell(one.case.name))
    missed, total = never_exposed(found), len(CATALOGUE)
    suites.append({"suite": "quire conform --level standard", "can": total, "exposed": total - len(missed), "missed": missed})
    lines = [f"of {total} faults in the catalogue: how many can occur in a suite's cases, and how many does it expose?", ""]
    lines.append(f"{'suite':64} {'can occur':>9} {'exposed':>8}")
    lines += [f"{one['suite']!s:64} {one['can']!s:>9} {one['exposed']!s:>8}" for one in suites]
    answer(args, {"faults": total, "suites": suites}, "\n".join(lines))
    return 0
