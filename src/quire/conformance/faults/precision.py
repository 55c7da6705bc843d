"""Faults of precision: products in fewer bits than their factors have. `quire.conformance.diagnosis.precision` asks for them."""

from __future__ import annotations

from quire.conformance.faults.fault import Fault


def _products(type: str, looks: str, arises: str, issues: tuple[str, ...] = ()) -> Fault:
    return Fault(f"products-in-{type}", "precision", looks, arises, None, issues=issues)


PRECISION = (
    _products(
        "tf32",
        "fp32 outputs are right to three digits only: one key's value comes back without its last 13 bits",
        "matrix units take fp32 as tf32 unless they are told otherwise",
        ("Triton's tl.dot and input_precision", "vLLM 0.24.0, its Triton kernels with fp32 queries"),
    ),
    _products(
        "bf16",
        "outputs are right to two digits only: one key's value comes back rounded to bf16",
        "queries, weights or values are cast to bf16 for matrix units, whatever they were",
    ),
    _products(
        "fp16",
        "fp32 outputs are right to three digits only, and overflow at 65504",
        "queries, weights or values are cast to fp16 for matrix units, whatever they were",
    ),
)
