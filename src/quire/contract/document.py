"""Renders the contract as Markdown: `docs/contract.md` is what `render` returns."""

from __future__ import annotations

import textwrap

from quire.contract.rules import CONTRACT

_HEAD = """# The contract

Generated from `quire.contract.rules.CONTRACT` by `make docs`. The ids of the rules are stable.

A rule that binds the caller is checked before a kernel runs. Shapes, types and devices are checked in every call. Values (index
tensors, scales, the ledger) are checked if they are in host memory; on a GPU they are checked with `check="full"`, by
`quire.check(...)` and inside `with quire.checked():`. In host memory the index tensors of a batch are checked in its first call and
after each change of their `_version`, with `check="full"` in every call.

A rule that binds the kernels is enforced by the tests named.
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
            lines.append(f"- tested by: `{rule.proof}`")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
