"""The catalogue of faults as Markdown: `docs/faults.md` is what `render` returns."""

from __future__ import annotations

from itertools import groupby

from quire.conformance.faults import CATALOGUE

_HEAD = """# Faults of paged attention and cache writes

Generated from `quire.conformance.faults.CATALOGUE` by `python -m quire.conformance`; a test checks that this document is current.

{count} faults, each with its effect, its usual cause and public reports. The output of a *predicted* fault can be computed, because
the fault is a change of the exact computation. `quire conform` identifies it when the output of a kernel matches, and
`quire conform --power` injects it to verify that the suite detects it. A *behavioural* fault is detected by how a kernel behaves:
in repeated calls, between other calls, with other poison values, with guards around its output, or on inputs whose result is known
to the bit. *Solved* parameters are computed from the output of the kernel; like all others, they are verified with other cases. A
*symptom* is predicted too, but describes the output and not the error in the kernel: it is reported as a symptom, without a name.
"""


def render() -> str:
    """The catalogue as Markdown."""
    parts = [_HEAD.format(count=len(CATALOGUE))]
    for group, members in groupby(CATALOGUE, key=lambda fault: fault.group):
        parts.append(f"## {group[0].upper()}{group[1:]}\n")
        for fault in members:
            parts.append(f"### {fault.name}\n")
            lines = [f"- effect: {fault.effect}", f"- cause: {fault.cause}"]
            names = sorted({name for parameters in fault.tries for name in parameters})
            if fault.solve is not None:
                names.append("solved from the output")
            kind = "symptom" if fault.symptom else "predicted" if fault.predicted else "behavioural"
            lines.append(f"- {kind}" + (f"; parameters: {', '.join(names)}" if names else ""))
            if fault.issues:
                lines.append(f"- reported in: {', '.join(fault.issues)}")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
