"""Candidates: faults of the catalogue whose prediction matches the result of a target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from quire.conformance.diagnosis.attempt import TriedCall
from quire.conformance.faults import ATTENTION, WRITES, Fault, Parameters


class Match(NamedTuple):
    """A fault with parameters that predicts a result."""

    fault: Fault
    parameters: Parameters
    distance: float

    @property
    def stages(self) -> Any:
        assert self.fault.change is not None
        return self.fault.change(**self.parameters)


SOLVED = 0.01
"""The largest relative difference of two solutions for the same number."""
NAMED = tuple(fault for fault in ATTENTION if fault.predicted and not fault.symptom)
SYMPTOMS = tuple(fault for fault in ATTENTION if fault.predicted and fault.symptom)
NAMED_WRITES = tuple(fault for fault in WRITES if fault.predicted and not fault.symptom)
SYMPTOMS_OF_WRITES = tuple(fault for fault in WRITES if fault.predicted and fault.symptom)


def matches(done: TriedCall, faults: tuple[Fault, ...] = NAMED) -> tuple[list[Match], list[tuple[str, float]]]:
    """The faults that explain a result, the most specific first, and the distance of every fault that was tried. A fault occurs
    with each of its parameters that explain the result: other results decide between them."""
    found: list[Match] = []
    far: list[tuple[str, float]] = []
    for fault in faults:
        if not fault.predicted or not fault.applies(done.call):
            continue
        tried = list(tries(fault, done))
        if tried:
            far.append((fault.name, min(match.distance for match in tried)))
            found += [match for match in tried if match.distance <= 1]
    # A fault whose parameters were solved from the result explains less than one without any.
    found.sort(key=lambda match: (match.fault.solve is not None, len(match.parameters) > 0))
    return found, sorted(far, key=lambda entry: entry[1])


def tries(fault: Fault, done: TriedCall) -> Iterator[Match]:
    """A fault with each of its parameter values; of solved ones, up to the first that explains the result."""
    proposals: list[Parameters] = list(fault.tries)
    if fault.solve is not None:
        try:
            proposals += fault.solve(done.seen)
        except (RuntimeError, IndexError, ValueError):
            # The result may hold any numbers; a solver that cannot interpret them proposes nothing.
            proposals = list(fault.tries)
    for parameters in proposals:
        match = Match(fault, parameters, 0.0)
        match = match._replace(distance=distance_to(match, done))
        yield match
        if match.distance <= 1 and fault.solve is not None:
            return


def carries(match: Match, done: TriedCall) -> bool:
    """Whether a fault explains another result with the same parameters."""
    return distance_to(match, done) <= 1


def distance_to(match: Match, done: TriedCall) -> float:
    """How far a fault's prediction is; infinite where it needs rows, keys or pages that the call does not have."""
    try:
        return done.distance_to(match.stages)
    except (RuntimeError, IndexError, ValueError):
        return math.inf


def explains(match: Match, done: TriedCall) -> bool:
    """Whether a fault explains another wrong result. Parameters that name a place in a call are solved again."""
    if not match.fault.applies(done.call):
        return False
    if carries(match, done):
        return True
    if match.fault.solve is None:
        return False
    again = [one for one in tries(match.fault, done) if one.distance <= 1]
    return any(_close(one.parameters, match.parameters) for one in again) if match.fault.lasting else bool(again)


def _close(a: Parameters, b: Parameters) -> bool:
    """Whether solved numbers are the same, but for what a solver misses."""
    return a.keys() == b.keys() and all(
        math.isclose(a[name], b[name], rel_tol=SOLVED) if isinstance(b[name], float) else a[name] == b[name] for name in b
    )
