"""A decision on one screen: the choice, its reason, what would be faster, and the refusals grouped by reason."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.dispatch.kernel import LimitResult, as_text

if TYPE_CHECKING:
    from quire.dispatch.decision import Candidate, Decision

INDENT = 11
"""The width of the label of a line."""


class Line(NamedTuple):
    """One line of the summary: a label and its text."""

    label: str
    text: str

    def wrapped(self, width: int) -> list[str]:
        margin = " " * INDENT
        begin = f"{self.label:{INDENT}}" if self.label else ""
        return textwrap.wrap(self.text, width, initial_indent=begin, subsequent_indent=margin if begin else "  ") or [""]


def summary(decision: Decision) -> list[Line]:
    """The lines of a decision; the first two, the call and the machine, have no label."""
    capturing = ", inside a CUDA graph" if decision.capturing else ""
    chosen = decision.chosen
    lines = [
        Line("", f"{decision.operation}: {decision.extent}, {decision.problem}{capturing}"),
        Line("", f"on {decision.platform}"),
        Line("chosen", f"{chosen.name} ({chosen.summary})" if chosen else "none"),
        Line("because", decision.because),
    ]
    for other in decision.related:
        name = "no kernel" if other.chosen is None else other.chosen.name
        lines.append(Line("with", f"{name}, which does the {other.operation}"))
    return [*lines, *_compilation(decision), *_other_kernels(decision)]


def _compilation(decision: Decision) -> Iterator[Line]:
    """What has to be installed or compiled first."""
    used = (decision.chosen, *(other.chosen for other in decision.related))
    missing = sorted({name for kernel in used if kernel for name in kernel.not_installed})
    if missing:
        yield Line("note", f"{', '.join(missing)} is not installed on this machine; the answer is for one that has it")
    elif decision.compiled:
        yield Line("kernels", f"{len(decision.compiled)}, {decision.compile_state}")


def _other_kernels(decision: Decision) -> Iterator[Line]:
    """The kernels that were not chosen: those that would be faster, those that could run too, and those that were refused."""
    faster = _faster(decision)
    for candidate in faster:
        changes = candidate.changes or (f"do not request {decision.requested}",)
        yield Line("faster" if decision.chosen else "possible", f"{candidate.kernel.name}, if you {'; '.join(changes)}")
    others = [c for c in decision.candidates if c.kernel is not decision.chosen and c not in faster]
    able = [candidate.kernel.name for candidate in others if not candidate.refusals]
    if able:
        yield Line("could run", ", ".join(able))
    for number, (reason, names) in enumerate(grouped(others).items()):
        yield Line(" " if number else "refused", f"{', '.join(names)}: {reason}")


def _faster(decision: Decision) -> list[Candidate]:
    """Preferred kernels that could run after a change of the layer or the installation. Smaller batches would be possible too, but
    not faster."""
    found = []
    for candidate in decision.candidates:
        if candidate.kernel is decision.chosen:
            break
        of_batch = {limit.rule for limit in candidate.kernel.batch_limits}
        if candidate.changes is not None and not any(refusal.rule in of_batch for refusal in candidate.refusals):
            found.append(candidate)
    return found


def grouped(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """The refused kernels by reason: the first limit of the machine that does not hold; otherwise all limits that do not hold."""
    groups: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.refusals:
            hard = [refusal for refusal in candidate.refusals if refusal.change is None]
            reason = "; ".join(map(_reason, hard[:1] or candidate.refusals))
            groups.setdefault(reason, []).append(candidate.kernel.name)
    return groups


def _reason(refusal: LimitResult) -> str:
    if refusal.given is True and refusal.allowed == as_text(False):
        return f"not with {refusal.rule}"
    if refusal.given is False and refusal.allowed == as_text(True):
        return f"not {refusal.rule}"
    return f"needs {refusal.rule} {refusal.allowed}, not {as_text(refusal.given)}"
