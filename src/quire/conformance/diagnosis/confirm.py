"""Confirms candidates with probes. A name needs a probe that fails as the fault predicts, and none that refutes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.attempt import TriedCall, try_any
from quire.conformance.diagnosis.candidates import Match, carries, explains
from quire.conformance.diagnosis.probes import Probe, probes
from quire.conformance.runner.target import Target

FEW = 0.02
"""The share of elements that a prediction may miss in one probe."""


@dataclass
class Confirmation:
    """Candidates while probes run."""

    found: list[Match]
    evidence: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    """Faults that some probe supports."""
    correct: list[str] = field(default_factory=list)
    """Probes with a correct result."""
    missed_once: bool = False

    def take(self, probe: Probe, done: TriedCall) -> None:
        """Drops the candidates that a probe refutes."""
        if done.error:
            return
        if done.is_correct:
            self.correct.append(probe.what)
            self._keep([m for m in self.found if not _shows(m, done)], f"correct with {probe.what}, which excludes")
            return
        kept = self._supported(probe, done)
        if kept or probe.required:
            self._keep(kept, f"wrong with {probe.what}, but not as predicted by")
        self.held |= {match.fault.name for match in kept}

    def _supported(self, probe: Probe, done: TriedCall) -> list[Match]:
        """Candidates that explain a probe with a wrong result."""
        kept = [match for match in self.found if explains(match, done)]
        fixed = [match for match in self.found if match.fault.solve is None]
        if probe.required and any(match not in kept for match in fixed):
            # A fault without free parameters fitted the first result by chance. So may one whose parameters are solved each time.
            kept = [match for match in kept if match.fault.solve is None or carries(match, done)]
        if not kept and probe.required and not self.missed_once:
            # Some faults make numbers that a rounding decides. Those without free parameters may miss a few of them, once.
            self.missed_once, kept = True, [match for match in fixed if _nearly(match, done)]
        return kept

    def _keep(self, kept: list[Match], why: str) -> None:
        left = {match.fault.name for match in kept}
        gone = dict.fromkeys(match.fault.name for match in self.found if match.fault.name not in left)
        if gone:
            self.evidence.append(f"{why} {', '.join(gone)}")
        self.found = kept

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(match.fault.name for match in self.found))


def confirm(found: list[Match], case: Case, target: Target) -> tuple[list[Match], list[str]]:
    """The candidates that probes support, and the evidence. Where several explain all required probes, more are run until
    one is left."""
    state = Confirmation(found)
    for probe in probes(case):
        if not state.found or (len(state.names) < 2 and not probe.required):
            break
        done = try_any(probe.case, target)
        if done is not None:
            state.take(probe, done)
    alone = [name for name in state.names if name not in state.held]
    if alone:
        state.evidence.append(f"no probe confirms {', '.join(alone)}")
    kept = [match for match in state.found if match.fault.name in state.held]
    return kept, [*state.evidence, *([f"correct with {', with '.join(state.correct)}"] if state.correct else [])]


def _shows(match: Match, done: TriedCall) -> bool:
    """Whether a fault would show in a probe that is correct, which refutes it. A solved parameter that names a place of one call
    (a row, a page) says nothing about another call."""
    if not match.fault.applies(done.call) or (match.fault.solve is not None and not match.fault.lasting):
        return False
    return not carries(match, done)


def _nearly(match: Match, done: TriedCall) -> bool:
    """Whether a fault explains almost every element of another wrong result."""
    try:
        return match.fault.applies(done.call) and done.share_missed(match.stages) <= FEW
    except (RuntimeError, IndexError, ValueError):
        return False
