"""The input of Triton's compiler, as data: signature, constants, alignment. It can be made and compiled without a device.

Integers have one fixed width each and are never specialised, so that no batch needs a kernel of its own. What the compiler may
assume about an argument follows from its `Kind`, the type of the record's member, and from whether memory is aligned
(`Problem.memory`).
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import torch

from quire.kernels.triton.device.arguments import Kind
from quire.platform import Platform

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_ALIGNED_STRIDES = (Kind.UNIT_STRIDE, Kind.K_STRIDE, Kind.V_STRIDE)
"""Strides about which something is assumed in aligned memory."""


class Recipe(NamedTuple):
    """How to compile one kernel."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]

    def source(self) -> Any:
        """What `triton.compile` takes."""
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        language = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return language(fn=self.kernel, signature=self.signature, constexprs=self.constants, attrs=self.attributes)

    def key(self, platform: Platform) -> str:
        """A hash of all that `triton.compile` is given: the kernel's source, its arguments' types, constants, options, target."""
        asked = (self.kernel.__name__, self.source().hash(), platform.compiler_target, sorted(self.options.items()))
        return f"{self.kernel.__name__}-{hashlib.sha256(repr(asked).encode()).hexdigest()[:32]}"

    def is_cached(self, platform: Platform) -> bool:
        """Whether Triton's compile cache has this kernel."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.cache import get_cache_key, get_cache_manager

        source, backend = self.source(), make_backend(GPUTarget(*platform.compiler_target))
        options = backend.parse_options({**self.options, **source.parse_options()})
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(folder.get_group(f"{source.name[:150]}.json"))

    def compile(self, platform: Platform) -> Any:
        """The compiled kernel."""
        import triton
        from triton.backends.compiler import GPUTarget

        return triton.compile(self.source(), target=GPUTarget(*platform.compiler_target), options=self.options)


def recipe_of(
    kernel: Any,
    records: tuple[Any, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: dict[str, Any],
    units: tuple[int, int] | None,
) -> Recipe:
    """The recipe of a kernel from the arguments of some call, of which only the types are used. `records` has the named tuple of
    each argument, or the type of a single value. `units` are the divisors of the strides of K's and V's heads; None in generic
    memory."""
    names = kernel.arg_names
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...], kind: Kind) -> str:
        if value is None:
            known[path] = None
            return "constexpr"
        if isinstance(value, torch.Tensor):
            if kind is Kind.OWNED or (kind is Kind.VECTORS and units is not None):
                attributes[path] = [["tt.divisibility", 16]]
            return _POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if kind is Kind.STRIDE or (units is None and kind in _ALIGNED_STRIDES):
            return "i64"
        if kind is Kind.UNIT_STRIDE:
            known[path] = 1
            return "constexpr"
        if units is not None and kind in _ALIGNED_STRIDES:
            attributes[path] = [["tt.divisibility", units[kind is Kind.V_STRIDE]]]
        return "i32"

    signature: dict[str, Any] = {}
    for i, (record, value) in enumerate(zip(records, arguments)):
        if isinstance(record, type):
            members = zip(kinds_of(record), value)
            signature[names[i]] = record(*(describe(member, (i, j), kind) for j, (kind, member) in enumerate(members)))
        else:
            signature[names[i]] = describe(value, (i,), kind_of(record))
    for i, value in enumerate(constants, start=len(arguments)):
        signature[names[i]] = "constexpr"
        known[(i,)] = value
    return Recipe(kernel, signature, known, attributes, options)


@cache
def kinds_of(record: type) -> tuple[Kind, ...]:
    """The kinds of a record's members."""
    types = get_type_hints(record, include_extras=True)
    return tuple(kind_of(types[name]) for name in record._fields)  # type: ignore[attr-defined]


def kind_of(annotation: Any) -> Kind:
    """The kind of an argument, from its type: one of `device.arguments`."""
    kind: Kind = annotation.__metadata__[0]
    return kind
