"""The results of a run: findings, results of cases, the report; as text, JSON and JUnit XML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from quire.conformance.cases.case import Case

UNKNOWN = "unknown"
STATUSES = ("correct", "wrong", "raised", "refused", "skipped")
BUDGETS = "Errors are in multiples of the error budget, the largest error that rounding explains: up to 1 is correct."
"""Explains the unit of errors where a report first uses it."""
INTERRUPTED = "interrupted"
TIME_LIMIT = "not run: the time limit"
"""How the reason of a case that was not started in time begins."""
NOT_DIAGNOSED = "not diagnosed, because enough earlier failures were: run this case alone (--case) to diagnose it"
"""The reason of a result that is wrong and was not diagnosed."""
PIECES = 6
"""Entries of a long list that are shown."""


def brief(parameters: Mapping[str, Any]) -> str:
    """The parameters of a fault in one line, runs of numbers as their ends: `rows=64..191, by=1`."""
    return ", ".join(f"{name}={_brief(value)}" for name, value in parameters.items())


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)) and any(type(one) is float for one in value):
        return f"[{', '.join(map(_brief, value))}]"
    if isinstance(value, Mapping):
        pieces = [f"{key}: {_brief(one)}" for key, one in value.items()]
    elif isinstance(value, (list, tuple)) and len(value) > 3 and all(type(one) is int for one in value):
        runs = [[value[0]]]
        for one in value[1:]:
            if one == runs[-1][-1] + 1:
                runs[-1].append(one)
            else:
                runs.append([one])
        pieces = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    else:
        return str(value)
    return " ".join(pieces[:PIECES]) + (f" and {len(pieces) - PIECES} more" if len(pieces) > PIECES else "")


@dataclass(frozen=True)
class Where:
    """The place of the worst error. A field that does not apply is None."""

    sequence: int | None = None
    row: int | None = None
    """Row of q and out."""
    position: int | None = None
    """Position of the query in its sequence."""
    head: int | None = None
    dim: int | None = None
    key: int | None = None
    """Position in its sequence of the key that the fault treats differently, where one is known."""
    page: int | None = None
    """Page of that key."""
    offset: int | None = None
    """Offset of that key in its page."""

    def __str__(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in known.items())


@dataclass(frozen=True)
class Finding:
    """What is wrong with a target, as far as its results show."""

    fault: str
    """Its name in the catalogue, or `unknown`."""
    equivalent_faults: tuple[str, ...] = ()
    """Faults that predict the same numbers on this case, the finding's own name included."""
    parameters: dict[str, Any] = field(default_factory=dict)
    distance: float = 0.0
    """How far the prediction is from the result, in budgets: at most 1 for a match."""
    margin: float = 0.0
    """The distance of the nearest other prediction."""
    where: Where = field(default_factory=Where)
    summary: str = ""
    reproduce: str = ""
    """The line of the smallest case that reproduces it."""
    evidence: tuple[str, ...] = ()
    """What probes showed."""
    ranking: tuple[tuple[str, float], ...] = ()
    """The nearest predictions and their distances."""
    symptom: str = ""
    """What is wrong with the output, where the fault behind it has no name: "rows of the output are zero"."""
    contrast: str = ""
    """What all cases with this finding have in common and no passing case has."""
    undiagnosed: int = 0
    """How many failing cases of the run were not diagnosed and may have this fault, too."""
    expected: float | None = None
    actual: float | None = None
    """The value of the worst element, as it should be and as it is."""
    picture: str = ""
    """Which keys each query misses, or sees wrongly: a line of text for each query."""

    @property
    def kind(self) -> tuple[str, str]:
        """Findings of the same kind are reported as one: the same fault or symptom; for errors, the same message, too."""
        return self.fault, self.summary if self.fault in ("raises", "crashes") else self.symptom

    @property
    def title(self) -> str:
        """The fault's name, or the symptom."""
        return f"symptom: {self.symptom}" if self.symptom else self.fault

    @property
    def values(self) -> str:
        """Expected and actual value in words, or nothing."""
        return "" if self.expected is None or self.actual is None else f"expected {self.expected:.6g}, actual {self.actual:.6g}"

    def __str__(self) -> str:
        given = brief(self.parameters)
        at = "; ".join(part for part in (str(self.where), self.values) if part)
        return f"{self.title}{f' ({given})' if given else ''}: {self.summary}{f' [{at}]' if at else ''}"


@dataclass(frozen=True)
class Picture:
    """What a report draws of a failed case: the run that its first finding describes."""

    ratio: list[list[float]]
    """Error over budget, tokens x heads, the worst of a head's dims; -1 for an element that was never written, capped at 1e9."""
    q_starts: list[int]
    kv_lens: list[int]
    page_table: list[list[int]]
    page_size: int
    bad_cell: tuple[int, int] | None = None
    """Sequence and column of the page of the faulty key, where one is known."""


@dataclass(frozen=True)
class Result:
    """The result of one case."""

    case: Case
    status: str
    """correct; wrong; raised: an exception, a crash or a hang instead of a result; refused: an exception for a call beyond the
    declared limits, as expected; skipped: the case was not run."""
    reason: str = ""
    error: float = 0.0
    """The largest error in budgets."""
    wrong: int = 0
    """How many elements are beyond their budget."""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    known: str = ""
    """Why this failure was expected."""
    picture: Picture | None = None
    wrong_sequences: tuple[int, ...] = ()
    """Sequences with a wrong row."""

    @property
    def failed(self) -> bool:
        return self.status in ("wrong", "raised")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "case": str(self.case), "name": self.case.name}


@dataclass(frozen=True)
class Report:
    """A run of the suite against one target."""

    target: str
    level: str
    device: str
    results: Sequence[Result]
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    """Names in the list of known failures that no case has."""
    contrast: str = ""
    """What all failing cases have in common and no passing case has."""

    @property
    def findings(self) -> list[tuple[Finding, list[str]]]:
        """Each kind of finding with the names of its cases; the one with most cases comes first."""
        order: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
        for result in self.results:
            for finding in result.findings:
                order.setdefault(finding.kind, (finding, []))[1].append(result.case.name)
        return sorted(order.values(), key=lambda entry: (-len(entry[1]), entry[0].fault == UNKNOWN))

    def ways(self, finding: Finding) -> list[tuple[str, list[str]]]:
        """The parameters with which a fault was found, in one line, and the cases that have them; the most frequent first."""
        found: dict[str, list[str]] = {}
        for result in self.results:
            for one in result.findings:
                if one.kind == finding.kind:
                    found.setdefault(brief(one.parameters), []).append(result.case.name)
        return sorted(found.items(), key=lambda entry: -len(entry[1]))

    @property
    def interrupted(self) -> bool:
        """Whether the run was interrupted before all cases ran."""
        return any(result.reason == INTERRUPTED for result in self.results)

    @property
    def not_started(self) -> int:
        """Cases that were not run because of an interrupt or the time limit."""
        return sum(result.reason == INTERRUPTED or result.reason.startswith(TIME_LIMIT) for result in self.results)

    def counts(self) -> dict[str, int]:
        return {status: sum(result.status == status for result in self.results) for status in STATUSES}

    @property
    def undiagnosed(self) -> int:
        """Failing cases that were not diagnosed: after enough failures of one kind the others are only counted."""
        return sum(result.reason == NOT_DIAGNOSED for result in self.results)

    @property
    def unexpected(self) -> list[Result]:
        """Failures that are not in the list of known failures, and known failures that did not fail."""
        return [r for r in self.results if r.failed != bool(r.known) and r.status != "skipped"]

    @property
    def computed(self) -> bool:
        """Whether the target was tested at all: a run in which every case was refused or skipped shows nothing."""
        return any(result.status in ("correct", "wrong", "raised") for result in self.results)

    @property
    def exit_code(self) -> int:
        """0: correct in every case that ran. 1: an unexpected failure, or no case ran."""
        return 1 if self.unexpected or not self.computed else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "level": self.level,
            "device": self.device,
            "versions": self.versions,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "counts": self.counts(),
            "undiagnosed": self.undiagnosed,
            "contrast": self.contrast,
            "findings": [
                {
                    **asdict(finding),
                    "cases": cases,
                    "ways": [{"with": given, "cases": which} for given, which in self.ways(finding)],
                }
                for finding, cases in self.findings
            ],
            "unexpected": [r.case.name for r in self.unexpected],
            "known_without_case": list(self.unmatched),
            "results": [result.to_dict() for result in self.results],
        }

    def to_json(self) -> str:
        return json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False)

    def to_junit(self) -> str:
        """JUnit XML: each case is a test, with its status as a property. A known failure counts as skipped."""
        skipped = sum(result.status == "skipped" or bool(result.failed and result.known) for result in self.results)
        suite = ElementTree.Element(
            "testsuite",
            name=f"quire conform {self.target}",
            tests=str(len(self.results)),
            failures=str(len(self.unexpected)),
            skipped=str(skipped),
            time=f"{self.seconds:.3f}",
        )
        for result in self.results:
            test = ElementTree.SubElement(
                suite, "testcase", classname=f"quire.{self.target}", name=result.case.name, time=f"{result.seconds:.3f}"
            )
            properties = ElementTree.SubElement(test, "properties")
            ElementTree.SubElement(properties, "property", name="status", value=result.status)
            if result.status == "skipped":
                ElementTree.SubElement(test, "skipped", message=result.reason)
            elif result.failed:
                text = "\n".join(str(finding) for finding in result.findings) or result.reason
                kind, message = ("skipped", f"known ({result.known}): {text}") if result.known else ("failure", text)
                ElementTree.SubElement(test, kind, message=message.split("\n")[0]).text = f"{text}\n{result.case}"
            elif result.known and not result.failed:
                ElementTree.SubElement(test, "failure", message=f"known to fail ({result.known}), but correct")
        return ElementTree.tostring(suite, encoding="unicode")


def _finite(value: Any) -> Any:
    """The same with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
