"""Two faults at once. The first is named on a case without options. The second explains what it leaves unexplained: it is about one
of these options, or it is reproduced in a case that the first does not affect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.attempt import Attempt, try_case
from quire.conformance.diagnosis.candidates import NAMED, Match, carries, explains
from quire.conformance.diagnosis.confirm import confirm
from quire.conformance.faults import Fault
from quire.conformance.oracle.exact import PLAIN, Stages
from quire.conformance.runner.target import Target
from quire.options import FEATURES

OPTIONS = {
    spec.name: spec.default
    for spec in fields(Case)
    if spec.name in (*FEATURES, "window", "scales", "lse", "form", "table", "strides", "causal")
}
"""Fields of a case that turn something on, and their defaults."""


SIMPLER: tuple[dict[str, Any], ...] = (
    {"kv_heads": 1},
    {"kv_heads": 1, "group": 1},
    {"group": 1},
    {"lse": False},
    {"index": ("int32",) * 3},
    {"window": (None, None)},
    {"strides": "dense"},
    {"form": "full"},
    {"table": "shuffled"},
    {"causal": "yes", "mask": False},
    *({name: default} for name, default in OPTIONS.items() if name in FEATURES),
)
"""Changes of a case that may remove a fault."""


@dataclass
class Pair:
    """Two faults that explain a result together."""

    matches: tuple[Match, Match]
    reproduced: tuple[Case, Case]
    """For each of them, the case that shows it; alone, where there is one."""
    distance: float
    evidence: tuple[str, ...]


def without_options(case: Case) -> Case:
    """The case with plain values of all its options."""
    changes = {name: value for name, value in OPTIONS.items() if getattr(case, name) != value}
    if "scales" in changes:
        changes["format"] = case.q_dtype if case.q_dtype in ("fp16", "bf16", "fp32") else "fp16"
    if case.q_dtype not in ("fp16", "bf16", "fp32"):
        return case
    return case.replace(**changes)


def pair_of_faults(case: Case, target: Target, done: Attempt, named_alone: Callable[[Case, Attempt], list[Match]]) -> Pair | None:
    """The pair that explains a result, confirmed by probes; None if there is none, or no case shows the first fault alone."""
    bare = without_options(case)
    if bare == case:
        return None
    alone = try_case(bare, target)
    if alone is None or alone.is_correct or alone.error:
        return None
    for first in named_alone(bare, alone)[:1]:
        if explains(first, done):
            return None  # the second would have no effect
        found = [pair for fault in NAMED if (pair := _with_second(first, fault, done)) is not None]
        for both, second in found:
            if not done.differs(second.stages):
                continue  # by itself it would not show here
            kept, said = confirm([both], case, target)
            if not kept:
                continue
            shown, refuted = _second_alone(first, second, case, target)
            if refuted or (shown is None and second.fault.applies(alone.call)):
                continue
            evidence = [f"{first.fault.name} alone explains {bare.name} without options", *said]
            if shown is not None:
                evidence.append(f"{second.fault.name} alone explains a case that {first.fault.name} does not affect")
            return Pair((first, second), (bare, shown or case), both.distance, tuple(evidence))
    return None


def _second_alone(first: Match, second: Match, case: Case, target: Target) -> tuple[Case | None, bool]:
    """A case like the failing one that the first fault does not affect and in which the target fails as the second predicts, if
    there is one; and whether a case refutes the second: the target is correct although the fault would show."""
    plain = case.replace(poison="decoy", tail="page")
    for change in SIMPLER:
        simpler = plain.replace(**change)
        done = try_case(simpler, target) if simpler != case else None
        if done is None or done.error or not second.fault.applies(done.call):
            continue
        if done.is_correct:
            if done.differs(second.stages):
                return None, True
        elif not (first.fault.applies(done.call) and done.differs(first.stages)) and carries(second, done):
            return simpler, False
    return None, False


def _with_second(first: Match, fault: Fault, done: Attempt) -> tuple[Match, Match] | None:
    """A second fault whose stages, together with those of the first, predict the result."""
    if fault.solve is not None or fault.name == first.fault.name or not fault.applies(done.call):
        return None
    for parameters in fault.tries:
        second = Match(fault, parameters, 0.0)
        stages = combined(first.stages, second.stages)
        if stages is None:
            return None
        try:
            distance = done.distance_to(stages)
        except (RuntimeError, IndexError, ValueError):
            continue
        if distance <= 1:
            both = Fault(
                f"{first.fault.name} and {fault.name}",
                "pair",
                "",
                "",
                lambda stages=stages: stages,
                lambda call: first.fault.applies(call) and fault.applies(call),
            )
            return Match(both, {}, distance), second
    return None


def combined(a: Stages, b: Stages) -> Stages | None:
    """The stages with both changes; None if both change the same stage."""
    names = [spec.name for spec in fields(Stages)]
    first, second = ({name for name in names if getattr(s, name) is not getattr(PLAIN, name)} for s in (a, b))
    return None if first & second else a.replace(**{name: getattr(b, name) for name in second})
