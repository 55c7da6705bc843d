"""Targets with one injected fault, computed by the oracle in the precision of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall, bytes_of, whole_of
from quire.conformance.faults import BY_NAME
from quire.conformance.faults.behaviour import nan_leak
from quire.conformance.oracle.budget import as_stored, factor_type
from quire.conformance.oracle.exact import PLAIN, Outcome, Stages, exact
from quire.conformance.oracle.rounding import ReducedPrecision
from quire.conformance.runner.target import Target
from quire.conformance.runner.threads import one_thread


def put(call: KernelCall, outcome: Outcome) -> None:
    """Writes an outcome as a kernel does: rounded to the dtype of the output, and only `written` elements."""
    live = call.live
    keep = outcome.written[:live].to(call.device)
    new = as_stored(call, outcome).out[:live].to(call.out.dtype).to(call.device)
    call.out[:live] = torch.where(keep, new, call.out[:live])
    if call.lse is not None:
        rows = keep.any(-1)
        call.lse[:live] = torch.where(rows, outcome.lse[:live].to(torch.float32).to(call.device), call.lse[:live])


def compute(call: KernelCall, stages: Stages = PLAIN) -> None:
    """Computes a call as a straightforward kernel does: in fp32, with factors rounded as for matrix units."""
    with one_thread():
        put(call, exact(call, stages, torch.float32, factor_type(call)))


def injected(name: str, parameters: dict[str, Any] | None = None) -> Target:
    """A target that is correct except for one fault."""
    fault = BY_NAME[name]
    if name in BEHAVIOUR:
        return Target(f"injected {name}", BEHAVIOUR[name]())

    def run(call: KernelCall) -> None:
        stages = PLAIN
        if fault.applies(call):
            assert fault.change is not None
            stages = fault.change(**(fault.injected_parameters(call) if parameters is None else parameters))
        compute(call, stages)

    return Target(f"injected {name}", run)


def _leaks() -> Callable[[KernelCall], None]:
    return lambda call: compute(call, nan_leak())


def _differs() -> Callable[[KernelCall], None]:
    count = 0

    def run(call: KernelCall) -> None:
        nonlocal count
        compute(call)
        count += 1
        if call.live:
            # The last bit of one number: within every budget.
            bits = bytes_of(call.out[:1])
            bits[0] ^= count & 1
            call.out[:1] = bits.view(call.out.dtype).view(call.out[:1].shape)

    return run


def _remembers() -> Callable[[KernelCall], None]:
    last: list[int] = []

    def run(call: KernelCall) -> None:
        lengths = call.kv_lens.tolist()
        compute(call)
        if call.live and last and last != lengths:
            call.out[:1] *= 1.25
        last[:] = lengths

    return run


def _depends_on_batch() -> Callable[[KernelCall], None]:
    def run(call: KernelCall) -> None:
        compute(call)
        if call.live and call.seqs > 1:
            # The last bit of one number: within every budget.
            bits = bytes_of(call.out[:1])
            bits[0] ^= 1
            call.out[:1] = bits.view(call.out.dtype).view(call.out[:1].shape)

    return run


def _writes_outside() -> Callable[[KernelCall], None]:
    def run(call: KernelCall) -> None:
        compute(call)
        whole = whole_of(call.out)
        whole[-3:] = 0

    return run


def _writes_padding() -> Callable[[KernelCall], None]:
    def run(call: KernelCall) -> None:
        compute(call)
        call.out[call.live :] = 0

    return run


def _changes_inputs() -> Callable[[KernelCall], None]:
    def run(call: KernelCall) -> None:
        compute(call)
        if call.live and call.q.dtype.itemsize > 1:
            call.q[:1] *= 2

    return run


def _raises() -> Callable[[KernelCall], None]:
    def run(call: KernelCall) -> None:
        raise RuntimeError("unsupported head size")

    return run


def _products(type: str) -> Callable[[], Callable[[KernelCall], None]]:
    def run(call: KernelCall) -> None:
        with one_thread():
            put(call, exact(call, PLAIN, torch.float32, ReducedPrecision(type, "truncated" if type == "tf32" else "nearest")))

    return lambda: run


BEHAVIOUR: dict[str, Callable[[], Callable[[KernelCall], None]]] = {
    "nan-leak": _leaks,
    "two-runs-differ": _differs,
    "state-leaks": _remembers,
    "depends-on-batch": _depends_on_batch,
    "writes-outside-output": _writes_outside,
    "writes-padding-rows": _writes_padding,
    "changes-inputs": _changes_inputs,
    "raises": _raises,
    **{f"products-in-{type}": _products(type) for type in ("tf32", "bf16", "fp16")},
}
