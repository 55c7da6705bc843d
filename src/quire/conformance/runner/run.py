"""Runs cases on a target, compares the results with the exact ones, and has failures diagnosed."""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

import quire
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.diagnosis.attempt import Attempt, TriedCall, attempt_any, call_of, try_any
from quire.conformance.diagnosis.consistency import without_minority_names
from quire.conformance.diagnosis.contrast import RunCase, contrast, contrast_of
from quire.conformance.diagnosis.determinism import check_repetition
from quire.conformance.diagnosis.diagnose import Diagnosis, diagnose
from quire.conformance.diagnosis.diagnose_write import check_repeated_writes, diagnose_write
from quire.conformance.diagnosis.locate import cell
from quire.conformance.diagnosis.write_attempt import WriteAttempt
from quire.conformance.faults import BY_NAME
from quire.conformance.oracle.budget import ratios
from quire.conformance.reporting.report import INTERRUPTED, NOT_DIAGNOSED, TIME_LIMIT, Finding, Picture, Report, Result
from quire.conformance.runner.target import Failure, Target, is_lost
from quire.conformance.runner.threads import one_thread

ROWS_DRAWN = 512
UNSTEADY = ("two-runs-differ", "state-leaks")
"""Faults that show only sometimes: that a case passes says nothing about its parameters."""
"""Rows of an error map, at most."""
ALWAYS_CHECKED = ("writes-padding-rows", "writes-outside-output", "changes-inputs", "raises", "crashes", "hangs")
"""Faults that are found without a diagnosis, in every case that has them."""


def examine(case: Case, target: Target, trusted: frozenset[str] | None = frozenset()) -> Result:
    """Runs one case. Faults in `trusted` were confirmed before and need no probes; with None a failure is not diagnosed."""
    with one_thread():
        return _examine(case, target, trusted)


def _examine(case: Case, target: Target, trusted: frozenset[str] | None) -> Result:
    start = time.perf_counter()
    if case.operation != target.operation:
        return Result(case, "skipped", f"a case of {case.operation}, and the target is one of {target.operation}")
    call = call_of(case, target.device)
    lacks = target.missing(call)
    if lacks is not None and case.lse:
        # Without an `lse` argument only the output is compared.
        case = case.replace(lse=False)
        call = call_of(case, target.device)
        lacks = target.missing(call)
    if lacks is not None:
        return Result(case, "skipped", lacks)
    beyond = target.limits(call)
    if beyond is not None and not target.refuses:
        return Result(case, "skipped", beyond)
    first = attempt_any(case, target, call)
    result = _judge(case, target, first, beyond, trusted)
    return replace(result, seconds=round(time.perf_counter() - start, 4))


def _judge(case: Case, target: Target, first: TriedCall, beyond: str | None, trusted: frozenset[str] | None) -> Result:
    if first.failure is not None:
        if beyond is not None and first.failure.fault == "raises":
            return Result(case, "refused", f"{beyond}: {first.error}")
        return failed(case, first.failure)
    findings = list(_broken(case, first.call))
    error, wrong = first.off, first.wrong_elements
    shown, reason = first, "" if beyond is None else f"returned a result although {beyond} is beyond its limits"
    if error > 1 and trusted is None:
        reason = NOT_DIAGNOSED
    elif error > 1 and trusted is not None:
        diagnosis = _diagnosis(case, target, first, trusted)
        findings[:0], shown = diagnosis.findings, diagnosis.attempt
    elif beyond is None:
        differs = _repetition(case, target, first)
        if differs is not None:
            findings.append(Finding(differs[0], differs[:1], summary=differs[1], reproduce=str(case)))
    status = "correct" if error <= 1 and not findings else "wrong"
    # The map is of the run that the first finding describes.
    picture = _picture(shown, findings) if status == "wrong" and isinstance(shown, Attempt) else None
    places = first.wrong_sequences if error > 1 else ()
    return Result(case, status, reason, error, wrong, tuple(findings), picture=picture, wrong_sequences=places)


def failed(case: Case, failure: Failure) -> Result:
    """The result of a case in which the target raised, crashed or hung."""
    text = f"{failure} (at {failure.at})" if failure.at else str(failure)
    return Result(case, "raised", text, findings=(Finding(failure.fault, (failure.fault,), summary=text, reproduce=str(case)),))


def _diagnosis(case: Case, target: Target, first: TriedCall, trusted: frozenset[str]) -> Diagnosis:
    if isinstance(first, WriteAttempt):
        return diagnose_write(case, target, first, trusted)
    assert isinstance(first, Attempt)
    return diagnose(case, target, first, trusted=trusted)


def _repetition(case: Case, target: Target, first: TriedCall) -> tuple[str, str] | None:
    if isinstance(first, WriteAttempt):
        return check_repeated_writes(case, target, first)
    assert isinstance(first, Attempt)
    return check_repetition(case, target, first)


def _broken(case: Case, call: KernelCall | WriteCall) -> Iterable[Finding]:
    """Findings of writes to guards, padding rows and inputs."""
    changed = call.changed_inputs()
    groups = {
        "writes-padding-rows": [s for s in changed if s.startswith("padding")],
        "writes-outside-output": [s for s in changed if s.startswith(("before", "after", "beside"))],
        "changes-inputs": [s for s in changed if " " not in s],
    }
    for name, parts in groups.items():
        if parts:
            yield Finding(name, (name,), summary=f"{BY_NAME[name].effect}: {', '.join(parts)}", reproduce=str(case))


def _picture(done: Attempt, findings: Sequence[Finding]) -> Picture:
    call = done.call
    live = call.live
    off = ratios(call.out.cpu(), call.unwritten().cpu(), done.truth, live)[:ROWS_DRAWN].amax(-1).clamp(max=1e9)
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


class Diagnoses:
    """Decides which failures of a run are diagnosed. A diagnosis takes seconds, and a kernel may fail in every case: after `enough`
    failures of one kind without a correct result, or after `seconds` spent on diagnoses, the others are only counted."""

    def __init__(self, enough: int = 3, seconds: float = 20.0):
        self.enough, self.seconds = enough, seconds
        self.counts: Counter[str] = Counter()
        self.any_correct = False

    @property
    def trusted(self) -> frozenset[str] | None:
        """Faults that were confirmed often enough; None if no failure is diagnosed any more."""
        often = frozenset(name for name, count in self.counts.items() if count >= self.enough)
        return None if self.seconds <= 0 or (often and not self.any_correct) else often & BY_NAME.keys()

    def add(self, result: Result) -> None:
        self.any_correct |= result.status == "correct"
        if result.status == "wrong" and result.reason != NOT_DIAGNOSED:
            self.seconds -= result.seconds
            self.counts.update(finding.fault for finding in result.findings[:1])


def conform(
    target: Target,
    cases: Sequence[Case],
    level: str = "",
    *,
    known: dict[str, str] | None = None,
    each: Callable[[Result], None] = lambda result: None,
    within: float = math.inf,
) -> Report:
    """Runs cases one after the other. After `within` seconds, or an interrupt, no further case is started; the report has what was
    found until then."""
    start = time.perf_counter()
    results: list[Result] = []
    diagnoses = Diagnoses()
    lost = ""
    for case in cases:
        if not lost and time.perf_counter() - start > within:
            lost = time_limit(within)
        try:
            result = Result(case, "skipped", lost) if lost else survive(case, target, diagnoses.trusted)
        except KeyboardInterrupt:
            lost = INTERRUPTED
            result = Result(case, "skipped", lost)
        if result.status == "raised" and is_lost(result.reason) and not target.runs_on:
            lost = f"the device was lost in case {case.name}"
        result = replace(result, known=(known or {}).get(case.name, ""))
        diagnoses.add(result)
        results.append(result)
        each(result)
    report = report_of(facts_of(target), results, level, time.perf_counter() - start)
    return report if lost else with_contrast(report, case_runner(target))


def case_runner(target: Target) -> RunCase:
    """Runs cases on a target, for `contrast`."""

    def run_case(case: Case) -> bool | None:
        with one_thread():
            done = try_any(case, target)
        return None if done is None or done.error else done.is_correct

    return run_case


def with_contrast(report: Report, run_case: RunCase | None = None) -> Report:
    """The report with what distinguishes its failing cases from the passing ones: of all, and of those with each finding."""
    report = replace(report, results=without_minority_names(report.results))
    passing = [result for result in report.results if result.status == "correct"]
    overall = contrast_of(report.results, run_case)
    kinds: dict[tuple[str, str], list[Result]] = {}
    for result in report.results:
        for finding in result.findings:
            kinds.setdefault(finding.kind, []).append(result)
    failing = sum(result.failed for result in report.results)
    # A statement must also hold for the failing cases that were not diagnosed: they may have the same fault.
    unknown = [result for result in report.results if result.reason == NOT_DIAGNOSED]
    contrasts = {}
    for kind, mine in kinds.items():
        if kind[0] in UNSTEADY:
            contrasts[kind] = ""
        elif len(mine) == failing:
            contrasts[kind] = overall
        elif passing:
            contrasts[kind] = contrast([*mine, *(one for one in unknown if one not in mine)], passing, run_case)
        else:
            contrasts[kind] = f"in {len(mine)} of {failing} failing cases"
    results = []
    for result in report.results:
        left = {f.fault: 0 if f.fault in ALWAYS_CHECKED else report.undiagnosed for f in result.findings}
        findings = (replace(f, contrast=contrasts[f.kind], undiagnosed=left[f.fault]) for f in result.findings)
        results.append(replace(result, findings=tuple(findings)))
    return replace(report, results=results, contrast=overall)


def time_limit(within: float) -> str:
    """The reason of a case that was skipped because the run took too long."""
    return f"{TIME_LIMIT} --within {within:g} s was reached"


def facts_of(target: Target) -> dict[str, str]:
    """What a report says about its target."""
    return {"target": target.name, "device": target.runs_on or target.device, "version": target.version}


def report_of(facts: dict[str, str], results: list[Result], level: str, seconds: float) -> Report:
    versions = {"quire": quire.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if facts["version"]:
        versions["target"] = facts["version"]
    return Report(facts["target"], level, facts["device"], consistent(results), seconds, versions)


def survive(case: Case, target: Target, trusted: frozenset[str] | None = frozenset()) -> Result:
    """As `examine`. A crash between two calls, an illegal access reported later, or an out-of-memory error becomes a result too."""
    try:
        return examine(case, target, trusted)
    except torch.OutOfMemoryError as error:
        return Result(case, "skipped", f"not enough device memory: {str(error).split('. ')[0]}")
    except (Failure, RuntimeError) as error:
        failure = Failure.of(error)
        if failure is not error and not is_lost(str(failure)):
            raise
        return failed(case, failure)


def _renamed(finding: Finding, fault: str) -> Finding:
    """The finding with the name of an equivalent fault. The parameters of the first fault are dropped."""
    kept = {name: value for name, value in finding.parameters.items() if name == "only"}
    return replace(finding, fault=fault, summary=BY_NAME[fault].effect, parameters=kept)


def consistent(results: list[Result]) -> list[Result]:
    """If a case matches several faults, choose the one that most other cases report."""
    votes: dict[str, int] = {}
    for result in results:
        for finding in result.findings[:1]:
            for name in finding.equivalent_faults:
                votes[name] = votes.get(name, 0) + 1
    kept = []
    for result in results:
        findings = []
        for finding in result.findings:
            best = max(
                finding.equivalent_faults, key=lambda name: (votes.get(name, 0), name == finding.fault), default=finding.fault
            )
            findings.append(finding if votes.get(best, 0) <= votes.get(finding.fault, 0) else _renamed(finding, best))
        kept.append(replace(result, findings=tuple(findings)))
    return kept
