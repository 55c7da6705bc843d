"""Targets with one injected fault, computed by the oracle in the precision of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall, bytes_of, whole_of
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.faults import BY_NAME, WRITES, Fault
from quire.conformance.faults.behaviour import nan_leak
from quire.conformance.oracle.budget import as_stored, factor_type
from quire.conformance.oracle.exact import PLAIN, Outcome, Stages, exact
from quire.conformance.oracle.rounding import ReducedPrecision
from quire.conformance.oracle.write import RIGHT, WriteStages, exact_write
from quire.conformance.oracle.write_budget import put_write
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


def injected(name: str, parameters: dict[str, Any] | None = None, operation: str = "attend") -> Target:
    """A target that is correct except for one fault. Some faults of behaviour are faults of both operations."""
    fault = BY_NAME[name]
    if operation == "write" or fault in WRITES:
        return Target(f"injected {name}", _wrong_write(fault, parameters), operation="write")
    if name in BEHAVIOUR:
        return Target(f"injected {name}", BEHAVIOUR[name]())

    def run(call: KernelCall) -> None:
        stages = PLAIN
        if fault.applies(call):
            assert fault.change is not None
            stages = fault.change(**(fault.injected_parameters(call) if parameters is None else parameters))
        compute(call, stages)

    return Target(f"injected {name}", run)


def _wrong_write(fault: Fault, parameters: dict[str, Any] | None) -> Callable[[WriteCall], None]:
    if fault.name in BEHAVIOUR_OF_WRITES:
        return BEHAVIOUR_OF_WRITES[fault.name]()

    def run(call: WriteCall) -> None:
        stages = RIGHT
        if fault.applies(call):
            assert fault.change is not None
            stages = fault.change(**(fault.injected_parameters(call) if parameters is None else parameters))
        write(call, stages)

    return run


def write(call: WriteCall, stages: WriteStages = RIGHT) -> None:
    """Computes a write, and rounds once."""
    with one_thread():
        put_write(call, exact_write(call, stages))


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


def _write_differs() -> Callable[[WriteCall], None]:
    count = 0

    def run(call: WriteCall) -> None:
        nonlocal count
        write(call)
        count += 1
        kept = call.slots[: call.live].cpu()
        if count % 2 and bool((kept >= 0).any()):
            # The last bit of one number of the first token that is stored.
            place, slot = call.places["k"], int(kept[kept >= 0][0])
            number = int(torch.searchsorted(call.pages_of, slot // call.case.page_size))
            at = int(place.addresses[number, slot % call.case.page_size, 0, 0]) * place.flat.element_size()
            bytes_of(place.flat)[at] ^= 1

    return run


def _write_beside() -> Callable[[WriteCall], None]:
    def run(call: WriteCall) -> None:
        write(call)
        whole_of(call.k_pages)[:3] ^= 255

    return run


def _write_to_padding() -> Callable[[WriteCall], None]:
    def run(call: WriteCall) -> None:
        write(call)
        if call.q_out is not None:
            call.q_out[call.live :] = 0

    return run


def _write_to_inputs() -> Callable[[WriteCall], None]:
    def run(call: WriteCall) -> None:
        write(call)
        call.k[:1] *= 2

    return run


def _write_raises() -> Callable[[WriteCall], None]:
    def run(call: WriteCall) -> None:
        raise RuntimeError("unsupported page size")

    return run


BEHAVIOUR_OF_WRITES: dict[str, Callable[[], Callable[[WriteCall], None]]] = {
    "two-runs-differ": _write_differs,
    "writes-outside-output": _write_beside,
    "writes-padding-rows": _write_to_padding,
    "changes-inputs": _write_to_inputs,
    "raises": _write_raises,
}
