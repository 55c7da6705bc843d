"""Prints the contract for people: `docs/contract.md` is what `render` returns."""

from __future__ import annotations

import textwrap

from quire.contract.rules import CONTRACT

_HEAD = """# The contract

Printed from `quire.contract.rules.CONTRACT` by `make docs`; a test keeps it so. The ids are stable.

What binds the caller is checked before a kernel runs: shapes, types and devices in every call, values (index tensors, scales, the
ledger) when they lie in host memory, elsewhere with `check="full"`, in `quire.check(...)` and in `with quire.checked():`. In host
memory the index tensors of a batch are checked in its first call and after each change that torch counts (`_version`); with
`check="full"` in every call.
What binds the kernels is kept by the tests named.
"""


def render() -> str:
    """The contract as Markdown."""
    parts = [_HEAD]
    for number, rule in enumerate(CONTRACT, 1):
        lines = [f"## {number}. {rule.id}", "", textwrap.fill(rule.says, 120), "", f"- binds: {rule.binds}"]
        for kind, checks in (("shapes and types", rule.static), ("values", rule.values)):
            if checks:
                lines.append(f"- checked, {kind}: " + ", ".join(f"`{check.__name__}`" for check in checks))
        if rule.proof:
            lines.append(f"- kept by: `{rule.proof}`")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
