"""One fault of the catalogue, of attention or of writes: a name, a description, and a change of the exact computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.budget import Truth, ratios

Parameters = dict[str, Any]


@dataclass
class Observation:
    """The output of a kernel for a call, and the correct result."""

    call: KernelCall
    expected: Truth

    @cached_property
    def error_ratios(self) -> torch.Tensor:
        """Error divided by budget, for every element of a live row."""
        return ratios(self.call.out.cpu(), self.call.unwritten().cpu(), self.expected, self.call.live)


@dataclass(frozen=True)
class Fault:
    """One fault. A predicted fault replaces stages of the exact computation, so that the output of a kernel with this fault can be
    computed. A behavioural fault (`change` is None) is detected by how a kernel behaves: in repeated calls, with other poison
    values, between other calls."""

    name: str
    group: str
    effect: str
    """Effect on the output."""
    cause: str
    """Usual cause in kernels."""
    change: Callable[..., Any] | None = None
    """Returns the stages with the fault, `Stages` or `WriteStages`; takes the parameters by name."""
    applies: Callable[[Any], bool] = lambda call: True
    """Whether the fault can occur in a call."""
    tries: Sequence[Parameters] = field(default=({},))
    """Parameters to try; the first ones are injected."""
    solve: Callable[[Any], Sequence[Parameters]] | None = None
    """Computes parameters from the output of a kernel."""
    lasting: bool = False
    """Whether solved parameters must be the same in other calls: factors, distances and orders, but not rows, keys or pages."""
    symptom: bool = False
    """Whether it describes the output (zero rows, missing keys) and not the error in the kernel: reported as a symptom."""
    inject: Callable[[Any], Parameters] | None = None
    """Returns the parameters to inject, if they depend on the call."""
    issues: tuple[str, ...] = ()
    """Public reports."""

    @property
    def predicted(self) -> bool:
        return self.change is not None

    def injected_parameters(self, call: Any) -> Parameters:
        """The parameters with which the fault is injected into a call."""
        return self.inject(call) if self.inject is not None else dict(self.tries[0])
