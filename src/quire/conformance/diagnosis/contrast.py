"""What all failing cases have in common and no passing case has: "only with sinks", "only from kv_len 257 on".

Single facts come first, then pairs of facts. A statement must hold for every failing case and for no passing one. With
`run_case`, the smallest failing case is also run with each of its facts removed, and must pass: facts that only coincide are
dropped. Where no statement separates the cases, facts whose removal makes the smallest failing case pass are stated as necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.facts import Fact, field_facts, queried, sequence_facts, shape_facts, thresholds
from quire.conformance.reporting.report import Result
from quire.errors import ArgumentError

RunCase = Callable[[Case], "bool | None"]
"""Runs a case: whether it passes; None if the target cannot run it."""
MOST_STATEMENTS = 12
"""How many statements are tested by running cases."""
MOST_NECESSARY = 30
"""How many facts are removed in search of necessary ones."""
Place = tuple[Case, int]
"""A case and one of its sequences."""


@dataclass
class Evidence:
    """Where a target fails and where it passes."""

    failing: list[Case]
    passing: list[Case]
    wrong: dict[Case, tuple[int, ...]] = field(default_factory=dict)
    """Of failing cases: the sequences with wrong rows, where they are known."""
    run_case: RunCase | None = None
    passed: dict[Case, bool | None] = field(default_factory=dict)
    """Results of `run_case`."""

    @property
    def smallest(self) -> Case:
        return min(self.failing, key=lambda case: (sum(case.kv_lens), case.live))

    def places(self) -> tuple[list[Place], list[Place]]:
        """Sequences that are wrong, and those that are correct."""
        bad = [(case, i) for case in self.failing for i in self.wrong.get(case) or queried(case)]
        good = [(case, i) for case in self.passing for i in queried(case)]
        good += [(case, i) for case in self.failing if self.wrong.get(case) for i in queried(case) if i not in self.wrong[case]]
        return bad, good

    def passes(self, case: Case | None) -> bool | None:
        """Whether a case passes, by running it once; None if it cannot be run."""
        if case is None or self.run_case is None:
            return None
        if case not in self.passed:
            try:
                self.passed[case] = self.run_case(case)
            except (ValueError, IndexError, RuntimeError):
                self.passed[case] = None
        return self.passed[case]


def contrast_of(results: Sequence[Result], run_case: RunCase | None = None) -> str:
    """What distinguishes the failing cases of a run from the passing ones; empty if nothing does."""
    failing = [result for result in results if result.failed]
    passing = [result for result in results if result.status == "correct"]
    if not passing and len(failing) > 1:
        refused = any(result.status == "refused" for result in results)
        return f"in all {len(failing)} cases that were run{' and not refused' if refused else ''}"
    return contrast(failing, passing, run_case)


def contrast(failing: Sequence[Result], passing: Sequence[Result], run_case: RunCase | None = None) -> str:
    """As `contrast_of`, for some of the failing cases; empty without passing cases."""
    if not failing or not passing:
        return ""
    wrong = {result.case: result.wrong_sequences for result in failing if result.wrong_sequences}
    evidence = Evidence([r.case for r in failing], [r.case for r in passing], wrong, run_case)
    return next(_statements(evidence), "") or _necessary(evidence)


def _statements(evidence: Evidence) -> Iterator[str]:
    """Statements that separate failing from passing, those that no run refutes."""
    tested = 0
    for facts in _separating(evidence):
        statement = _tested(facts, evidence)
        if statement:
            yield statement
        tested += 1
        if tested >= MOST_STATEMENTS:
            return


def _separating(evidence: Evidence) -> Iterator[tuple[Fact, ...]]:
    """Facts, then pairs of facts, that hold wherever it fails and nowhere else: for cases first, then for single sequences."""
    cases = ([(case, 0) for case in evidence.failing], [(case, 0) for case in evidence.passing])
    sequences = evidence.places()
    of_cases = [fact for fact in _facts(evidence, *cases, False) if _common(fact, cases[0])]
    of_sequences = [fact for fact in _facts(evidence, *sequences, True) if _common(fact, sequences[0])]
    for facts, (_, good) in ((of_cases, cases), (of_sequences, sequences)):
        for fact in facts:
            if not any(fact.holds(*place) for place in good):
                yield (fact,)
    useful = [fact for fact in of_cases if not all(fact.holds(*place) for place in cases[1])]
    yield from _pairs(useful, cases[1])
    yield from _pairs([*useful, *of_sequences], sequences[1])


def _changed(change: Callable[..., Case | None], *given: Any) -> Case | None:
    """A changed case; None if there is none, for example with a head_dim below its v_in_k."""
    try:
        return change(*given)
    except ArgumentError:
        return None


def _pairs(facts: list[Fact], good: list[Place]) -> Iterator[tuple[Fact, ...]]:
    held = {id(fact): {n for n, place in enumerate(good) if fact.holds(*place)} for fact in facts}
    for a, b in combinations(facts, 2):
        alone, other = held[id(a)], held[id(b)]
        if alone and other and not alone & other:
            yield a, b


def _facts(evidence: Evidence, bad: list[Place], good: list[Place], of_sequence: bool) -> Iterable[Fact]:
    if of_sequence:
        return [*sequence_facts(), *thresholds(bad, good, True)]
    return [*field_facts([*evidence.failing, *evidence.passing]), *shape_facts(), *thresholds(bad, good, False)]


def _common(fact: Fact, bad: list[Place]) -> bool:
    return bool(bad) and all(fact.holds(*place) for place in bad)


def _tested(facts: tuple[Fact, ...], evidence: Evidence) -> str:
    """The statement, with the runs that confirm it; empty if one refutes it."""
    case, confirmed = evidence.smallest, True
    for fact in facts:
        passes = evidence.passes(_changed(fact.without, case))
        if passes is False:
            return ""
        confirmed &= passes is True
    sharp = [_sharpened(fact, evidence) for fact in facts]
    statement = f"only {' and '.join(fact.text for fact in sharp)}"
    more = [fact.opposite for fact in sharp if len(sharp) == 1 and fact.opposite.startswith("correct")]
    if confirmed:
        more.append(f"{case.name} passes without {'either' if len(facts) > 1 else 'it'}")
    return statement + (f" ({'; '.join(more)})" if more else "")


def _sharpened(fact: Fact, evidence: Evidence) -> Fact:
    """A threshold, with the smallest number that fails: found by bisection, where cases can be run."""
    limit = fact.threshold
    if limit is None:
        return fact
    low, high = limit.passing, limit.value
    while high - low > 1:
        middle = (low + high) // 2
        passes = evidence.passes(_changed(limit.set_to, evidence.smallest, middle))
        if passes is None:
            return fact
        low, high = (middle, high) if passes else (low, middle)
    return Fact(f"from {limit.what} {high} on", fact.holds, fact.without, fact.of_sequence, f"correct up to {low}")


def _necessary(evidence: Evidence) -> str:
    """Facts of all failing cases whose removal makes the smallest one pass. Some passing cases have them too."""
    if evidence.run_case is None:
        return ""
    cases = ([(case, 0) for case in evidence.failing], [(case, 0) for case in evidence.passing])
    sequences = evidence.places()
    facts = [fact for fact in _facts(evidence, *cases, False) if _common(fact, cases[0])]
    facts += [fact for fact in _facts(evidence, *sequences, True) if _common(fact, sequences[0])]
    found: list[Fact] = []
    for fact in facts[:MOST_NECESSARY]:
        good = sequences[1] if fact.of_sequence else cases[1]
        if sum(fact.holds(*place) for place in good) * 2 > len(good):
            continue  # it holds for most passing cases, so it explains nothing
        if evidence.passes(_changed(fact.without, evidence.smallest)) is True:
            found.append(fact)
    if not found:
        return ""
    return _stated(found, evidence)


def _stated(found: list[Fact], evidence: Evidence) -> str:
    """The statement of necessary facts."""
    # The fact that the fewest passing cases share, and a second one if it excludes some of those.
    found.sort(key=lambda fact: len(_sharing((fact,), evidence)))
    stated: tuple[Fact, ...] = (found[0],)
    second = min(found[1:], key=lambda fact: len(_sharing((found[0], fact), evidence)), default=None)
    if second is not None and len(_sharing((found[0], second), evidence)) < len(_sharing(stated, evidence)):
        stated = (found[0], second)
    shared, several = len(_sharing(stated, evidence)), len(stated) > 1
    some = f"; {shared} passing case{'s have' if shared > 1 else ' has'} {'both' if several else 'it'} too" if shared else ""
    without = "either" if several else "it"
    return f"only {' and '.join(fact.text for fact in stated)} ({evidence.smallest.name} passes without {without}{some})"


def _sharing(facts: tuple[Fact, ...], evidence: Evidence) -> list[Case]:
    """Passing cases for which these facts hold, in some sequence."""
    return [case for case in evidence.passing if any(all(fact.holds(case, i) for fact in facts) for i in queried(case))]
