"""Drops names that the other failing cases of a run contradict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.conformance.diagnosis.attempt import call_of
from quire.conformance.faults import BY_NAME
from quire.conformance.reporting.report import UNKNOWN, Finding, Result

MOST_BUILT = 24
"""How many failing cases are looked at for each name."""


EFFECTS = ("state-leaks", "depends-on-batch")
"""What nondeterminism can look like."""


def without_minority_names(results: Sequence[Result]) -> list[Result]:
    """A name that explains fewer failing cases than it leaves unexplained, of those in which the fault would show, becomes a
    symptom: the result looks like that fault, but something else is wrong."""
    results = without_effects_of_nondeterminism(results)
    names = dict.fromkeys(f.fault for result in results for f in result.findings if _is_predicted(f.fault))
    doubtful = {name for name in names if _left_unexplained(name, results) > _explained(name, results)}
    kept = [tuple(_demoted(f) if f.fault in doubtful else f for f in result.findings) for result in results]
    return [replace(result, findings=findings) for result, findings in zip(results, kept)]


def _is_predicted(name: str) -> bool:
    return name in BY_NAME and BY_NAME[name].predicted


def _explained(name: str, results: Sequence[Result]) -> int:
    return sum(any(name in (f.fault, *f.equivalent_faults) for f in result.findings) for result in results)


def _left_unexplained(name: str, results: Sequence[Result]) -> int:
    """Diagnosed cases without a name in which the fault can occur."""
    first = [(result, result.findings[0]) for result in results if result.findings]
    unknown = [result for result, finding in first if finding.fault == UNKNOWN and finding.evidence]
    return sum(BY_NAME[name].applies(call_of(result.case)) for result in unknown[:MOST_BUILT])


def _demoted(finding: Finding) -> Finding:
    looks = f"in a few of the failing cases it looks like {finding.fault} ({BY_NAME[finding.fault].effect})"
    return replace(finding, fault=UNKNOWN, equivalent_faults=(UNKNOWN,), symptom=looks)


def without_effects_of_nondeterminism(results: Sequence[Result]) -> list[Result]:
    """A kernel that gives other bits from call to call also does so after another call, and for a sequence alone: if one case shows
    the former, the latter are no faults of their own."""
    name = "two-runs-differ"
    if not any(finding.fault == name for result in results for finding in result.findings):
        return list(results)
    changed = []
    for result in results:
        findings = (
            replace(finding, fault=name, equivalent_faults=(name,), summary=BY_NAME[name].effect)
            if finding.fault in EFFECTS
            else finding
            for finding in result.findings
        )
        changed.append(replace(result, findings=tuple(findings)))
    return changed
