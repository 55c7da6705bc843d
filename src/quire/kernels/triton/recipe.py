"""What a launch asks of the compiler, as data: signature, constants, alignment. No device is needed to make or to compile it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quire.kernels.triton.launch import Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recipe(NamedTuple):
    """How to compile and launch one kernel."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    grid: tuple[int, int, int]
    options: dict[str, Any]

    def compile(self, backend: str, arch: int | str, warp: int) -> Any:
        """The compiled kernel for a target: ('cuda', 90, 32), ('hip', 'gfx942', 64), ..."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        language = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = language(fn=self.kernel, signature=self.signature, constexprs=self.constants, attrs=self.attributes)
        return triton.compile(source, target=GPUTarget(backend, arch, warp), options=self.options)


def recipe_of(launch: Launch) -> Recipe:
    """The recipe of a launch, as Triton would specialise it: integers that are 1 are constants, multiples of 16 are known to be."""
    names = launch.kernel.arg_names
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(describe(member, (*path, i)) for i, member in enumerate(value)))
        if value is None or (type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            if value.storage_offset() * value.itemsize % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return _POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    signature = {names[i]: describe(value, (i,)) for i, value in enumerate(launch.arguments)}
    for i, value in enumerate(launch.constants, start=len(launch.arguments)):
        signature[names[i]] = "constexpr"
        constants[(i,)] = value
    return Recipe(launch.kernel, signature, constants, attributes, launch.grid, launch.how)
