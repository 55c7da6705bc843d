"""Reduced-precision types to which the factors of a product may be rounded for a matrix unit."""

from __future__ import annotations

from typing import NamedTuple

import torch

KEPT = {"tf32": 10, "fp16": 10, "bf16": 7}
"""Fraction bits of each type."""
ROUNDINGS = ("truncated", "nearest", "ties away")
"""Matrix units truncate; conversions round to nearest, ties to even or away from zero."""


class ReducedPrecision(NamedTuple):
    """A type, and how numbers are rounded to it."""

    type: str
    rounding: str = "nearest"

    @property
    def step(self) -> float:
        """The largest relative error of one rounding."""
        return 2.0 ** -(KEPT[self.type] + (self.rounding != "truncated"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers, taken as fp32, rounded to this type; the dtype of the tensor does not change."""
        drop = 23 - KEPT[self.type]
        bits = x.to(torch.float32).contiguous().view(torch.int32)
        if self.rounding == "nearest":
            bits = bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
        elif self.rounding == "ties away":
            bits = bits + (1 << (drop - 1))
        kept = (bits & -(1 << drop)).view(torch.float32)
        # The range of fp16 is smaller than that of fp32: underflow and overflow do not depend on the rounding.
        kept = kept.to(torch.float16) if self.type == "fp16" else kept
        return torch.where(x.isfinite(), kept.to(x.dtype), x)
