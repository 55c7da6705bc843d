"""Chooses a kernel: the first of the catalogue whose limits all hold, or the one requested by name."""

from __future__ import annotations

from functools import lru_cache

from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.decision import Candidate, Decision
from quire.dispatch.kernel import SHORT, Kernel, LimitQuery, OneOf, check_limits
from quire.errors import ArgumentError, KernelError, describe
from quire.platform import Platform
from quire.problem import Extent, Problem

OPERATIONS = ("attend", "write", "audit")


def choose(
    problem: Problem,
    extent: Extent,
    platform: Platform,
    *,
    operation: str = "attend",
    kernel: str | None = None,
    capturing: bool = False,
    catalogue: tuple[Kernel, ...] = CATALOGUE,
) -> Decision:
    """The decision for a call, with the result of every limit. `Decision.chosen` is None if no kernel can run it.

    If a kernel is requested by name and cannot run, this raises a KernelError that lists its limits: no other kernel replaces
    it."""
    if kernel is not None and not isinstance(kernel, str):
        raise ArgumentError("kernel", describe(kernel), "the name of a kernel, or None")
    if operation not in OPERATIONS:
        raise ArgumentError("operation", repr(operation), str(OneOf(OPERATIONS)))
    query = LimitQuery(problem, extent, platform, capturing)
    relevant = [k for k in catalogue if k.operation == operation and (_is_candidate(k, problem) or k.name == kernel)]
    candidates = tuple(Candidate(k, check_limits(k.limits, query)) for k in relevant)
    names = [candidate.kernel.name for candidate in candidates]
    if kernel is not None and kernel not in names:
        raise KernelError(f"kernel: given {kernel!r}; allowed for {operation}: {', '.join(names) or 'none'}")
    able = (c.kernel for c in candidates if not c.refusals and kernel in (None, c.kernel.name))
    decision = Decision(problem, extent, platform, operation, next(able, None), candidates, kernel, capturing)
    if kernel is not None and decision.chosen is None:
        raise KernelError(f"kernel {kernel!r} was requested and cannot run this {operation}", decision)
    return decision


def kernel_for(
    problem: Problem,
    extent: Extent,
    platform: Platform,
    operation: str,
    kernel: str | None,
    capturing: bool,
    catalogue: tuple[Kernel, ...] = CATALOGUE,
) -> Kernel:
    """The kernel that `choose` chooses, or its error. Limits that depend on the layer and the machine are evaluated once and
    cached; those of the batch (`Kernel.batch_limits`) are evaluated here."""
    if kernel is not None and not isinstance(kernel, str):
        raise ArgumentError("kernel", describe(kernel), "the name of a kernel, or None")
    for able in able_kernels(problem, platform, operation, kernel, capturing, catalogue):
        fits = extent.max_q_len <= able.longest_q and extent.max_kv_len <= able.longest_kv and extent.saved_keys >= able.shares
        if fits and (extent.max_q_len <= SHORT or extent.tokens * problem.q_heads <= able.most_long_rows):
            return able
    return chosen_by(
        choose(problem, extent, platform, operation=operation, kernel=kernel, capturing=capturing, catalogue=catalogue)
    )


@lru_cache(maxsize=4096)
def able_kernels(
    problem: Problem,
    platform: Platform,
    operation: str,
    kernel: str | None,
    capturing: bool,
    catalogue: tuple[Kernel, ...] = CATALOGUE,
) -> tuple[Kernel, ...]:
    """The kernels that can run at least some batches of a problem, the most preferred first."""
    query = LimitQuery(problem, Extent(), platform, capturing)
    found = []
    for one in catalogue:
        if one.operation == operation and kernel in (None, one.name) and _is_candidate(one, problem):
            if all(f.holds for f in check_limits([limit for limit in one.limits if not limit.of_batch], query)):
                found.append(one)
    return tuple(found)


def _is_candidate(kernel: Kernel, problem: Problem) -> bool:
    """Kernels for shared prefixes are candidates only where a batch says which there are."""
    return problem.prefixes or not kernel.shares


def kernels_for(problem: Problem, platform: Platform, operation: str) -> tuple[Kernel, ...]:
    """All kernels that batches of a problem can use: up to the first one without a limit on the batch."""
    found: list[Kernel] = []
    for kernel in able_kernels(problem, platform, operation, None, False):
        found.append(kernel)
        if not kernel.batch_limits:
            break
    return tuple(found)


def chosen_by(decision: Decision) -> Kernel:
    """The chosen kernel; raises KernelError if there is none."""
    if decision.chosen is None:
        raise KernelError(f"no kernel can run this {decision.operation}", decision)
    return decision.chosen
