"""Launchers for calls of a kind: what does not change from call to call is worked out, compiled and bound once.

A bound launcher is given tensors of the same shapes, strides and types as those it was made with; then a launch is a few pointers
and one call of the driver. Memory that is less aligned than what the kernels were compiled for takes the compiler's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
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

    def arguments(self, *call: Any, at: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
        """The arguments of one call; `at` says what stands for a tensor."""

    def launches(self, arguments: tuple[Any, ...]) -> Iterable[Launch]:
        """The launches of one call, in order."""


class Bound:
    """What is prepared and, once it ran, its compiled kernels."""

    capturable = True

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        self.compiled: list[Callable[..., None]] | None = None

    def __call__(self, *call: Any) -> None:
        device = call[0].device
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                self(*call)
            return
        if self.prepared.settles(*call):
            return
        pointers = _Pointers()
        if self.compiled is not None:
            arguments = self.prepared.arguments(*call, at=pointers)
            if pointers.bits % ALIGNED == 0:
                stream = driver.active.get_current_stream(device.index)
                for run, launch in zip(self.compiled, self.prepared.launches(arguments)):
                    run(*launch.arguments, *launch.constants, stream=stream)
                return
        launches = list(self.prepared.launches(self.prepared.arguments(*call, at=as_bytes)))
        compiled = [launch() for launch in launches]
        # In the interpreter nothing is compiled.
        if compiled[0] is not None and all(t.data_ptr() % ALIGNED == 0 for launch in launches for t in _tensors(launch.arguments)):
            self.compiled = [kernel[launch.grid] for kernel, launch in zip(compiled, launches)]


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


class _Pointers:
    """Tensors as addresses; remembers which bits any of them had."""

    def __init__(self) -> None:
        self.bits = 0

    def __call__(self, tensor: torch.Tensor) -> int:
        address = tensor.data_ptr()
        self.bits |= address
        return address


def _tensors(arguments: Any) -> list[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    return [t for member in arguments for t in _tensors(member)] if isinstance(arguments, tuple) else []
