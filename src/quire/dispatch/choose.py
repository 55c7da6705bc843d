"""Chooses a kernel: the first of the catalogue whose limits all hold, or the one asked for by name."""

from __future__ import annotations

from functools import lru_cache

from quire.dispatch.catalogue import CATALOGUE
from quire.dispatch.decision import Candidate, Decision
from quire.dispatch.kernel import Kernel, OneOf, Request, judge
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
    """The decision for a call, with every limit asked. Without a kernel's name it may be that none fits: `chosen_by` raises then.

    With a name, that kernel runs or a KernelError says which of its limits do not hold: nothing else runs in its place."""
    if kernel is not None and not isinstance(kernel, str):
        raise ArgumentError("kernel", describe(kernel), "the name of a kernel, or None")
    if operation not in OPERATIONS:
        raise ArgumentError("operation", repr(operation), str(OneOf(OPERATIONS)))
    request = Request(problem, extent, platform, capturing)
    candidates = tuple(Candidate(k, judge(k.limits, request)) for k in catalogue if k.operation == operation)
    names = [candidate.kernel.name for candidate in candidates]
    if kernel is not None and kernel not in names:
        raise KernelError(f"kernel: given {kernel!r}; allowed for {operation}: {', '.join(names) or 'none'}")
    able = (c.kernel for c in candidates if not c.refusals and kernel in (None, c.kernel.name))
    decision = Decision(problem, extent, platform, operation, next(able, None), candidates, kernel, capturing)
    if kernel is not None and decision.chosen is None:
        raise KernelError(f"kernel {kernel!r} was asked for and cannot {operation} this", decision)
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
    """The kernel that `choose` chooses, or its error. What depends on the layer and the machine is asked once for all batches; of
    a batch, the two limits of `Kernel.batch_limits` are."""
    if kernel is not None and not isinstance(kernel, str):
        raise ArgumentError("kernel", describe(kernel), "the name of a kernel, or None")
    for able in able_kernels(problem, platform, operation, kernel, capturing, catalogue):
        if able.max_q_len is not None and extent.max_q_len > able.max_q_len:
            continue
        if able.max_kv_len is None or extent.max_kv_len <= able.max_kv_len:
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
    """The kernels that can run some batch of a problem, the most preferred first."""
    request = Request(problem, Extent(), platform, capturing)
    found = []
    for one in catalogue:
        if one.operation == operation and kernel in (None, one.name):
            if all(f.holds for f in judge([limit for limit in one.limits if not limit.of_batch], request)):
                found.append(one)
    return tuple(found)


def kernels_for(problem: Problem, platform: Platform, operation: str) -> tuple[Kernel, ...]:
    """The kernels that batches of a problem get: those before the first without a limit on batches, and that one."""
    found: list[Kernel] = []
    for kernel in able_kernels(problem, platform, operation, None, False):
        found.append(kernel)
        if not kernel.batch_limits:
            break
    return tuple(found)


def chosen_by(decision: Decision) -> Kernel:
    """The kernel that was chosen; raises if there is none."""
    if decision.chosen is None:
        raise KernelError(f"no kernel can {decision.operation} this", decision)
    return decision.chosen
