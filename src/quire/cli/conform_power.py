"""`quire conform --power` and `--compare`: which faults the cases of the suite, and of other suites, detect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.cli.command import INTERRUPTED, Args, answer, is_quiet
from quire.cli.progress import progress
from quire.conformance.faults import ATTENTION, CATALOGUE
from quire.conformance.runner.power import never_exposed
from quire.conformance.runner.power import power as measure

if TYPE_CHECKING:
    from quire.conformance.cases.case import Case
    from quire.conformance.runner.power import Power


def power(args: Args, cases: Sequence[Case]) -> int:
    """Injects every fault into every case."""
    found, interrupted = _measure(args, cases)
    errors = [f"{one.case.name}: a correct kernel fails" for one in found if one.alarm]
    errors += [f"{one.case.name}: does not detect {name}" for one in found for name in one.missed]
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
        named = [name == found_name for one in found for name, found_name in one.named.items()]
        result["named"] = {"correct": sum(named), "of": len(named)}
    answer(args, result, "\n".join(_report(found, result)))
    # The cases of smoke need not detect every fault.
    whole = args.level != "smoke" and not (args.only or args.case)
    return INTERRUPTED if interrupted else 1 if errors or (never and whole) else 0


def _measure(args: Args, cases: Sequence[Case]) -> tuple[list[Power], bool]:
    """What each case detects, and whether the run was interrupted."""
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
    counts = f"{len(found.exposed)} faults detected, {len(found.passed)} not detected{missed}"
    return f"{'ERROR  ' if missed or found.alarm else 'ok     '}{found.case.name:28} {counts}"


def _report(found: Sequence[Power], result: dict[str, Any]) -> list[str]:
    """The matrix of faults and cases, and the errors of the suite."""
    width = max(len(fault.name) for fault in CATALOGUE)
    lines = ["", f"{'':{width}}  one column per case, in the order above: # detected, . not detected, blank: cannot occur"]
    for fault in CATALOGUE:
        marks = "".join("#" if fault.name in one.exposed else "." if fault.name in one.passed else " " for one in found)
        lines.append(f"{fault.name:{width}}  {marks}".rstrip())
    pairs = sum(len(one.exposed) for one in found)
    never = f"; never detected: {', '.join(result['never_exposed']) or 'none'}" if not result["interrupted"] else ""
    lines += ["", f"{len(CATALOGUE)} faults, {len(found)} cases: {pairs} pairs detected{never}"]
    if "named" in result:
        lines.append(f"named correctly: {result['named']['correct']} of {result['named']['of']}")
    lines += [f"ERROR {error}" for error in result["errors"]]
    return [*lines, "interrupted: only the cases above were measured"] if result["interrupted"] else lines


def compare(args: Args) -> int:
    """Injects the same faults of attention under the inputs and tolerances of other suites."""
    from quire.conformance.cases.suite import cases
    from quire.conformance.runner.other_suites import TOLERANCES, comparison

    ours = cases("standard")
    with progress(len(TOLERANCES) + len(ours), quiet=is_quiet(args)) as tell:
        suites = comparison(tell)
        found = measure(ours, each=lambda one: tell(one.case.name))
    missed, total = never_exposed(found), len(ATTENTION)
    suites.append({"suite": "quire conform --level standard", "can": total, "exposed": total - len(missed), "missed": missed})
    lines = [f"of {total} faults of attention: how many can occur in a suite's cases, and how many are detected?", ""]
    lines.append(f"{'suite':64} {'can occur':>9} {'detected':>8}")
    lines += [f"{one['suite']!s:64} {one['can']!s:>9} {one['exposed']!s:>8}" for one in suites]
    answer(args, {"faults": total, "suites": suites}, "\n".join(lines))
    return 0
