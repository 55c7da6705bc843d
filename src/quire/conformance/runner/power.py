"""Detection power: every fault is injected into a correct kernel, and must be detected by some case.

A case detects a fault of the arithmetic if the output that the fault predicts is beyond the budget. Whether it does depends on the
data of the case. A fault of behaviour must be detected by every case in which it can occur.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.cache.format import FORMATS
from quire.conformance.cases.build import build
from quire.conformance.cases.build_write import build_write
from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.attempt import Attempt
from quire.conformance.diagnosis.write_attempt import WriteAttempt
from quire.conformance.faults import ATTENTION, WRITES, Fault
from quire.conformance.faults.injected import BEHAVIOUR, BEHAVIOUR_OF_WRITES, compute, injected
from quire.conformance.oracle.budget import rounding_losses, truth
from quire.conformance.oracle.write import exact_write
from quire.conformance.oracle.write_budget import put_write
from quire.conformance.runner.run import examine
from quire.conformance.runner.threads import one_thread

ALWAYS_SHOW = (
    *("two-runs-differ", "state-leaks", "writes-outside-output", "writes-padding-rows", "changes-inputs"),
    *("raises", "depends-on-batch"),
)
"""Faults of behaviour that are visible whatever the data of a case."""


FAULTS = {"attend": ATTENTION, "write": WRITES}
"""By operation."""


@dataclass
class Power:
    """Which faults a case detects, of those that can occur in it."""

    case: Case
    exposed: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    """For each detected fault that was diagnosed: the name in the first finding, or its own name if it is an equivalent fault."""
    alarm: bool = False
    """Whether a correct kernel fails: then the case is wrong."""

    @property
    def missed(self) -> list[str]:
        """Faults of behaviour that the kit did not detect in this case, although they do not depend on its data."""
        return [name for name in self.passed if name in ALWAYS_SHOW]

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": str(self.case),
            "name": self.case.name,
            "exposed": self.exposed,
            "passed": self.passed,
            "named": self.named,
            "alarm": self.alarm,
        }


def power_of(case: Case, *, names: int = 0, faults: Sequence[Fault] | None = None) -> Power:
    """Injects every fault into a case, and diagnoses every `names`-th of those that are detected."""
    if case.operation == "write":
        found = _power_of_write(case, WRITES if faults is None else faults)
    else:
        found = _power_of_attention(case, ATTENTION if faults is None else faults)
    if names:
        # The first one differs from case to case, so that every fault is diagnosed in some case.
        for name in found.exposed[case.code % names :: names]:
            first = next(iter(examine(case, injected(name, operation=case.operation)).findings))
            found.named[name] = name if name in (first.fault, *first.equivalent_faults) else first.fault
    return found


def _power_of_write(case: Case, faults: Sequence[Fault]) -> Power:
    with one_thread():
        found, call = Power(case), build_write(case)
        right = exact_write(call)
        put_write(call, right)
        found.alarm = WriteAttempt(call, right).off > 1
        for fault in faults:
            if not fault.applies(call):
                continue
            assert fault.change is not None
            wrong = build_write(case)
            try:
                put_write(wrong, exact_write(wrong, fault.change(**fault.injected_parameters(call))))
            except (IndexError, RuntimeError, ValueError):
                continue  # the fault stores to a page that this case does not have
            (found.exposed if WriteAttempt(wrong, right).off > 1 else found.passed).append(fault.name)
    padded = call.q is not None and case.padding > 0 and call.q_starts is not None
    can_show = {"writes-padding-rows": padded, "writes-outside-output": bool(call.memory)}
    _add_behaviour(found, [name for name in BEHAVIOUR_OF_WRITES if can_show.get(name, True)])
    return found


def _add_behaviour(found: Power, names: Sequence[str]) -> None:
    """Injects faults of behaviour."""
    for name in names:
        findings = examine(found.case, injected(name, operation=found.case.operation)).findings
        (found.exposed if findings else found.passed).append(name)


def _power_of_attention(case: Case, faults: Sequence[Fault]) -> Power:
    with one_thread():
        found = Power(case)
        call = build(case)
        losses = rounding_losses(call)
        right = truth(call, losses=losses)
        compute(call)
        found.alarm = Attempt(call, right, losses).off > 1
        for fault in faults:
            if not fault.predicted or not fault.applies(call):
                continue
            assert fault.change is not None
            call.take_checksums()
            try:
                compute(call, fault.change(**fault.injected_parameters(call)))
            except (IndexError, RuntimeError, ValueError):
                continue  # the fault needs a page, a row or a key that this case does not have
            if Attempt(call, right, losses).off <= 1:
                found.passed.append(fault.name)
                continue
            found.exposed.append(fault.name)
    _add_behaviour(found, [name for name in BEHAVIOUR if name in {fault.name for fault in faults} and _can_show(name, case)])
    return found


def _can_show(name: str, case: Case) -> bool:
    if name == "writes-padding-rows":
        return case.padding > 0
    if name == "changes-inputs":
        return not FORMATS[case.q_dtype].quantised  # the injected fault doubles a query, which torch cannot do in fp8
    if name == "depends-on-batch":
        return case.batch_invariant
    if name.startswith("products-in-"):
        return case.q_dtype == "fp32" and case.format == "fp32"
    if name == "nan-leak":
        return case.poison in ("nan", "inf") and case.form == "full" and not case.mask
    return True


def power(cases: Sequence[Case], *, names: int = 0, each: Callable[[Power], None] = lambda found: None) -> list[Power]:
    """The matrix of faults and cases."""
    found = []
    for case in cases:
        found.append(power_of(case, names=names))
        each(found[-1])
    return found


def never_exposed(found: Sequence[Power]) -> list[str]:
    """Faults of the operations of these cases that no case detects."""
    seen = {name for one in found for name in one.exposed}
    faults = [fault for operation in {one.case.operation for one in found} for fault in FAULTS[operation]]
    return [fault.name for fault in faults if fault.name not in seen]
