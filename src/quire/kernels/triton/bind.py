"""Launchers for calls of a kind: what does not change from call to call is worked out, compiled and bound once.

A bound launcher is given tensors of the same shapes, strides and types as those it was made with; then a launch is a few pointers
and one call of the driver. Memory that is less aligned than what the kernels were compiled for takes the compiler's own way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Any, Protocol

import torch
from triton import knobs
from triton.runtime import driver

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.triton.launch import Launch, Pair, Plan, as_bytes
from quire.options import Options

ALIGNED = 16
"""Bytes: what Triton takes for aligned."""


class Prepared(Protocol):
    """What calls of a kind have in common."""

    def settles(self, *call: Any) -> bool:
        """Whether there is nothing to launch; what a call asks for without a launch is done then."""

    def tensors(self, *call: Any) -> list[torch.Tensor]:
        """The tensors of one call, workspace included, in the order in which its arguments name them."""

    def arguments(self, *call: Any, at: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
        """The arguments of one call; `at` says what stands for a tensor."""

    def launches(self, arguments: tuple[Any, ...]) -> Iterable[Launch]:
        """The launches of one call, in order."""


class Bound:
    """What is prepared and, once it ran, its compiled kernels."""

    capturable = True

    def __init__(self, prepared: Any):
        self.prepared: Prepared = prepared
        self.compiled: list[Any] | None = None
        self.fill: Callable[[list[int]], tuple[tuple[Any, ...], ...]] | None = None

    def __call__(self, *call: Any) -> None:
        device = call[0].device
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                self(*call)
        elif not self.prepared.settles(*call) and not (self.compiled is not None and self._launch(device.index, call)):
            self._compile(call)

    def _launch(self, device: int, call: tuple[Any, ...]) -> bool:
        """Launches what is compiled, if memory is as aligned as it was then."""
        assert self.compiled is not None and self.fill is not None
        tensors = self.prepared.tensors(*call)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if reduce(or_, pointers) % ALIGNED:
            return False
        stream = driver.active.get_current_stream(device)
        enter, leave = (hook if getattr(hook, "calls", hook) else None for hook in _hooks())
        for (kernel, grid), arguments in zip(self.compiled, self.fill(pointers)):
            facts = None if enter is None else kernel.launch_metadata(grid, stream, *arguments)
            kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, facts, enter, leave, *arguments)
        return True

    def _compile(self, call: tuple[Any, ...]) -> None:
        """Launches through the compiler, and keeps what it made."""
        launches = list(self.prepared.launches(self.prepared.arguments(*call, at=as_bytes)))
        compiled = [launch() for launch in launches]
        # In the interpreter nothing is compiled.
        if compiled[0] is not None and all(t.data_ptr() % ALIGNED == 0 for launch in launches for t in _tensors(launch.arguments)):
            index = itertools.count()
            places = self.prepared.arguments(*call, at=lambda _: Place(next(index)))
            self.fill = written_out([(*launch.arguments, *launch.constants) for launch in self.prepared.launches(places)])
            # Last: another thread that finds it must find the other, too.
            self.compiled = [(kernel, launch.grid) for kernel, launch in zip(compiled, launches)]


class Place(int):
    """Stands for a tensor: which of a call's tensors goes there."""


def written_out(structure: Any) -> Callable[[list[int]], Any]:
    """A function that puts pointers into the places of nested tuples. It is written as source once: going through the tuples in
    every call would take longer than the launch."""
    constants: list[Any] = []

    def render(value: Any) -> str:
        if isinstance(value, Place):
            return f"p[{int(value)}]"
        if isinstance(value, (tuple, list)) and not hasattr(value, "HEAD_DIM") and not hasattr(value, "ROWS"):
            return f"({''.join(render(member) + ', ' for member in value)})"
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    fill: Callable[[list[int]], Any] = eval(f"lambda p, c=c: {render(structure)}", {"c": constants})
    return fill


def _hooks() -> tuple[Any, Any]:
    """What profilers ask Triton to call around a launch."""
    return knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def decode(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, new: Pair, out: torch.Tensor, **how: Any
) -> Callable[..., None]:
    """A launcher that takes every row for a short one: its keys are shared out."""
    return Bound(Plan("decode", q, cache, batch, options, new, out, **how))


def mixed(
    q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, new: Pair, out: torch.Tensor, **how: Any
) -> Callable[..., None]:
    """A launcher for short rows and long ones side by side."""
    return Bound(Plan("mixed", q, cache, batch, options, new, out, **how))


def _tensors(arguments: Any) -> list[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    return [t for member in arguments for t in _tensors(member)] if isinstance(arguments, tuple) else []
