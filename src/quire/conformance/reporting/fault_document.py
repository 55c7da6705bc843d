"""The catalogue of faults as Markdown: `docs/faults.md` is what `render` returns."""

from __future__ import annotations

from itertools import groupby

from quire.conformance.faults import CATALOGUE

_HEAD = """# Faults of paged attention

Printed from `quire.conformance.faults.CATALOGUE` by `python -m quire.conformance`; a test keeps it so.

{count} faults, each with what one sees, how kernels come to have it, and where it was met. A *predicted* fault is a change of the
exact computation: its numbers can be foretold, so `quire conform` names it when a kernel gives them, and `quire conform --power`
plants it to prove that the suite can see it. A *behavioural* one shows only in how a kernel behaves: run twice, between other
calls, with other poison, with guards around its output, or asked for an answer that is known to the bit. Parameters that are
*solved* are computed from the output of the kernel, and verified with other cases like all others. A *symptom* is predicted, too,
but describes the output and not what the kernel does wrong: it is reported as a symptom, not as a name.
"""


def render() -> str:
    """The catalogue as Markdown."""
    parts = [_HEAD.format(count=len(CATALOGUE))]
    for group, members in groupby(CATALOGUE, key=lambda fault: fault.group):
        parts.append(f"## {group[0].upper()}{group[1:]}\n")
        for fault in members:
            parts.append(f"### {fault.name}\n")
            lines = [f"- looks: {fault.looks}", f"- arises: {fault.arises}"]
            names = sorted({name for parameters in fault.tries for name in parameters})
            if fault.solve is not None:
                names.append("solved from the answer")
            kind = "symptom" if fault.symptom else "predicted" if fault.predicted else "behavioural"
            lines.append(f"- {kind}" + (f"; parameters: {', '.join(names)}" if names else ""))
            if fault.issues:
                lines.append(f"- met: {', '.join(fault.issues)}")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
