"""Proof that cases can fail: every fault is planted in an honest kernel, and every case says which ones it lets pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.conformance.budget import honest_losses, truth
from quire.conformance.build import build
from quire.conformance.call import Call
from quire.conformance.case import Case
from quire.conformance.diagnose import Attempt, matches
from quire.conformance.faults import CATALOGUE, Fault
from quire.conformance.plant import BEHAVIOUR, compute, planted
from quire.conformance.run import examine
from quire.conformance.threads import one_thread


@dataclass
class Power:
    """Which faults a case exposes, of those that can occur in it."""

    case: Case
    exposed: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    """For each exposed fault whose name was asked for: the first finding, or the fault's own name if it is in the class."""
    alarm: bool = False
    """Whether the honest kernel itself fails: then the case is wrong."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": str(self.case),
            "name": self.case.name,
            "exposed": self.exposed,
            "passed": self.passed,
            "named": self.named,
            "alarm": self.alarm,
        }


def power_of(case: Case, *, names: bool = False, faults: Sequence[Fault] = CATALOGUE) -> Power:
    """Plants every fault in a case."""
    with one_thread():
        found = Power(case)
        call = build(case)
        losses = honest_losses(call)
        right = truth(call, losses=losses)
        compute(call)
        found.alarm = Attempt(call, right, losses).off > 1
        decoy = build(case.replace(poison="decoy", tail="page")) if names else call
        decoy.memo["predictions"] = {}
        for fault in faults:
            if not fault.predicted or not fault.applies(call):
                continue
            assert fault.change is not None
            call.seal()
            compute(call, fault.change(**fault.planted(call)))
            if Attempt(call, right, losses).off <= 1:
                found.passed.append(fault.name)
                continue
            found.exposed.append(fault.name)
            if names:
                found.named[fault.name] = _name(fault, decoy)
    for name in BEHAVIOUR:
        if name in ("writes-padding-rows", "raises", "nan-leak") and not _can_show(name, case):
            continue
        result = examine(case, planted(name))
        said = [finding.fault for finding in result.findings]
        (found.exposed if said else found.passed).append(name)
        if said and names:
            found.named[name] = said[0]
    return found


def _can_show(name: str, case: Case) -> bool:
    if name == "writes-padding-rows":
        return case.padding > 0
    if name == "nan-leak":
        return case.poison in ("nan", "inf") and case.form == "full" and not case.mask
    return True


def _name(fault: Fault, call: Call) -> str:
    """What diagnosis makes of a fault: its own name if it is in the class that is found."""
    assert fault.change is not None
    call.seal()
    compute(call, fault.change(**fault.planted(call)))
    losses = call.memo.setdefault("losses", honest_losses(call))
    right = call.memo.setdefault("right", truth(call, losses=losses))
    found, _ = matches(Attempt(call, right, losses))
    alike = [match.fault.name for match in found]
    if fault.name in alike:
        return fault.name
    return alike[0] if alike else "unknown"


def power(cases: Sequence[Case], *, names: bool = False, each: Callable[[Power], None] = lambda found: None) -> list[Power]:
    """The matrix of faults and cases."""
    found = []
    for case in cases:
        found.append(power_of(case, names=names))
        each(found[-1])
    return found


def never_exposed(found: Sequence[Power]) -> list[str]:
    """Faults that no case exposes."""
    seen = {name for one in found for name in one.exposed}
    return [fault.name for fault in CATALOGUE if fault.name not in seen]
