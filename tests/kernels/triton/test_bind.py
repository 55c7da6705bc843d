"""What a launcher keeps after its first call, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.bind import Bound


class Launched(NamedTuple):
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...] = (7,)
    grid: tuple[int, int, int] = (1, 1, 1)

    def __call__(self) -> object:
        return "a compiled kernel"


class Prepared:
    """Calls with one tensor, which are launched once. Notes what another thread would have found meanwhile."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.bound = Bound(self)

    def settles(self, *call: Any) -> bool:
        return False

    def tensors(self, *call: Any) -> list[torch.Tensor]:
        return [call[0]]

    def arguments(self, *call: Any, at: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
        self.found.append(self.bound.compiled)
        return (at(call[0]), (3, "a number"))

    def launches(self, arguments: tuple[Any, ...]) -> Iterator[Launched]:
        self.found.append(self.bound.compiled)
        yield Launched(arguments)


def test_a_launcher_is_never_found_half_made() -> None:
    """A thread that finds compiled kernels launches them: what fills in their arguments must be there before."""
    prepared = Prepared()
    prepared.bound(torch.zeros(4))
    assert len(prepared.found) == 4 and all(found is None for found in prepared.found)
    assert prepared.bound.compiled == [("a compiled kernel", (1, 1, 1))]
    assert prepared.bound.fill is not None and prepared.bound.fill([64]) == ((64, (3, "a number"), 7),)
