"""An implementation with its arguments prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.bench.case import BenchCase

Run = Callable[[], torch.Tensor]


class BoundImplementation(NamedTuple):
    """An implementation with its arguments prepared: only `run` is timed."""

    run: Run
    q_format: str
    """The precision of its queries. Ratios compare with peers of the same one."""
    difference: Callable[[], float] | None = None
    """For a write or a copy, after `run`: the largest difference from the expected result, which must be 0."""


Implementation = Callable[[BenchCase], BoundImplementation | None]
"""Binds a case; None if it does not support it."""
