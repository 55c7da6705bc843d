"""A kernel with its constants, compiled once for each device and launched from then on by the driver alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quire.kernels.triton.host.recipe import Recipe, recipe_of
from quire.platform import Platform
from quire.problem import Problem


class Loaded(NamedTuple):
    """A compiled kernel on a device, and its launch functions: in stream order, or before the previous kernel has ended."""

    kernel: Any
    run: Any
    run_early: Any


_loaded: dict[tuple[str, int], Loaded] = {}
"""By key and device: problems may share kernels."""
compile_hooks: list[Callable[[Problem, str], None]] = []
"""Called with the problem of a call that compiles a kernel, and with the kernel's name."""


class Program:
    """One kernel and its constants and compiler options; only the types of its arguments are missing."""

    __slots__ = ("constants", "kernel", "loaded", "records", "registers", "stages", "units", "warps")

    def __init__(
        self,
        kernel: Any,
        records: tuple[Any, ...],
        constants: tuple[Any, ...],
        units: tuple[int, int] | None,
        warps: int,
        stages: int = 1,
        registers: int | None = None,
    ):
        self.kernel, self.constants, self.units = kernel, constants, units
        self.records = records
        """The named tuple of each argument, or the type of a single value. Launches pass plain tuples, which take less time."""
        self.warps, self.stages, self.registers = warps, stages, registers
        """Registers: at most so many a thread; None leaves it to the compiler."""
        self.loaded: dict[int, Loaded] = {}
        """By device."""

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options."""
        # Fused multiply-adds are asked for by name: Triton 3.9 warns that its default will change.
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return options | ({} if self.registers is None else {"maxnreg": self.registers})

    def recipe(self, arguments: tuple[Any, ...]) -> Recipe:
        return recipe_of(self.kernel, self.records, arguments, self.constants, self.options, self.units)

    def named(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with the names of their members."""
        return tuple(record(*value) if isinstance(record, type) else value for record, value in zip(self.records, arguments))

    def load(self, arguments: tuple[Any, ...], platform: Platform, device: int, problem: Problem | None = None) -> None:
        """Compiles for the current device, unless another problem has compiled the same kernel. `problem` is given if a call needs
        it now."""
        recipe = self.recipe(arguments)
        key = recipe.key(platform), device
        if key not in _loaded:
            if problem is not None and compile_hooks and not recipe.is_cached(platform):
                for hook in compile_hooks:
                    hook(problem, self.kernel.__name__)
            kernel = recipe.compile(platform)
            early = copy.copy(kernel.run)
            early.launch_pdl = True
            _loaded[key] = Loaded(kernel, kernel.run, early)
        self.loaded[device] = _loaded[key]

    def interpret(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Runs in Triton's interpreter."""
        self.kernel[grid](*self.named(arguments), *self.constants, **self.options)


def is_compiled(recipe: Recipe, platform: Platform) -> bool:
    """Whether this process has loaded a kernel, or the compile cache has it."""
    key = recipe.key(platform)
    return any(key == known for known, _ in _loaded) or recipe.is_cached(platform)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit tensors are passed as bytes: not every target supports every format."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
