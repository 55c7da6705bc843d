"""From a wrong write to a name, as `diagnose` does for attention: the faults of writes predict what the cache holds, and a name is
confirmed by probes. Otherwise the finding is a symptom, or `unknown` with what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from quire.conformance.cases.case import Case
from quire.conformance.diagnosis.attempt import try_any
from quire.conformance.diagnosis.candidates import NAMED_WRITES, SYMPTOMS_OF_WRITES, Match, matches
from quire.conformance.diagnosis.confirm import confirm
from quire.conformance.diagnosis.diagnose import Diagnosis, plain
from quire.conformance.diagnosis.shrink import smaller
from quire.conformance.diagnosis.write_attempt import NAMES, WriteAttempt, attempt_write
from quire.conformance.faults import BY_NAME
from quire.conformance.reporting.report import UNKNOWN, Finding, Where
from quire.conformance.runner.target import Failure, Target

REPEATS = 3
"""How often a write is repeated."""


def diagnose_write(case: Case, target: Target, first: WriteAttempt, trusted: frozenset[str] = frozenset()) -> Diagnosis:
    """Names the fault behind a wrong write of a target."""
    differs = check_repeated_writes(case, target, first)
    if differs is not None:
        return _found(differs[0], case, first, (), differs[1])
    done = first
    if case.poison not in ("decoy", "decoy2"):
        here = case.replace(poison="decoy")
        done = attempt_write(here, target)
        if done.is_correct:
            line = f"correct when padding rows hold numbers, wrong when they hold {case.poison}"
            return _found("nan-leak", case, first, (line,))
        case = here
    if done.failure is not None:
        return _found(done.failure.fault, case, done, (), done.error)
    if all(_same_bytes(held, done.call.before[what]) for what, held in done.held.items()):
        return _symptom("nothing is written", case, done, ())
    found, far = matches(done, NAMED_WRITES)
    evidence: list[str] = []
    known = [match for match in found if match.fault.name in trusted and match.fault.solve is None]
    if not known:
        known, evidence = confirm(found, case, target)
    if known:
        return _named(known, far, case, done, tuple(evidence))
    found, _ = matches(done, SYMPTOMS_OF_WRITES)
    found, more = confirm(found, case, target)
    if found:
        return _symptom(found[0].fault.effect, case, done, (*evidence, *more), found[0])
    small = smaller(case, target, lambda case, done: True)
    again = try_any(small, target) if small != case else None
    if isinstance(again, WriteAttempt) and not again.error and again.off > 1:
        case, done = small, again
    summary = f"no fault of the catalogue explains it; wrong: {spread_of_write(done)}"
    return _diagnosed(Finding(UNKNOWN, (UNKNOWN,), summary=summary), case, done, tuple(evidence))


def check_repeated_writes(case: Case, target: Target, first: WriteAttempt) -> tuple[str, str] | None:
    """Repeats a write. If the bits differ, the fault's name and a description."""
    for _ in range(REPEATS):
        again = attempt_write(case, target, None)
        if isinstance(again.failure, Failure):
            return again.failure.fault, f"it fails only in some calls: {again.failure}"
        ends = {"q": case.live}
        if not all(_same_bytes(first.held[what][: ends.get(what)], x[: ends.get(what)]) for what, x in again.held.items()):
            return "two-runs-differ", BY_NAME["two-runs-differ"].effect
    return None


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def spread_of_write(done: WriteAttempt) -> str:
    """Which elements are wrong, in words."""
    words = []
    for what, ratio in done.ratios.items():
        wrong = ratio > 1
        if not bool(wrong.any()):
            continue
        slots = f" in {int(wrong.flatten(2).any(2).sum())} slots" if what in ("k", "v") else f" of {ratio.numel()}"
        words.append(f"{int(wrong.sum())} elements of {NAMES[what]}{slots}")
    rows = done.rows_wrong.nonzero().flatten().tolist()
    words.append(f"tokens {', '.join(map(str, rows[:8]))}{' ...' if len(rows) > 8 else ''}" if rows else "no token of the call")
    return "; ".join(words)


def where_of_write(done: WriteAttempt) -> Where:
    """The worst element."""
    if done.error:
        return Where()
    worst = done.worst
    if worst.what == "q":
        row, head, dim = worst.place
        return _of_row(done, row, Where(row=row, head=head, dim=dim))
    number, offset, head, *rest = worst.place
    page = int(done.call.pages_of[number])
    place = Where(head=head, dim=rest[0] if rest else None, page=page, offset=offset)
    rows = (done.call.slots[: done.call.live].cpu() == page * done.call.case.page_size + offset).nonzero().flatten()
    return _of_row(done, int(rows[0]), place) if rows.numel() else place


def _of_row(done: WriteAttempt, row: int, place: Where) -> Where:
    case = done.call.case
    ends = torch.tensor(case.q_lens).cumsum(0)
    seq = int((ends <= row).sum())
    return replace(place, sequence=seq, row=row, position=case.kv_lens[seq] - int(ends[seq]) + row)


def values_of_write(done: WriteAttempt) -> tuple[float | None, float | None]:
    """Expected and actual value of the worst element, in units of its scale; none where nothing should be written."""
    if done.error:
        return None, None
    what, index = done.worst
    if what == "q":
        assert done.truth.q is not None
        return float(done.truth.q.x[index]), float(done.held["q"][index])
    stored = done.truth.parts[what[0]]
    if what.endswith("_scale"):
        assert stored.scale is not None
        want = float(stored.scale[index])
        return None if math.isnan(want) else want, float(done.held[what][index])
    if not bool(stored.written[index]):
        return None, None
    return float(stored.value[index]), float(done.numbers(what)[index])


def _named(
    found: list[Match], far: list[tuple[str, float]], case: Case, done: WriteAttempt, evidence: tuple[str, ...]
) -> Diagnosis:
    best, equivalent = found[0], tuple(dict.fromkeys(match.fault.name for match in found))
    margin = min((off for name, off in far if name not in equivalent), default=math.inf)
    finding = Finding(best.fault.name, equivalent, plain(best.parameters), best.distance, margin, ranking=tuple(far[:8]))
    return _diagnosed(replace(finding, summary=best.fault.effect), case, done, evidence)


def _found(name: str, case: Case, done: WriteAttempt, evidence: tuple[str, ...], summary: str = "") -> Diagnosis:
    return _diagnosed(Finding(name, (name,), summary=summary or BY_NAME[name].effect), case, done, evidence)


def _symptom(looks: str, case: Case, done: WriteAttempt, evidence: tuple[str, ...], match: Match | None = None) -> Diagnosis:
    parameters = {} if match is None else plain(match.parameters)
    finding = Finding(UNKNOWN, (UNKNOWN,), parameters, symptom=looks, summary=spread_of_write(done))
    return _diagnosed(finding, case, done, evidence)


def _diagnosed(finding: Finding, case: Case, done: WriteAttempt, evidence: tuple[str, ...]) -> Diagnosis:
    expected, actual = values_of_write(done)
    place = {"where": where_of_write(done), "expected": expected, "actual": actual}
    return Diagnosis([replace(finding, reproduce=str(case), evidence=evidence, **place)], done)  # type: ignore[arg-type]
