"""Calls through the operator on a GPU, and whether they were right.

Modules that import this are skipped where there is no GPU. A rehearsal without one, in Triton's interpreter:
TRITON_INTERPRET=1 python -m pytest tests/gpu
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import interpreter

if not interpreter.ON and not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

import quire
from quire.kernels.triton.host.constants import dot_type
from quire.platform import Platform
from quire.problem import default_out_dtype
from support.launched import problem_of
from support.scenario import TYPES, Scenario

if interpreter.ON:
    interpreter.install()
    # Not sm90: there Gluon's kernels are preferred, and these run in the emulator of `support.hopper` alone.
    Platform.detect = classmethod(lambda cls, device=None: cls.named("sm100"))  # type: ignore[assignment, method-assign]

DEVICE = "cpu" if interpreter.ON else "cuda"
HOPPER = not interpreter.ON and torch.cuda.get_device_capability() == (9, 0)
KERNELS = ("triton-decode", "triton-mixed", *(("gluon-mixed",) if HOPPER else ()))
every = pytest.mark.parametrize("kernel", KERNELS)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="only Hopper has this")
needs_gpu = pytest.mark.skipif(interpreter.ON, reason="only a GPU has this")

GUARD = 40.0
"""What stands in memory that must stay as it is; every type of output can hold it."""
MOST_DECODED = 16
"""New tokens up to which the dispatcher lets a row be decoded. It goes by the hint: a low one never truncates."""


def hint(s: Scenario, kernel: str | None) -> None:
    """Lets the dispatcher take the kernel, whatever the lengths are."""
    if kernel == "triton-decode":
        s.batch.max_q_len = min(MOST_DECODED, s.q.shape[0])


def named(s: Scenario, kernel: str | None, out: torch.Tensor | None = None) -> str | None:
    """The kernel for the scenario's cache. What is beyond its limits must be refused, and nothing may be written. A call that is
    refused for its memory alone goes to triton-mixed, which takes any; of other calls there is nothing to test."""
    if kernel is None or kernel == "triton-mixed":
        return kernel
    name = "gluon-mixed-bytes" if kernel == "gluon-mixed" and s.cache.format.itemsize == 1 else kernel
    decision = quire.explain(s.q, s.cache, s.batch, s.options, new=s.new, out=out, lse=True)
    refusals = next(candidate for candidate in decision.candidates if candidate.kernel.name == name).refusals
    only_memory = {refusal.rule for refusal in refusals} == {"memory"}
    if only_memory or (refusals and kernel == "gluon-mixed"):
        before = None if out is None else bits(out).clone()
        with pytest.raises(quire.KernelError, match=name):
            quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, out=out, lse=True, kernel=name)
        assert out is None or torch.equal(bits(out), before), "a call that was refused has written"
        if not only_memory:
            pytest.skip(f"refused, as it must be: {refusals[0]}")
        return "triton-mixed"
    return name


def fresh_out(s: Scenario, dtype: torch.dtype | None = None) -> torch.Tensor:
    """NaN where a result must be, GUARD in padding rows."""
    dtype = dtype or default_out_dtype(s.q.dtype, s.options.out_scale is not None)
    out = torch.full((s.q.shape[0], s.q.shape[1], s.cache.v_head_dim), torch.nan, device=s.q.device)
    out[s.live :] = GUARD
    return out.to(dtype)


def attend(
    s: Scenario, kernel: str | None, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and LSE of one call."""
    hint(s, kernel)
    out = fresh_out(s, out_dtype) if out is None else out
    kernel = named(s, kernel, out)
    return quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, out=out, lse=True, kernel=kernel)


def check(s: Scenario, out: torch.Tensor, lse: torch.Tensor | None = None, scale: float = 1.0) -> None:
    """Every live row is within the budget of the type that the kernel multiplies in; padding rows of `out` are as they were."""
    s.check(out, lse, scale, TYPES[dot_type(problem_of(s))[0]])
    assert (out[s.live :].float() == GUARD).all(), "a padding row was written"
    if lse is not None:
        assert (lse[s.live :] == 0).all(), "the LSE of a padding row is not 0"


def check_but(s: Scenario, row: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """One sequence is NaN as a whole, all others are right."""
    begin, end = s.batch.q_starts[row : row + 2].tolist()
    assert begin < end
    assert out[begin:end].isnan().all() and lse[begin:end].isnan().all(), "a row with a missing page is not NaN as a whole"
    out, lse = out.clone(), lse.clone()
    out[begin:end], lse[begin:end] = s.expected[begin:end].to(out.dtype), s.expected_lse[begin:end].to(lse.dtype)
    check(s, out, lse)


def attend_and_check(s: Scenario, kernel: str | None, **how: Any) -> torch.Tensor:
    """The first call of a problem, and one that finds its launcher: both right, and the same."""
    inputs = [s.q, s.cache.k, s.cache.v, s.cache.k_scale, s.cache.v_scale, *(s.new or ())]
    before = [None if t is None else bits(t).clone() for t in inputs]
    out, lse = attend(s, kernel, **how)
    check(s, out, lse)
    again, lse_again = attend(s, kernel, **how)
    assert torch.equal(bits(out), bits(again)) and torch.equal(bits(lse), bits(lse_again)), "the second call gave other bits"
    for tensor, copy in zip(inputs, before):
        assert tensor is None or torch.equal(bits(tensor), copy), "an input was written"
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes: NaN compares equal to itself there."""
    return (
        tensor.view(torch.uint8).contiguous().view(-1)
        if tensor.dtype.itemsize == 1
        else tensor.contiguous().view(-1).view(torch.uint8)
    )
