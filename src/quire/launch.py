"""The launch path: from a call to its problem, from the problem to a kernel, and from both to a launcher, which is cached.

    Call -> Problem, Extent -> Kernel -> KernelLauncher -> compiled kernels

Every operation uses it: `attend`, `write`, `step`, vLLM's operators (`quire.compat`) and torch operators (`quire.ops`).
"""

from __future__ import annotations

import torch

from quire.contract.call import Call
from quire.contract.check import Level, enforce, watching
from quire.contract.fast import is_certainly_legal
from quire.dispatch.choose import able_kernels, choose, kernel_for
from quire.dispatch.kernel import Kernel, KernelLauncher
from quire.platform import Platform
from quire.problem import Extent, Problem

MAX_LAUNCHERS = 4096
"""The size of the launcher cache."""

_launchers: dict[tuple[int, Kernel], tuple[Problem, KernelLauncher]] = {}
"""The launcher cache, by problem and kernel. Equal problems are one object, so the key is its id; the entry keeps the object
alive."""


def launcher_for(
    operation: str, call: Call, kernel: str | None = None, check: Level = "auto", checked: bool = True
) -> KernelLauncher:
    """The launcher of a call. The call is checked first, unless the caller has `checked` it. Raises ContractError if the call
    violates the contract, and KernelError if no kernel can run it or the kernel requested by name cannot.

    It runs in every call, so it is one function without helpers: the stages are those of the module docstring."""
    cache, batch, q = call.cache, call.batch, call.q
    watch = watching.get()
    if not checked:
        # On a GPU no values are read: if the fast static check accepts the call, nothing else is checked.
        given = call.k if operation == "write" else q
        static = getattr(given, "is_cpu", True) is False and watch is None and type(check) is str and check == "auto"
        if not static or not is_certainly_legal(call):
            enforce(operation, call, check)
    if q is None or operation == "write":
        problem, extent = described(operation, call)
    else:
        problem = Problem.of(q, cache, batch, call.options, call.new, call.out, call.with_lse, call.context_from, call.only)
        tokens, (seqs, columns) = q.shape[0], batch.page_table.shape
        capacity, hint_q, hint_kv = columns * cache.page_size, batch.max_q_len, batch.max_kv_len
        longest_q = tokens if hint_q is None else min(tokens, hint_q)
        extent = Extent(seqs, tokens, longest_q, capacity if hint_kv is None else min(capacity, hint_kv))
    call.extent = extent
    device = batch.page_table.device
    platform = Platform.detect(device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    for chosen in able_kernels(problem, platform, operation, None, capturing) if kernel is None else ():
        if extent.max_q_len <= chosen.longest_q and extent.max_kv_len <= chosen.longest_kv:
            break
    else:
        chosen = kernel_for(problem, extent, platform, operation, kernel, capturing)
    known = _launchers.get((id(problem), chosen))
    launcher = make_launcher(problem, chosen, platform) if known is None else known[1]
    if watch is None or watch.recorder is None:
        return launcher
    decision = choose(problem, extent, platform, operation=operation, kernel=kernel, capturing=capturing)
    return watch.recorder.around(operation, launcher, decision)


def make_launcher(problem: Problem, kernel: Kernel, platform: Platform) -> KernelLauncher:
    """Makes a launcher and caches it."""
    if len(_launchers) >= MAX_LAUNCHERS:
        _launchers.clear()
    launcher = kernel.launcher_for(problem, platform)
    _launchers[id(problem), kernel] = problem, launcher
    return launcher


def described(operation: str, call: Call) -> tuple[Problem, Extent]:
    """The problem (what a kernel is compiled for) and the extent (how large the batch is) of a call."""
    cache, batch = call.cache, call.batch
    if operation == "write":
        assert call.k is not None and call.v is not None
        return Problem.of_write(call.k, call.v, cache, batch), Extent.of(call.k, cache, batch)
    assert call.q is not None
    problem = Problem.of(call.q, cache, batch, call.options, call.new, call.out, call.with_lse, call.context_from, call.only)
    return problem, Extent.of(call.q, cache, batch)


def audit_launcher(call: Call) -> KernelLauncher | None:
    """The launcher of the audit kernel, which compares a cache with its ledger on the device; None if no such kernel can run. In
    host memory the ledger is checked before every call instead."""
    if call.cache.ledger is None or call.cache.device.type == "cpu":
        return None
    problem, extent = described("audit", call)
    if choose(problem, extent, Platform.detect(call.cache.device), operation="audit").chosen is None:
        return None
    return launcher_for("audit", call)
