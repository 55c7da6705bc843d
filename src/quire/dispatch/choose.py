"""Chooses a kernel: the first of the catalogue whose limits all hold, or the one asked for by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.decision import Candidate, Decision
from quire.dispatch.kernel import Call, Kernel, OneOf, judge
from quire.dispatch.platform import Platform
from quire.errors import ArgumentError, KernelError, describe
from quire.problem import Problem

OPERATIONS = ("attend", "write", "audit")


def choose(
    problem: Problem,
    platform: Platform,
    *,
    operation: str = "attend",
    kernel: str | None = None,
    capturing: bool = False,
    catalogue: tuple[Kernel, ...] = CATALOGUE,
) -> Decision:
    """The decision for a call. Without a kernel's name it may be that none fits: `launcher_of` raises then.

    With a name, that kernel runs or a KernelError says which of its limits do not hold: nothing else runs in its place."""
    if kernel is not None and not isinstance(kernel, str):
        raise ArgumentError("kernel", describe(kernel), "the name of a kernel, or None")
    return _choose(problem, platform, operation, kernel, capturing, catalogue)


@lru_cache(maxsize=4096)
def _choose(
    problem: Problem, platform: Platform, operation: str, kernel: str | None, capturing: bool, catalogue: tuple[Kernel, ...]
) -> Decision:
    if operation not in OPERATIONS:
        raise ArgumentError("operation", repr(operation), str(OneOf(OPERATIONS)))
    call = Call(problem, platform, capturing)
    candidates = tuple(Candidate(k, judge(k.limits, call)) for k in catalogue if k.operation == operation)
    names = [candidate.kernel.name for candidate in candidates]
    if kernel is not None and kernel not in names:
        raise KernelError(f"kernel: given {kernel!r}; allowed for {operation}: {', '.join(names) or 'none'}")
    able = (c.kernel for c in candidates if not c.refusals and kernel in (None, c.kernel.name))
    decision = Decision(problem, platform, operation, next(able, None), candidates, kernel, capturing)
    if kernel is not None and decision.chosen is None:
        raise KernelError(f"kernel {kernel!r} was asked for and cannot {operation} this", decision)
    return decision


def chosen_by(decision: Decision) -> Kernel:
    """The kernel that was chosen; raises if there is none."""
    if decision.chosen is None:
        raise KernelError(f"no kernel can {decision.operation} this", decision)
    return decision.chosen


def launcher_of(decision: Decision) -> Callable[..., Any]:
    """The launcher of the chosen kernel."""
    return chosen_by(decision).load()
