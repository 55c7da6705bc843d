"""The launch path: a call has a problem, a problem gets a kernel, and the two have a launcher, which is kept.

    Call -> Problem, Extent -> Kernel -> Launcher -> compiled kernels

Every operation comes this way: `attend`, `write`, `step`, vLLM's operators and those of torch's graphs.
"""

from __future__ import annotations

import torch

from quire.contract.call import Call
from quire.contract.check import recording
from quire.dispatch.choose import choose, kernel_for
from quire.dispatch.kernel import Kernel, Launcher
from quire.platform import Platform
from quire.problem import Extent, Problem

MOST = 4096
"""How many launchers are kept."""

_launchers: dict[tuple[Problem, Kernel], Launcher] = {}


def launcher_for(operation: str, call: Call, kernel: str | None = None) -> Launcher:
    """The launcher of a call that keeps the contract. Raises if no kernel can run it, or not the one asked for by name."""
    problem, extent = described(operation, call)
    device = call.batch.page_table.device
    platform = Platform.detect(device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    chosen = kernel_for(problem, extent, platform, operation, kernel, capturing)
    launcher = _launchers.get((problem, chosen))
    if launcher is None:
        if len(_launchers) >= MOST:
            _launchers.clear()
        launcher = _launchers[problem, chosen] = chosen.launcher_for(problem, platform)
    recorder = recording()
    if recorder is None:
        return launcher
    decision = choose(problem, extent, platform, operation=operation, kernel=kernel, capturing=capturing)
    return recorder.around(operation, launcher, decision)


def described(operation: str, call: Call) -> tuple[Problem, Extent]:
    """What the kernel of a call is compiled for, and how large its batch is."""
    if operation == "write":
        assert call.k is not None and call.v is not None
        problem = Problem.of_write(call.k, call.v, call.cache, call.batch, call.given_slots)
        return problem, Extent.of(call.k, call.cache, call.batch)
    assert call.q is not None
    problem = Problem.of(
        call.q,
        call.cache,
        call.batch,
        call.options,
        new=call.new,
        out=call.out,
        lse=call.with_lse,
        context_from=call.context_from,
        only=call.only,
    )
    return problem, Extent.of(call.q, call.cache, call.batch)


def audit_launcher(call: Call) -> Launcher | None:
    """The launcher of the check that compares a cache with its ledger on the device; None where there is no such kernel, as in host
    memory, where every call is checked beforehand."""
    if call.cache.ledger is None or call.cache.device.type == "cpu":
        return None
    problem, extent = described("audit", call)
    if choose(problem, extent, Platform.detect(call.cache.device), operation="audit").chosen is None:
        return None
    return launcher_for("audit", call)
