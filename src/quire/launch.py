"""The launch path: a call has a problem, a problem gets a kernel, and the two have a launcher, which is kept.

    Call -> Problem, Extent -> Kernel -> Launcher -> compiled kernels

Every operation comes this way: `attend`, `write`, `step`, vLLM's operators and those of torch's graphs.
"""

from __future__ import annotations

import torch

from quire.contract.call import Call
from quire.contract.check import Level, enforce, watching
from quire.contract.fast import is_certainly_legal
from quire.dispatch.choose import able_kernels, choose, kernel_for
from quire.dispatch.kernel import Kernel, Launcher
from quire.platform import Platform
from quire.problem import Extent, Problem

MOST = 4096
"""How many launchers are kept."""

_launchers: dict[tuple[int, Kernel], tuple[Problem, Launcher]] = {}
"""By problem and kernel. Equal facts make one Problem, so its identity will do, and the entry keeps it alive."""


def launcher_for(operation: str, call: Call, kernel: str | None = None, check: Level = "auto", checked: bool = True) -> Launcher:
    """The launcher of a call. Unless its caller has `checked` it, the call is checked first. Raises if the call breaks the
    contract, if no kernel can run it, or not the one asked for by name.

    It runs in every call, so it is one function: what follows reads like the line above, `Call` to `Launcher`."""
    cache, batch, q = call.cache, call.batch, call.q
    watch = watching.get()
    if not checked:
        # On a GPU no value is read: what is certainly legal needs no further look.
        given = call.k if operation == "write" else q
        static = isinstance(given, torch.Tensor) and not given.is_cpu and watch is None and type(check) is str and check == "auto"
        if not static or not is_certainly_legal(call):
            enforce(operation, call, check)
    if q is None or operation == "write":
        problem, extent = described(operation, call)
    else:
        problem = Problem.of(q, cache, batch, call.options, call.new, call.out, call.with_lse, call.context_from, call.only)
        tokens, (seqs, columns) = q.shape[0], batch.page_table.shape
        room = columns * cache.page_size
        longest, most = batch.max_q_len, batch.max_kv_len
        longest = tokens if longest is None or longest > tokens else longest
        extent = Extent(seqs, tokens, longest, room if most is None or most > room else most)
    call.extent = extent
    device = batch.page_table.device
    platform = Platform.detect(device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    for chosen in able_kernels(problem, platform, operation, None, capturing) if kernel is None else ():
        if chosen.max_q_len is None or extent.max_q_len <= chosen.max_q_len:
            if chosen.max_kv_len is None or extent.max_kv_len <= chosen.max_kv_len:
                break
    else:
        chosen = kernel_for(problem, extent, platform, operation, kernel, capturing)
    known = _launchers.get((id(problem), chosen))
    launcher = make_launcher(problem, chosen, platform) if known is None else known[1]
    if watch is None or watch.recorder is None:
        return launcher
    decision = choose(problem, extent, platform, operation=operation, kernel=kernel, capturing=capturing)
    return watch.recorder.around(operation, launcher, decision)


def make_launcher(problem: Problem, kernel: Kernel, platform: Platform) -> Launcher:
    """A launcher, which is kept."""
    if len(_launchers) >= MOST:
        _launchers.clear()
    launcher = kernel.launcher_for(problem, platform)
    _launchers[id(problem), kernel] = problem, launcher
    return launcher


def described(operation: str, call: Call) -> tuple[Problem, Extent]:
    """What the kernel of a call is compiled for, and how large its batch is."""
    cache, batch = call.cache, call.batch
    if operation == "write":
        assert call.k is not None and call.v is not None
        return Problem.of_write(call.k, call.v, cache, batch), Extent.of(call.k, cache, batch)
    assert call.q is not None
    problem = Problem.of(call.q, cache, batch, call.options, call.new, call.out, call.with_lse, call.context_from, call.only)
    return problem, Extent.of(call.q, cache, batch)


def audit_launcher(call: Call) -> Launcher | None:
    """The launcher of the check that compares a cache with its ledger on the device; None where there is no such kernel, as in host
    memory, where every call is checked beforehand."""
    if call.cache.ledger is None or call.cache.device.type == "cpu":
        return None
    problem, extent = described("audit", call)
    if choose(problem, extent, Platform.detect(call.cache.device), operation="audit").chosen is None:
        return None
    return launcher_for("audit", call)
