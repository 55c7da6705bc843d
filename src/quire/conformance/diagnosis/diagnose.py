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
from quire.conformance.diagnosis.attempt import Attempt, asking, attempt, try_case
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
    "several new tokens after others": lambda q_len, kv_len: 1 < q_len < kv_len,
    "new tokens only": lambda q_len, kv_len: q_len == kv_len,
}
"""Sequences, by their lengths, for which operators have separate kernels."""


@dataclass
class Diagnosis:
    """The findings of one wrong result, and the attempt that shows them: error maps are drawn from it."""

    findings: list[Finding]
    attempt: Attempt

    @property
    def name(self) -> str:
        return self.findings[0].fault


@dataclass
class Question:
    """A wrong result that is being diagnosed."""

    case: Case
    target: Target
    done: Attempt
    trusted: frozenset[str] = frozenset()
    """Faults that were confirmed before in this run: where one of them explains the result, no probe is run."""
    shrinks: bool = True
    evidence: tuple[str, ...] = ()

    def also(self, *said: str) -> Question:
        return replace(self, evidence=(*self.evidence, *said))


def diagnose(
    case: Case, target: Target, first: Attempt, *, trusted: frozenset[str] = frozenset(), shrinks: bool = True
) -> Diagnosis:
    """What is wrong with a target, given a wrong result of it."""
    asked = Question(case, target, first, trusted, shrinks)
    if first.failure is not None:
        return _named(first.failure.fault, asked, first.error)
    differs = check_determinism(case, target, first)
    if differs is not None:
        return _named(differs[0], asked, differs[1])
    found = _by_poison(asked)
    if isinstance(found, Diagnosis):
        return found
    asked = _by_stamp(found)
    if asked.done.failure is not None:
        return _named(asked.done.failure.fault, asked, asked.done.error)
    return _of_whole_output(asked) or _by_prediction(asked)


def _by_poison(asked: Question) -> Diagnosis | Question:
    """Replaces what don't-care memory holds by plain numbers. If that makes the result correct, the kernel reads that memory."""
    case, target, first = asked.case, asked.target, asked.done
    if case.poison not in ("decoy", "decoy2"):
        here = case.replace(poison="decoy")
        done = attempt(here, target)
        if done.is_right:
            # A kernel that is wrong now and then may have been right just now.
            differs = check_determinism(here, target, done) or check_determinism(case, target, first)
            if differs is not None:
                return _named(differs[0], asked, differs[1])
            said = f"correct when don't-care slots hold numbers, wrong when they hold {case.poison}"
            return _named("nan-leak", asked.also(said))
        asked = replace(asked, case=here, done=done).also(f"wrong too when don't-care slots hold numbers instead of {case.poison}")
    if asked.case.tail != "page" and asked.done.is_right is False:
        here = asked.case.replace(tail="page")
        done = attempt(here, target)
        if done.is_right:
            said = "correct when cells behind a sequence's end hold ids of pages, wrong when they hold -1"
            return _named("table-tail-read", replace(asked, done=first, case=case).also(said))
        asked = replace(asked, case=here, done=done)
    return asked


def _by_stamp(asked: Question) -> Question:
    """Fills the output with other bytes before the call, where some elements were not written."""
    done = asked.done
    if done.error or not bool(done.bare[: done.call.live].any()):
        return asked
    again = attempt(asked.case.replace(fill_byte=0x7A), asked.target)
    if again.error:
        return asked
    bare = done.bare[: done.call.live]
    same = bool((again.bare[: done.call.live] == bare).all())
    kept = f"{int(bare.sum())} elements keep either of two byte patterns"
    return asked.also(kept if same else "other elements are unwritten when the output held other bytes before")


def _of_whole_output(asked: Question) -> Diagnosis | None:
    """A symptom that says nothing about the cause: the whole output is zero, or not finite, or was not written."""
    done = asked.done
    out, right = done.out[: done.call.live], done.right.outcome.out[: done.call.live]
    if not out.numel() or not bool((right != 0).any()):
        return None
    bare = done.bare[: done.call.live]
    if bool(bare.all()):
        return _symptom("no element of the output is written", asked)
    if bool((out == 0).all()):
        return _symptom("every element of the output is zero", asked)
    if bool(out.isnan().all()):
        return _symptom("every element of the output is NaN", asked)
    return None


def _by_prediction(asked: Question) -> Diagnosis:
    """Faults of the catalogue, then pairs of them, then symptoms."""
    case, target, done = asked.case, asked.target, asked.done
    narrow = precision.products(case, done.call, asking(target))
    if narrow is not None:
        return _of_precision(narrow, asked)
    found, far = matches(done)
    # A fault that was confirmed before is not confirmed again, unless one with fewer free parameters explains this.
    known = [match for match in found if match.fault.name in asked.trusted and match.fault.solve is None]
    said: list[str] = []
    if not known:
        known, said = confirm(found, case, target)
    if known:
        return _of_matches(known, far, asked.also(*said))
    narrow = precision.sums(case, done.call, asking(target))
    if narrow is not None:
        return _of_precision(narrow, asked.also(*said))
    asked = asked.also(*said)
    if asked.shrinks is False:
        # SequenceResult of another diagnosis, which looks for these itself.
        return _unknown(asked)
    return _of_some_lengths(asked) or _of_pair(asked) or _of_symptom(asked) or _unknown(asked)


def _of_matches(found: list[Match], far: list[tuple[str, float]], asked: Question) -> Diagnosis:
    best, alike = found[0], tuple(dict.fromkeys(match.fault.name for match in found))
    finding = Finding(
        best.fault.name,
        alike,
        _plain(best.parameters),
        best.distance,
        min((off for name, off in far if name not in alike), default=torch.inf),
        summary=best.fault.effect,
        ranking=tuple(far[:8]),
    )
    return _diagnosis(finding, asked, best)


def _of_some_lengths(asked: Question) -> Diagnosis | None:
    """A fault of one of the kernels that share a batch: sequences of other lengths are correct. The wrong ones are run alone."""
    case, wrong = asked.case, set(asked.done.wrong_sequences)
    queried = {i for i in range(case.seqs) if case.q_lens[i]}
    for lengths, belongs in LENGTHS.items():
        mine = {i for i in queried if belongs(case.q_lens[i], case.kv_lens[i])}
        if not wrong <= mine < queried:
            continue
        alone = keep(case, tuple(sorted(mine)))
        again = try_case(alone, asked.target)
        if again is None or again.error or again.off <= 1:
            continue
        found = diagnose(alone, asked.target, again, trusted=asked.trusted, shrinks=False)
        if found.name != UNKNOWN:
            said = f"only sequences of {lengths} are wrong, and they are wrong without the others"
            first = found.findings[0]
            parameters = {"only": f"sequences of {lengths}", **first.parameters}
            evidence = (*asked.evidence, said, *first.evidence)
            return replace(found, findings=[replace(first, parameters=parameters, evidence=evidence), *found.findings[1:]])
    return None


def _of_pair(asked: Question) -> Diagnosis | None:
    """Two faults at once, the first of which can be reproduced alone."""

    def named_alone(case: Case, done: Attempt) -> list[Match]:
        return confirm(matches(done)[0], case, asked.target)[0]

    pair = pair_of_faults(asked.case, asked.target, asked.done, named_alone)
    if pair is None:
        return None
    found = []
    for match, alone in zip(pair.matches, pair.reproduced):
        finding = Finding(
            match.fault.name, (match.fault.name,), _plain(match.parameters), pair.distance, summary=match.fault.effect
        )
        finding = _diagnosis(finding, asked.also(*pair.evidence), match).findings[0]
        found.append(replace(finding, reproduce=str(alone or asked.case)))
    return Diagnosis(found, asked.done)


def _of_symptom(asked: Question) -> Diagnosis | None:
    """A symptom of the catalogue that explains the result, and those of probes."""
    found, _ = matches(asked.done, SYMPTOMS)
    found, said = confirm(found, asked.case, asked.target)
    if not found:
        return None
    return _symptom(found[0].fault.effect, asked.also(*said), found[0])


def _symptom(effect: str, asked: Question, match: Match | None = None) -> Diagnosis:
    parameters = {} if match is None else _plain(match.parameters)
    finding = Finding(UNKNOWN, (UNKNOWN,), parameters, symptom=effect, summary=spread(asked.done))
    return _diagnosis(finding, asked, match)


def _unknown(asked: Question) -> Diagnosis:
    if asked.shrinks:
        # The smallest case that fails shows the place best.
        small = shrink(asked.case, asked.target, lambda case, done: _has_no_name(case, asked.target, done))
        done = try_case(small, asked.target) if small != asked.case else None
        if done is not None and not done.error and done.off > 1:
            asked = replace(asked, case=small, done=done)
    finding = Finding(UNKNOWN, (UNKNOWN,), summary=f"no fault of the catalogue explains it; wrong are {spread(asked.done)}")
    return _diagnosis(finding, asked)


def _has_no_name(case: Case, target: Target, done: Attempt) -> bool:
    return diagnose(case, target, done, shrinks=False).name == UNKNOWN


def _of_precision(found: precision.Found, asked: Question) -> Diagnosis:
    finding = Finding(found.fault, (found.fault,), found.parameters, summary=BY_NAME[found.fault].effect)
    return _diagnosis(finding, asked.also(found.said))


def _named(name: str, asked: Question, summary: str = "") -> Diagnosis:
    """A fault that shows in how a kernel behaves."""
    return _diagnosis(Finding(name, (name,), summary=summary or BY_NAME[name].effect), asked)


def _diagnosis(finding: Finding, asked: Question, match: Match | None = None) -> Diagnosis:
    """A finding with its place, values, picture, evidence and the line that reproduces it."""
    done = asked.done
    expected, actual = values_at_worst(done)
    finding = replace(
        finding,
        where=where(done, None if match is None else match.stages),
        reproduce=str(asked.case),
        evidence=asked.evidence,
        expected=expected,
        actual=actual,
        picture="" if done.error else key_picture(done),
    )
    return Diagnosis([finding], done)


def _plain(parameters: Parameters) -> dict[str, Any]:
    """Parameters that JSON can hold."""
    plain: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = {", ".join(map(str, key)) if isinstance(key, tuple) else str(key): v for key, v in value.items()}
        plain[name] = "the end" if value == OPEN else value
    return plain
