"""Scenarios through the Triton kernels, without a dispatcher: the answer, and that nothing but the answer was touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import Batch, KVCache
from quire.cache.latent import with_values
from quire.contract.call import Call
from quire.kernels.triton.host.audit import AuditLauncher
from quire.kernels.triton.host.constants import dot_type
from quire.kernels.triton.host.launcher import AttendLauncher
from quire.kernels.triton.host.shared import SharedLauncher
from quire.kernels.triton.host.tuning import AUDIT, SMALL, WRITE, Tuning, WorkPerProgram
from quire.kernels.triton.host.write import WriteLauncher
from quire.launch import described
from quire.platform import INTERPRETER, Platform
from quire.problem import ANY, Problem
from support import interpreter
from support.scenario import TYPES, Scenario, build

needs_hopper = pytest.mark.skipif(
    not interpreter.ON and torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="only Hopper has this kernel; in the interpreter it runs in the emulator of `support.hopper`",
)
GUARD = 40.0
"""What stands in memory that must stay as it is; every type of output can hold it."""


def run(
    kernel: str, s: Scenario, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, lse: bool = True, **how: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and LSE of one launch, NaN before it; padding rows hold GUARD."""
    shape = (s.q.shape[0], s.q.shape[1], s.cache.v_head_dim)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or (torch.bfloat16 if s.q.dtype.itemsize == 1 else s.q.dtype), device=s.q.device)
    logs = torch.empty(shape[:2], device=s.q.device) if lse else None
    for tensor in (out,) if logs is None else (out, logs):
        tensor[: s.live] = torch.tensor(float("nan")).to(tensor.dtype)
        tensor[s.live :] = torch.tensor(GUARD).to(tensor.dtype)
    inputs = [s.q, s.cache.k_bytes, s.cache.v_bytes, s.cache.k_scale, s.cache.v_scale, *(s.new or ())]
    inputs += [s.batch.page_table, s.batch.kv_lens, s.batch.q_starts]
    before = [None if t is None else bits(t).clone() for t in inputs]
    call, launcher = prepared(kernel, s, out, logs, **how)
    launcher(call)
    for tensor, copy in zip(inputs, before):
        assert tensor is None or torch.equal(bits(tensor), copy), "an input was written"
    return out, logs


def prepared(
    kernel: str,
    s: Scenario,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    context_from: int = 1,
    only: tuple[int, int] = (0, ANY),
    zero_padding: bool = False,
    platform: Platform | None = None,
    tuning: Tuning | None = None,
) -> tuple[Call, AttendLauncher]:
    """A scenario as a call, and what launches it."""
    call = Call(
        s.cache,
        s.batch,
        s.q,
        s.options,
        with_values(s.new, s.cache),
        out,
        lse=lse,
        context_from=context_from,
        only=only,
        zero_padding=zero_padding,
    )
    problem = problem_of(s, out, lse is not None, context_from=context_from, only=only)
    platform = platform or platform_at(s.q.device)
    if kernel == "shared":
        return call, SharedLauncher(problem, platform)
    if kernel == "gluon":
        from quire.kernels.gluon.launcher import HopperLauncher

        small = SMALL if tuning is not None else None
        return call, HopperLauncher(problem, replace(platform, arch="sm90"), tuning, small)
    return call, AttendLauncher(kernel, problem, platform, tuning)


def write(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: Batch, slots: torch.Tensor | None, work: WorkPerProgram = WRITE
) -> None:
    """One launch of the writer."""
    call = Call(cache, batch, k=k, v=v, slots=slots)
    WriteLauncher(described("write", call)[0], platform_at(k.device), work)(call)


def audit(call: Call, work: WorkPerProgram = AUDIT) -> None:
    """One check of a call's ledger."""
    audit_launcher(call, work)(call)


def audit_launcher(call: Call, work: WorkPerProgram = AUDIT) -> AuditLauncher:
    assert call.q is not None
    return AuditLauncher(described("audit", call)[0], platform_at(call.q.device), work)


def problem_of(s: Scenario, out: torch.Tensor | None = None, lse: bool = False, **how: Any) -> Problem:
    return described("attend", Call(s.cache, s.batch, s.q, s.options, with_values(s.new, s.cache), out, with_lse=lse, **how))[0]


def platform_at(device: torch.device | str) -> Platform:
    return INTERPRETER if torch.device(device).type == "cpu" else Platform.detect(device)


def check(kernel: str, s: Scenario, out: torch.Tensor, lse: torch.Tensor | None, scale: float = 1.0) -> None:
    """Within the budget of the type that the kernel multiplies in; padding rows of the output as they were, zeros in the LSE's."""
    s.check(out, lse, scale, TYPES[dot_type(problem_of(s))[0]])
    assert (out[s.live :].float() == GUARD).all(), "a padding row was written"
    assert lse is None or (lse[s.live :] == 0).all(), "a padding row's LSE is not 0"


def attend(kernel: str, device: str, *, seed: int = 1, how: dict[str, Any] | None = None, **case: Any) -> torch.Tensor:
    """Builds, runs and checks a case."""
    s = build(seed, device=device, **case)
    out, lse = run(kernel, s, **(how or {}))
    check(kernel, s, out, lse)
    return out


def card(device: str, multiprocessors: int) -> Platform:
    """The card at hand, as if it had that many multiprocessors: as many programs split the work, or a multiple of it."""
    return replace(platform_at(device), multiprocessors=multiprocessors)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes: NaN compares equal to itself there."""
    return tensor.contiguous().view(-1).view(torch.uint8)
