"""Two faults at once: the first is named on a case without options, the second together with it on the failing case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.attempt import Attempt, try_case
from quire.conformance.diagnosis.candidates import NAMED, Match
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


@dataclass
class Pair:
    """Two faults that explain a result together."""

    matches: tuple[Match, Match]
    reproduced: tuple[Case, Case | None]
    """The case that shows each of them alone, where there is one."""
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
        found = [both for fault in NAMED if (both := _with_second(first, fault, done)) is not None]
        for pair, second in found:
            kept, lines = confirm([pair], case, target)
            if kept:
                evidence = (f"{first.fault.name} alone explains {bare.name} without options", *lines)
                return Pair((first, second), (bare, None), pair.distance, evidence)
    return None


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
