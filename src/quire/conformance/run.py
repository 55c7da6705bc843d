"""Runs a target through cases: asks, checks, and has every failure diagnosed."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

import quire
from quire.conformance.budget import ratios
from quire.conformance.build import build
from quire.conformance.call import Call
from quire.conformance.case import Case
from quire.conformance.diagnose import REPEATS, Attempt, attempt, call_other, cell, diagnose, others, repeated, same, unsteady
from quire.conformance.faults import BY_NAME
from quire.conformance.report import INTERRUPTED, Finding, Picture, Report, Result
from quire.conformance.target import Failure, Target, is_lost
from quire.conformance.threads import one_thread

ROWS_DRAWN = 512


def examine(case: Case, target: Target, trusted: frozenset[str] = frozenset()) -> Result:
    """One case: right, wrong and why, refused, or not asked. Faults in `trusted` were borne out before."""
    with one_thread():
        return _examine(case, target, trusted)


def _examine(case: Case, target: Target, trusted: frozenset[str]) -> Result:
    start = time.perf_counter()
    call = build(case, target.device)
    lacks = target.missing(call)
    if lacks is not None and case.lse:
        # Who gives no LSE can still be asked for the output.
        case = case.replace(lse=False)
        call = build(case, target.device)
        lacks = target.missing(call)
    if lacks is not None:
        return Result(case, "unsupported", lacks)
    beyond = target.limits(call)
    if beyond is not None and not target.refuses:
        return Result(case, "unsupported", beyond)
    first = attempt(case, target, call)
    result = _judge(case, target, first, beyond, trusted)
    return replace(result, seconds=round(time.perf_counter() - start, 4))


def _judge(case: Case, target: Target, first: Attempt, beyond: str | None, trusted: frozenset[str]) -> Result:
    if first.failure is not None:
        if beyond is not None and first.failure.fault == "raises":
            return Result(case, "refused", f"{beyond}: {first.error}")
        return failed(case, first.failure)
    findings = list(_broken(case, first.call))
    error, wrong = _count(first)
    if error > 1:
        findings.insert(0, diagnose(case, target, first, trusted=trusted))
    elif beyond is None:
        moody = _moody(case, target, first)
        if moody is not None:
            findings.append(Finding(moody[0], moody[:1], summary=moody[1], reproduce=str(case)))
    status = "right" if error <= 1 and not findings else "wrong"
    reason = "" if beyond is None else f"answered although {beyond} is beyond its limits"
    picture = _picture(first, findings) if status == "wrong" else None
    return Result(case, status, reason, error, wrong, tuple(findings), picture=picture)


def failed(case: Case, failure: Failure) -> Result:
    """No answer where one was due."""
    said = f"{failure} (at {failure.at})" if failure.at else str(failure)
    return Result(case, "raised", said, findings=(Finding(failure.fault, (failure.fault,), summary=said, reproduce=str(case)),))


def _count(done: Attempt) -> tuple[float, int]:
    """The largest error in budgets, and how many elements of the output are beyond theirs."""
    live = done.call.live
    off = ratios(done.call.out.cpu(), done.call.unwritten().cpu(), done.right, live)
    return done.off, int((off > 1).sum())


def _broken(case: Case, call: Call) -> Iterable[Finding]:
    seals = call.broken_seals()
    groups = {
        "writes-padding-rows": [s for s in seals if s.startswith("padding")],
        "writes-outside-output": [s for s in seals if s.startswith(("before", "behind"))],
        "changes-inputs": [s for s in seals if " " not in s],
    }
    for name, parts in groups.items():
        if parts:
            yield Finding(name, (name,), summary=f"{BY_NAME[name].looks}: {', '.join(parts)}", reproduce=str(case))


def _moody(case: Case, target: Target, first: Attempt) -> tuple[str, str] | None:
    """Whether a right answer comes again, at once and after another call: if not, the fault's name and what one sees."""
    again = repeated(case, target)
    if isinstance(again, Failure) or not same(first.call, again):
        return unsteady(case, target, first) or (
            "two-runs-differ",
            f"{BY_NAME['two-runs-differ'].looks}, once in {REPEATS + 2} calls",
        )
    for other in others(case):
        if not call_other(other, target):
            continue
        after = repeated(case, target)
        if isinstance(after, Failure):
            return after.fault, f"after another call: {after}"
        if not same(first.call, after):
            return unsteady(case, target, replace(first, call=after)) or ("state-leaks", BY_NAME["state-leaks"].looks)
    return None


def _picture(done: Attempt, findings: Sequence[Finding]) -> Picture:
    call = done.call
    live = call.live
    off = ratios(call.out.cpu(), call.unwritten().cpu(), done.right, live)[:ROWS_DRAWN].amax(-1).clamp(max=1e9)
    bare = call.unwritten()[:live].cpu()[:ROWS_DRAWN].all(-1)
    bad = next((found for finding in findings if (found := cell(finding, call)) is not None), None)
    return Picture(
        [[round(float(n), 3) for n in row] for row in torch.where(bare, -1.0, off)],
        call.q_starts.tolist(),
        call.kv_lens.tolist(),
        call.page_table[:, :64].tolist(),
        call.page_size,
        bad,
    )


class Trust:
    """Faults that were borne out so often that they are not asked about again."""

    def __init__(self, enough: int = 3):
        self.enough = enough
        self.counts: dict[str, int] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, count in self.counts.items() if count >= self.enough)

    def note(self, result: Result) -> None:
        for finding in result.findings[:1]:
            if finding.fault in BY_NAME:
                self.counts[finding.fault] = self.counts.get(finding.fault, 0) + 1


def conform(
    target: Target,
    cases: Sequence[Case],
    level: str = "",
    *,
    known: dict[str, str] | None = None,
    each: Callable[[Result], None] = lambda result: None,
    within: float = math.inf,
) -> Report:
    """Every case in turn; after so many seconds, or an interrupt, none is begun any more: what was found until then is not lost."""
    start = time.perf_counter()
    results: list[Result] = []
    trust = Trust()
    lost = ""
    for case in cases:
        if not lost and time.perf_counter() - start > within:
            lost = over(within)
        try:
            result = Result(case, "unsupported", lost) if lost else survive(case, target, trust.names)
        except KeyboardInterrupt:
            lost = INTERRUPTED
            result = Result(case, "unsupported", lost)
        if result.status == "raised" and is_lost(result.reason) and not target.runs_on:
            lost = f"the device was lost in case {case.name}"
        result = replace(result, known=(known or {}).get(case.name, ""))
        trust.note(result)
        results.append(result)
        each(result)
    return report_of(facts_of(target), results, level, time.perf_counter() - start)


def over(within: float) -> str:
    return f"the {within:g} s were over"


def facts_of(target: Target) -> dict[str, str]:
    """What a report says about its target."""
    return {"target": target.name, "device": target.runs_on or target.device, "version": target.version}


def report_of(facts: dict[str, str], results: list[Result], level: str, seconds: float) -> Report:
    versions = {"quire": quire.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if facts["version"]:
        versions["target"] = facts["version"]
    return Report(facts["target"], level, facts["device"], settle(results), seconds, versions)


def survive(case: Case, target: Target, trusted: frozenset[str] = frozenset()) -> Result:
    """As `examine`; and a death between two calls, or an illegal access on a GPU, which shows wherever somebody waits next, ends
    in a result too, and so does a device that has no room for the case: others may run on it."""
    try:
        return examine(case, target, trusted)
    except torch.OutOfMemoryError as error:
        return Result(case, "unsupported", f"no room for it on the device: {str(error).split('. ')[0]}")
    except (Failure, RuntimeError) as error:
        failure = Failure.of(error)
        if failure is not error and not is_lost(str(failure)):
            raise
        return failed(case, failure)


def _renamed(finding: Finding, fault: str) -> Finding:
    """The same finding by another name that fits it as well: parameters were those of the first."""
    kept = {name: value for name, value in finding.parameters.items() if name == "only"}
    return replace(finding, fault=fault, summary=BY_NAME[fault].looks, parameters=kept)


def settle(results: list[Result]) -> list[Result]:
    """Lets cases speak for each other: where one cannot tell faults apart and the others name one of them, that is the name."""
    votes: dict[str, int] = {}
    for result in results:
        for finding in result.findings[:1]:
            for name in finding.alike:
                votes[name] = votes.get(name, 0) + 1
    settled = []
    for result in results:
        findings = []
        for finding in result.findings:
            best = max(finding.alike, key=lambda name: (votes.get(name, 0), name == finding.fault), default=finding.fault)
            findings.append(finding if votes.get(best, 0) <= votes.get(finding.fault, 0) else _renamed(finding, best))
        settled.append(replace(result, findings=tuple(findings)))
    return settled
