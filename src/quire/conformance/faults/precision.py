"""Faults of precision: products in fewer bits than their factors have. `quire.conformance.diagnosis.precision` detects them."""

from __future__ import annotations

from quire.conformance.faults.fault import Fault


def _products(type: str, effect: str, cause: str, issues: tuple[str, ...] = ()) -> Fault:
    return Fault(f"products-in-{type}", "precision", effect, cause, None, issues=issues)


PRECISION = (
    _products(
        "tf32",
        "fp32 outputs are correct to three digits only: the value of a single visible key loses its last 13 bits",
        "matrix units use tf32 for fp32 factors unless configured otherwise",
        ("Triton's tl.dot and input_precision", "vLLM 0.24.0, its Triton kernels with fp32 queries"),
    ),
    _products(
        "bf16",
        "outputs are correct to two digits only: the value of a single visible key is rounded to bf16",
        "queries, weights or values are cast to bf16 for matrix units, whatever their dtype",
    ),
    _products(
        "fp16",
        "fp32 outputs are correct to three digits only, and overflow above 65504",
        "queries, weights or values are cast to fp16 for matrix units, whatever their dtype",
    ),
)
