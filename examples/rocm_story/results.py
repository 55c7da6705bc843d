"""What the investigation finds, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

REPORTED: dict[str, Any] = {"mismatched": 8192, "elements": 43_720_704, "error": 1.685546875, "at": (5336, 0, 0)}
"""What the five analyses report about the third failure."""


@dataclass(frozen=True)
class Failure:
    """One of the test's three failures."""

    setup: str
    message: str
    meaning: str


@dataclass(frozen=True)
class Hypothesis:
    """A proposed explanation, the largest error it can cause, and whether it explains the failure."""

    name: str
    analyses: str
    claim: str
    max_error: float | None
    """The largest error it causes in the failing row, computed; None if it predicts a row that no kernel writes."""
    mismatched: int
    """How many elements of that row the test would then report as wrong."""
    explains: bool
    reason: str


@dataclass(frozen=True)
class Fix:
    """A proposed change, applied, and the result of running the test again."""

    source: str
    proposal: str
    mismatched: int | None
    """Elements that the test still reports as wrong; None if the test is skipped."""
    effect: str
    limitation: str

    @property
    def cures(self) -> bool:
        return self.mismatched == 0


@dataclass(frozen=True)
class SimilarFault:
    """A fault with the same number of wrong elements, and the three observations that identify it."""

    fault: str
    mismatched: int
    at: tuple[int, ...]
    error: float
    keeps_old_memory: bool
    """The output filled with one value and then with another: does the row keep each of them?"""
    correct_with_int32: bool
    """`q_starts` as int32: is the row correct then?"""
    correct_with_token: bool
    """The new token written to the cache: is the row correct then?"""
    identified: str


@dataclass(frozen=True)
class KitResult:
    """What the conformance kit reports for a kernel with an injected fault."""

    planted: str
    identified: str
    where: str
    evidence: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Configuration:
    """A configuration of the test, and the kernel that vLLM's selection rule of that time chooses for it."""

    name: str
    kernel: str
    reason: str
    reads_q_starts: str
    result: str


@dataclass
class Investigation:
    """All results."""

    batch: dict[str, Any]
    failures: list[Failure] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    q_starts: dict[str, Any] = field(default_factory=dict)
    fill_tests: list[dict[str, Any]] = field(default_factory=list)
    configurations: list[Configuration] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)
    missing_token: dict[str, Any] = field(default_factory=dict)
    similar_faults: list[SimilarFault] = field(default_factory=list)
    kit: list[KitResult] = field(default_factory=list)

    @property
    def cause(self) -> str:
        return "; ".join(h.name for h in self.hypotheses if h.explains) or "unknown"

    @property
    def reproduced(self) -> bool:
        """Whether the reported figures came out, one explanation remains, and the similar faults were told apart."""
        return (
            self.batch["elements"] == REPORTED["elements"]
            and REPORTED["at"][0] == self.batch["decode_row"]
            and [h.explains for h in self.hypotheses].count(True) == 1
            and all(test["row_keeps_it"] and test["rest_unchanged"] for test in self.fill_tests)
            and all(one.identified == one.fault for one in self.similar_faults)
            and len({one.identified for one in self.similar_faults}) == len(self.similar_faults)
            and all(one.identified == one.expected for one in self.kit)
        )

    def to_dict(self) -> dict[str, Any]:
        fixes = [{**asdict(fix), "cures": fix.cures} for fix in self.fixes]
        head = {"schema": 1, "example": "rocm_story"}
        return {**head, **asdict(self), "fixes": fixes, "reported": REPORTED, "cause": self.cause, "reproduced": self.reproduced}
