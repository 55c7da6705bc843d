"""Types that factors of a product may be rounded to on their way to a matrix unit, and how."""

from __future__ import annotations

from typing import NamedTuple

import torch

KEPT = {"tf32": 10, "fp16": 10, "bf16": 7}
"""Bits of the fraction that a type keeps."""
ROUNDINGS = ("truncated", "nearest", "ties away")
"""Matrix units drop bits; conversions round, ties to even or away from zero."""


class Narrow(NamedTuple):
    """A type, and how numbers get into it."""

    type: str
    rounding: str = "nearest"

    @property
    def step(self) -> float:
        """The largest relative error of one rounding."""
        return 2.0 ** -(KEPT[self.type] + (self.rounding != "truncated"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers as this type holds them; they come as fp32 does."""
        drop = 23 - KEPT[self.type]
        bits = x.to(torch.float32).contiguous().view(torch.int32)
        if self.rounding == "nearest":
            bits = bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
        elif self.rounding == "ties away":
            bits = bits + (1 << (drop - 1))
        kept = (bits & -(1 << drop)).view(torch.float32)
        # What is too small or too large for fp16 is so however its fraction was cut.
        kept = kept.to(torch.float16) if self.type == "fp16" else kept
        return torch.where(x.isfinite(), kept.to(x.dtype), x)
