"""Reduced precision is named if the bits match that of the type; noise of the same size is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.faults.injected import compute
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.rounding import KEPT, ReducedPrecision
from quire.conformance.runner.run import examine
from quire.conformance.runner.target import Target

FP32 = Case("fp32", q_dtype="fp32", format="fp32")
FP16 = Case("fp16")
LONG = Case("long", q_lens=(1, 2), kv_lens=(900, 400), kv_heads=1)

Change = Callable[[torch.Tensor], torch.Tensor]


def online(
    call: KernelCall,
    narrow: Change = lambda t: t,
    values: Change | None = None,
    tile: int = 16,
    sums: torch.dtype | None = None,
    missing: int = -1,
) -> None:
    """A kernel that goes through keys tile by tile, as kernels do; the predictions of the kit do not."""
    w = oracle.Work(call, torch.float32)
    at, heads = oracle.read(w), oracle.kv_head(w)
    for row in oracle.sequences(w, at):
        k, v = oracle.gather(w, oracle.PLAIN, at, row)
        seen, rows = oracle.visibility(w, row, row.kv_len), slice(row.first, row.first + row.q_len)
        seen[:, missing : missing + 1] = False
        for h, g in enumerate(heads.tolist()):
            top, total = torch.full((row.q_len, 1), -math.inf), torch.zeros(row.q_len, 1)
            acc = torch.zeros(row.q_len, v.shape[2])
            for a in range(0, row.kv_len, tile):
                keys = slice(a, a + tile)
                s = (narrow(call.q[rows, h].float()) @ narrow(k[keys, g]).T * call.scale).masked_fill(~seen[:, keys], -math.inf)
                now = torch.maximum(top, s.amax(1, keepdim=True))
                safe = now.masked_fill(now == -math.inf, 0.0)
                p, kept = torch.exp(s - safe), torch.exp(top - safe)
                total, top = total * kept + p.sum(1, keepdim=True), now
                acc = acc * kept + narrow(p) @ (values or narrow)(v[keys, g])
                acc = acc if sums is None else acc.to(sums).float()
            call.out[rows, h] = (acc / total).to(call.out.dtype)


def noise(call: KernelCall) -> None:
    compute(call)
    call.out *= 1 + 3e-4 * torch.randn(call.out.shape, generator=torch.Generator().manual_seed(0))


def cut(bits: int) -> Change:
    """Fewer bits than any type has."""
    return lambda t: (t.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)


NARROW: dict[str, tuple[Case, Callable[[KernelCall], None], str, dict[str, object]]] = {
    "tf32 as matrix units take it": (
        FP32,
        lambda call: online(call, ReducedPrecision("tf32", "truncated")),
        "products-in-tf32",
        {"values": "truncated", "scores": "truncated", "weights": "truncated"},
    ),
    "tf32 in wide tiles": (FP32, lambda call: online(call, ReducedPrecision("tf32", "truncated"), tile=64), "products-in-tf32", {}),
    "tf32, each key by itself": (
        FP32,
        lambda call: online(call, ReducedPrecision("tf32", "truncated"), tile=1),
        "products-in-tf32",
        {},
    ),
    "fp16": (FP32, lambda call: online(call, ReducedPrecision("fp16")), "products-in-fp16", {}),
    "bf16 of fp32": (FP32, lambda call: online(call, ReducedPrecision("bf16")), "products-in-bf16", {}),
    "bf16 of fp16": (FP16, lambda call: online(call, ReducedPrecision("bf16")), "products-in-bf16", {}),
    "values alone": (FP32, lambda call: online(call, values=ReducedPrecision("bf16")), "products-in-bf16", {"values": "nearest"}),
    "scores and weights alone": (
        FP32,
        lambda call: online(call, ReducedPrecision("bf16"), values=lambda t: t),
        "products-in-bf16",
        {"scores": "nearest", "weights": "nearest"},
    ),
    "sums in bf16": (
        LONG,
        lambda call: online(call, tile=64, sums=torch.bfloat16),
        "accumulated-in-16-bits",
        {"tile": 64, "type": "bf16"},
    ),
}
OTHER: dict[str, Callable[[KernelCall], None]] = {
    "noise": noise,
    "twelve bits of values": lambda call: online(call, values=cut(11)),
    "eight bits of everything": lambda call: online(call, cut(15)),
    "tf32 and a key that is missing": lambda call: online(call, ReducedPrecision("tf32", "truncated"), missing=5),
    "outputs in tf32": lambda call: (compute(call), call.out.copy_(ReducedPrecision("tf32", "truncated")(call.out)))[0],
}


@pytest.mark.parametrize("name", NARROW)
def test_reduced_precision_is_named(name: str) -> None:
    case, run, fault, parameters = NARROW[name]
    first = examine(case, Target(name, run)).findings[0]
    assert first.fault == fault, first
    assert not parameters or first.parameters == parameters
    assert "exactly the" in first.evidence[-1]


@pytest.mark.parametrize("name", OTHER)
def test_other_errors_of_that_size_are_unknown(name: str) -> None:
    first = examine(FP32, Target(name, OTHER[name])).findings[0]
    assert first.fault == "unknown", first


def test_full_precision_is_correct() -> None:
    assert examine(FP32, Target("correct", online)).status == "correct"


@pytest.mark.parametrize("type", KEPT)
def test_rounding_matches_the_type(type: str) -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 100
    kept = ReducedPrecision(type)(numbers)
    if type != "tf32":
        assert torch.equal(kept, numbers.to({"fp16": torch.float16, "bf16": torch.bfloat16}[type]).float())
    cut = ReducedPrecision(type, "truncated")(numbers)
    assert bool((cut.abs() <= numbers.abs()).all()) and bool((cut.abs() >= numbers.abs() * (1 - 2.0 ** -KEPT[type])).all())
    assert torch.equal(ReducedPrecision(type)(kept), kept) and torch.equal(ReducedPrecision(type, "truncated")(kept), kept)
