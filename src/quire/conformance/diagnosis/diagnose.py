"""From a wrong result to a name.

Every fault of the catalogue predicts what a kernel that has it would give for the same inputs. A fault whose prediction is within
the budget at every element is a candidate. Don't-care memory holds plain numbers then, so that the prediction is a number whatever
a kernel reads. A candidate becomes the finding's name only if probes confirm it (`confirm`): other cases fail as it predicts, and
none refutes it. Where no name is confirmed, the finding is `unknown`, with the symptom if there is one, the place of the error and
the smallest case that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.conformance.cases.case import Case
from quire.conformance.diagnosis import precision
from quire.conformance.diagnosis.attempt import Attempt, TriedCall, attempt, run_on, try_case
from quire.conformance.diagnosis.candidates import SYMPTOMS, Match, matches
from quire.conformance.diagnosis.confirm import confirm
from quire.conformance.diagnosis.determinism import check_determinism
from quire.conformance.diagnosis.key_picture import key_picture
from quire.conformance.diagnosis.locate import spread, values_at_worst, where
from quire.conformance.diagnosis.pairs import pair_of_faults
from quire.conformance.diagnosis.shrink import keep, shrink
from quire.conformance.faults import BY_NAME, Parameters
from quire.conformance.faults.solve import OPEN
from quire.conformance.reporting.report import UNKNOWN, Finding
from quire.conformance.runner.target import Target

LENGTHS: dict[str, Callable[[int, int], bool]] = {
    "one new token": lambda q_len, kv_len: q_len == 1,
    "several new tokens": lambda q_len, kv_len: q_len > 1,
    "several new tokens and a context": lambda q_len, kv_len: 1 < q_len < kv_len,
    "new tokens only": lambda q_len, kv_len: q_len == kv_len,
}
"""Sequences, by their lengths, for which operators have separate kernels."""


@dataclass
class Diagnosis:
    """The findings of one wrong result, and the attempt that shows them: error maps are drawn from it."""

    findings: list[Finding]
    attempt: Any

    @property
    def name(self) -> str:
        return self.findings[0].fault


@dataclass
class DiagnosisState:
    """A wrong result and what is known about it so far."""

    case: Case
    target: Target
    done: Attempt
    trusted: frozenset[str] = frozenset()
    """Faults that were confirmed before in this run: where one of them explains the result, no probe is run."""
    shrinks: bool = True
    """Whether to look for a smaller failing case, for sub-batches, pairs and symptoms."""
    evidence: tuple[str, ...] = ()
    """What repeated calls and probes showed."""

    def with_evidence(self, *lines: str) -> DiagnosisState:
        return replace(self, evidence=(*self.evidence, *lines))


def diagnose(
    case: Case, target: Target, first: Attempt, *, trusted: frozenset[str] = frozenset(), shrinks: bool = True
) -> Diagnosis:
    """Names the fault behind a wrong result of a target."""
    state = DiagnosisState(case, target, first, trusted, shrinks)
    if first.failure is not None:
        return _named(first.failure.fault, state, first.error)
    differs = check_determinism(case, target, first)
    if differs is not None:
        return _named(differs[0], state, differs[1])
    found = _by_poison(state)
    if isinstance(found, Diagnosis):
        return found
    state = _by_stamp(found)
    if state.done.failure is not None:
        return _named(state.done.failure.fault, state, state.done.error)
    return _of_whole_output(state) or _by_prediction(state)


def _by_poison(state: DiagnosisState) -> Diagnosis | DiagnosisState:
    """Replaces what don't-care memory holds by plain numbers. If that makes the result correct, the kernel reads that memory."""
    case, target, first = state.case, state.target, state.done
    if case.poison not in ("decoy", "decoy2", "large"):
        here = case.replace(poison="decoy")
        done = attempt(here, target)
        if done.is_correct:
            # A key with a small weight changes little, unless its numbers are large. A weight of 0 changes nothing.
            large = case.replace(poison="large")
            with_large = attempt(large, target)
            if not with_large.is_correct:
                here, done = large, with_large
        if done.is_correct:
            # A kernel that is wrong only sometimes may have been correct this time.
            differs = check_determinism(here, target, done) or check_determinism(case, target, first)
            if differs is not None:
                return _named(differs[0], state, differs[1])
            line = f"correct when don't-care slots hold numbers, wrong when they hold {case.poison}"
            return _named("nan-leak", state.with_evidence(line))
        state = replace(state, case=here, done=done).with_evidence(
            f"also wrong when don't-care slots hold numbers instead of {case.poison}"
        )
    if state.case.tail != "page" and state.done.is_correct is False:
        here = state.case.replace(tail="page")
        done = attempt(here, target)
        if done.is_correct:
            line = "correct when page-table cells beyond a sequence's end hold valid page ids, wrong when they hold -1"
            return _named("table-tail-read", replace(state, done=first, case=case).with_evidence(line))
        state = replace(state, case=here, done=done)
    return state


def _by_stamp(state: DiagnosisState) -> DiagnosisState:
    """Fills the output with other bytes before the call, where some elements were not written."""
    done = state.done
    if done.error or not bool(done.bare[: done.call.live].any()):
        return state
    again = attempt(state.case.replace(fill_byte=0x7A), state.target)
    if again.error:
        return state
    bare = done.bare[: done.call.live]
    same = bool((again.bare[: done.call.live] == bare).all())
    kept = f"{int(bare.sum())} elements are never written: they keep the bytes that the output was filled with"
    return state.with_evidence(kept if same else "which elements are not written depends on what the output held before the call")


def _of_whole_output(state: DiagnosisState) -> Diagnosis | None:
    """A symptom that says nothing about the cause: the whole output is zero, or not finite, or was not written."""
    done = state.done
    out, right = done.out[: done.call.live], done.truth.outcome.out[: done.call.live]
    if not out.numel() or not bool((right != 0).any()):
        return None
    bare = done.bare[: done.call.live]
    if bool(bare.all()):
        return _symptom("no element of the output is written", state)
    if bool((out == 0).all()):
        return _symptom("every element of the output is zero", state)
    if bool(out.isnan().all()):
        return _symptom("every element of the output is NaN", state)
    return None


def _by_prediction(state: DiagnosisState) -> Diagnosis:
    """Faults of the catalogue, then pairs of them, then symptoms."""
    case, target, done = state.case, state.target, state.done
    narrow = precision.products(case, done.call, run_on(target))
    if narrow is not None:
        return _of_precision(narrow, state)
    found, far = matches(done)
    # A fault that was confirmed before is not confirmed again, unless one with fewer free parameters explains this.
    known = [match for match in found if match.fault.name in state.trusted and match.fault.solve is None]
    evidence: list[str] = []
    if not known:
        known, evidence = confirm(found, case, target)
    if known:
        return _of_matches(known, far, state.with_evidence(*evidence))
    narrow = precision.sums(case, done.call, run_on(target))
    if narrow is not None:
        return _of_precision(narrow, state.with_evidence(*evidence))
    state = state.with_evidence(*evidence)
    if state.shrinks is False:
        # Called by another diagnosis, which tries sub-batches, pairs and symptoms itself.
        return _unknown(state)
    return _of_some_lengths(state) or _of_pair(state) or _of_symptom(state) or _unknown(state)


def _of_matches(found: list[Match], far: list[tuple[str, float]], state: DiagnosisState) -> Diagnosis:
    best, equivalent = found[0], tuple(dict.fromkeys(match.fault.name for match in found))
    finding = Finding(
        best.fault.name,
        equivalent,
        plain(best.parameters),
        best.distance,
        min((off for name, off in far if name not in equivalent), default=torch.inf),
        summary=best.fault.effect,
        ranking=tuple(far[:8]),
    )
    return _diagnosis(finding, state, best)


def _of_some_lengths(state: DiagnosisState) -> Diagnosis | None:
    """A fault of one of the kernels that share a batch: sequences of other lengths are correct. The wrong ones are run alone."""
    case, wrong = state.case, set(state.done.wrong_sequences)
    queried = {i for i in range(case.seqs) if case.q_lens[i]}
    for lengths, belongs in LENGTHS.items():
        mine = {i for i in queried if belongs(case.q_lens[i], case.kv_lens[i])}
        if not wrong <= mine < queried:
            continue
        alone = keep(case, tuple(sorted(mine)))
        again = try_case(alone, state.target)
        if again is None or again.error or again.off <= 1:
            continue
        found = diagnose(alone, state.target, again, trusted=state.trusted, shrinks=False)
        if found.name != UNKNOWN:
            line = f"only sequences of {lengths} are wrong, and they are wrong without the others"
            first = found.findings[0]
            parameters = {"only": f"sequences of {lengths}", **first.parameters}
            evidence = (*state.evidence, line, *first.evidence)
            return replace(found, findings=[replace(first, parameters=parameters, evidence=evidence), *found.findings[1:]])
    return None


def _of_pair(state: DiagnosisState) -> Diagnosis | None:
    """Two faults at once, the first of which can be reproduced alone."""

    def named_alone(case: Case, done: Attempt) -> list[Match]:
        return confirm(matches(done)[0], case, state.target)[0]

    pair = pair_of_faults(state.case, state.target, state.done, named_alone)
    if pair is None:
        return None
    found = []
    for match, alone in zip(pair.matches, pair.reproduced):
        finding = Finding(match.fault.name, (match.fault.name,), plain(match.parameters), pair.distance, summary=match.fault.effect)
        finding = _diagnosis(finding, state.with_evidence(*pair.evidence), match).findings[0]
        found.append(replace(finding, reproduce=str(alone or state.case)))
    return Diagnosis(found, state.done)


def _of_symptom(state: DiagnosisState) -> Diagnosis | None:
    """A symptom of the catalogue that explains the result, and the results of probes."""
    found, _ = matches(state.done, SYMPTOMS)
    found, evidence = confirm(found, state.case, state.target)
    if not found:
        return None
    return _symptom(found[0].fault.effect, state.with_evidence(*evidence), found[0])


def _symptom(looks: str, state: DiagnosisState, match: Match | None = None) -> Diagnosis:
    parameters = {} if match is None else plain(match.parameters)
    finding = Finding(UNKNOWN, (UNKNOWN,), parameters, symptom=looks, summary=spread(state.done))
    return _diagnosis(finding, state, match)


def _unknown(state: DiagnosisState) -> Diagnosis:
    if state.shrinks:
        # The smallest case that fails shows the place best.
        small = shrink(state.case, state.target, lambda case, done: _has_no_name(case, state.target, done))
        done = try_case(small, state.target) if small != state.case else None
        if done is not None and not done.error and done.off > 1:
            state = replace(state, case=small, done=done)
    finding = Finding(UNKNOWN, (UNKNOWN,), summary=f"no fault of the catalogue explains it; wrong: {spread(state.done)}")
    return _diagnosis(finding, state)


def _has_no_name(case: Case, target: Target, done: TriedCall) -> bool:
    assert isinstance(done, Attempt)
    return diagnose(case, target, done, shrinks=False).name == UNKNOWN


def _of_precision(found: precision.Found, state: DiagnosisState) -> Diagnosis:
    finding = Finding(found.fault, (found.fault,), found.parameters, summary=BY_NAME[found.fault].effect)
    return _diagnosis(finding, state.with_evidence(found.evidence))


def _named(name: str, state: DiagnosisState, summary: str = "") -> Diagnosis:
    """A fault that shows in how a kernel behaves."""
    return _diagnosis(Finding(name, (name,), summary=summary or BY_NAME[name].effect), state)


def _diagnosis(finding: Finding, state: DiagnosisState, match: Match | None = None) -> Diagnosis:
    """A finding with its place, values, picture, evidence and the line that reproduces it."""
    done = state.done
    expected, actual = values_at_worst(done)
    finding = replace(
        finding,
        where=where(done, None if match is None else match.stages),
        reproduce=str(state.case),
        evidence=state.evidence,
        expected=expected,
        actual=actual,
        picture="" if done.error else key_picture(done),
    )
    return Diagnosis([finding], done)


def plain(parameters: Parameters) -> dict[str, Any]:
    """Parameters that JSON can hold."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = {", ".join(map(str, key)) if isinstance(key, tuple) else str(key): v for key, v in value.items()}
        found[name] = "the end" if value == OPEN else value
    return found
