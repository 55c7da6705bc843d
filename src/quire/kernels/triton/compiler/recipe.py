"""The input of Triton's compiler, as data: signature, constants, alignment. It can be made and compiled without a device.

Integers have one fixed width each and are never specialised, so that no batch needs a kernel of its own. What is promised to the
compiler about an argument follows from its name and from whether the problem's memory is aligned (`Problem.memory`).
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch

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
_UNIT = frozenset(("dim", "k_dim", "v_dim", "table_step", "kv_lens_step", "q_starts_step", "mask_column"))
"""Strides that are 1 in aligned memory, where they become constants."""
_BY_HEAD = {
    ("Query", "token"): 0, ("Query", "head"): 0, ("Out", "token"): 1, ("Out", "head"): 1,
    **{(record, f"{kind}_{axis}"): kind == "v" for record in ("New", "NewTokens") for kind in "kv" for axis in ("token", "head")},
}  # fmt: skip
"""Strides that are multiples of a head's length in aligned memory: K's (0) or V's (1)."""
_WIDE = frozenset(
    ("table_row", "slots_step", "causal_step", "alibi_step", "sinks_step", "mask_token", "positions_step", "lse_token", "lse_head")
)
"""Strides that take 64 bits in any memory."""
_DATA = frozenset(
    (("Out", "at"), ("Query", "at"), *((record, kind) for record in ("Cache", "New", "NewTokens", "PageTensors") for kind in "kv"))
)
"""Pointers that are read or written in vectors: multiples of 16 bytes in aligned memory."""
_OWN = frozenset((("Workspace", "at"), ("Query", "exponents")))
"""Pointers into memory that the launcher allocates, which is always aligned."""
_UNCHECKED = frozenset(("ready", "exponents", "units"))


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
    kernel: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any], units: tuple[int, int] | None
) -> Recipe:
    """The recipe of a kernel from the arguments of some call, of which only types are looked at. `units` are the numbers that the
    strides of K's and V's heads are multiples of; None in generic memory."""
    names = kernel.arg_names
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...], record: str, name: str) -> Any:
        if isinstance(value, tuple):
            kind = type(value).__name__
            members = zip(type(value)._fields, value)  # type: ignore[attr-defined]
            return type(value)(*(describe(member, (*path, i), kind, field) for i, (field, member) in enumerate(members)))
        if value is None:
            known[path] = None
            return "constexpr"
        if isinstance(value, torch.Tensor):
            own = (record, name) in _OWN or (not record and name in _UNCHECKED)
            if own or (units is not None and (record, name) in _DATA):
                attributes[path] = [["tt.divisibility", 16]]
            return _POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if name in _WIDE:
            return "i64"
        if name in _UNIT:
            if units is None:
                return "i64"
            known[path] = 1
            return "constexpr"
        if (record, name) in _BY_HEAD:
            if units is None:
                return "i64"
            attributes[path] = [["tt.divisibility", units[_BY_HEAD[record, name]]]]
        return "i32"

    signature = {names[i]: describe(value, (i,), "", names[i]) for i, value in enumerate(arguments)}
    for i, value in enumerate(constants, start=len(arguments)):
        signature[names[i]] = "constexpr"
        known[(i,)] = value
    return Recipe(kernel, signature, known, attributes, options)
