"""What a fault is: a name, words for people, and a change of the exact computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.budget import Truth, ratios
from quire.conformance.oracle.exact import Stages

Parameters = dict[str, Any]


@dataclass
class Seen:
    """What a kernel gave for a call, and what it should have given."""

    call: KernelCall
    right: Truth

    @cached_property
    def off(self) -> torch.Tensor:
        """Error over budget of every live element."""
        return ratios(self.call.out.cpu(), self.call.unwritten().cpu(), self.right, self.call.live)


@dataclass(frozen=True)
class Fault:
    """One fault. A predicted one changes stages of the exact computation, so that its numbers can be foretold; a behavioural one
    (`change` is None) shows only in how a kernel behaves: when it is run twice, with other poison, between other calls."""

    name: str
    group: str
    looks: str
    """What one sees."""
    arises: str
    """How kernels come to have it."""
    change: Callable[..., Stages] | None = None
    """The stages with the fault in them; takes the parameters by name."""
    applies: Callable[[KernelCall], bool] = lambda call: True
    """Whether a call has what the fault is about."""
    tries: Sequence[Parameters] = field(default=({},))
    """Parameters to try; the first is what is planted."""
    solve: Callable[[Seen], Sequence[Parameters]] | None = None
    """Parameters read off what a kernel gave."""
    lasting: bool = False
    """Whether solved parameters must be the same in other calls: factors, distances, orders; not places (rows, keys, pages)."""
    symptom: bool = False
    """Whether it says what one sees (zero rows, missing keys) and not what the kernel does wrong: reported as a symptom."""
    plant: Callable[[KernelCall], Parameters] | None = None
    """Parameters to plant where they depend on the call."""
    issues: tuple[str, ...] = ()
    """Where it was met in the field."""

    @property
    def predicted(self) -> bool:
        return self.change is not None

    def planted(self, call: KernelCall) -> Parameters:
        """The parameters with which it is planted in a call."""
        return self.plant(call) if self.plant is not None else dict(self.tries[0])
