"""The stand-ins for Gluon's modules, and the import of the kernel with them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

from support.hopper import copies, products
from support.hopper.partitions import HopperError, Program
from support.hopper.shared_memory import SharedView, allocate, name_views, number

GLUON = "triton.experimental.gluon"
HOPPER = f"{GLUON}.language.nvidia.hopper"
KERNEL = "quire.kernels.gluon"

_running = Program()


def running() -> Program:
    """The program that runs."""
    return _running


class HopperFunction(interpreter.InterpretedFunction):
    """A function of Gluon. The interpreter knows arguments that are constants by the name `tl.constexpr`."""

    def rewrite(self) -> Any:
        function = super().rewrite()
        names = {name: str(kind).replace("gl.constexpr", "tl.constexpr") for name, kind in function.__annotations__.items()}
        function.__annotations__ = names
        return function


class Language(ModuleType):
    """`gl`: what it does not define is Triton's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


class Layout:
    """Any layout."""

    def __init__(self, *members: Any):
        pass

    @classmethod
    def get_default_for(cls, shape: Any, dtype: Any) -> Layout:
        return cls()


def arange(start: Any, end: Any, layout: Any = None) -> Any:
    return tl.arange(start, end)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    return tl.full([number(size) for size in shape], value, dtype)


def convert_layout(value: Any, layout: Any) -> Any:
    return value


def static_range(*bounds: Any) -> range:
    return range(*map(number, bounds))


def multiple_of(value: Any, divisor: Any) -> Any:
    """The promise must be true."""
    if (value.handle.data % number(divisor) != 0).any():
        raise HopperError(f"numbers that are said to be multiples of {number(divisor)} are not")
    return value


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any) -> SharedView:
    element = getattr(element_ty, "value", element_ty)
    return allocate(running(), element, [number(size) for size in shape], f"{element} {shape}")


def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> None:
    if [number(warps) for warps in worker_num_warps] != [4] * (len(functions_and_args) - 1):
        raise NotImplementedError("partitions of other than four warps")
    parts = []
    for function, arguments in functions_and_args:
        name_views(arguments)
        parts.append((function.__name__, lambda function=function, arguments=arguments: function(*arguments)))
    names = [name for name, _ in parts]
    parts = [(f"{name} {names[:i].count(name)}" if names.count(name) > 1 else name, run) for i, (name, run) in enumerate(parts)]
    running().run(parts)
    running().end()


def thread_barrier() -> None:
    running().now.synchronise()


def fence_async_shared() -> None:
    running().now.fence()


def init(mbarrier: SharedView, count: Any) -> None:
    mbarrier.make_barrier(number(count))


def wait(mbarrier: SharedView, phase: Any) -> None:
    running().wait(mbarrier.barrier, number(phase))


def arrive(mbarrier: SharedView, *, count: Any = 1) -> None:
    mbarrier.barrier.arrive_from(running().now, number(count))


def expect(mbarrier: SharedView, bytes_per_cta: Any) -> None:
    mbarrier.barrier.expect(number(bytes_per_cta), running().now)


def _module(name: str, kind: type[ModuleType] = ModuleType, **members: Any) -> ModuleType:
    made = kind(name)
    vars(made).update(members)
    return made


def stand_ins() -> dict[str, ModuleType]:
    """Gluon's modules, with all names that the kernel uses."""
    distributed = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout")
    layouts = (*distributed, "NVMMASharedLayout", "SwizzledSharedLayout")
    functions = (arange, full, convert_layout, static_range, multiple_of, allocate_shared_memory, warp_specialize)
    gl = _module(
        f"{GLUON}.language",
        Language,
        **dict.fromkeys(layouts, Layout),
        **{function.__name__: function for function in functions},
        barrier=thread_barrier,
    )
    hopper = _module(
        HOPPER,
        mbarrier=_module("mbarrier", MBarrierLayout=Layout, init=init, wait=wait, arrive=arrive, expect=expect),
        async_copy=_module(
            "async_copy",
            async_load=copies.copy_elements,
            mbarrier_arrive=copies.arrive_when_copied,
            wait_group=copies.wait_for_copies,
        ),
        tma=_module("tma", make_tensor_descriptor=copies.make_tensor_descriptor, async_load=copies.copy_box),
        fence_async_shared=fence_async_shared,
        warpgroup_mma=products.start_product,
        warpgroup_mma_wait=products.wait_for_products,
    )
    gluon = _module(GLUON, jit=HopperFunction, constexpr_function=triton.constexpr_function, language=gl)
    nvidia = _module(f"{GLUON}.language.nvidia", hopper=hopper)
    return {GLUON: gluon, gl.__name__: gl, nvidia.__name__: nvidia, HOPPER: hopper}


@contextmanager
def _replaced(modules: dict[str, ModuleType]) -> Iterator[None]:
    import triton.experimental

    before = {name: sys.modules.get(name) for name in modules}
    attribute = getattr(triton.experimental, "gluon", None)
    sys.modules.update(modules)
    triton.experimental.gluon = modules[GLUON]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        if attribute is None:
            del triton.experimental.gluon
        else:
            triton.experimental.gluon = attribute


def install() -> None:
    """Imports `quire.kernels.gluon` with the stand-ins: its launcher runs in the interpreter, which must be on."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 must be set before this process starts"
    for name in [name for name in sys.modules if name.startswith(f"{KERNEL}.")]:
        del sys.modules[name]
    with _replaced(stand_ins()):
        importlib.import_module(f"{KERNEL}.launcher")
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{KERNEL}."):
            # The interpreter asks every module for Triton's language.
            vars(module).setdefault("tl", tl)
    tl.core.block_type.layout = None  # type: ignore[attr-defined]
    plain = interpreter.InterpreterBuilder.set_grid_idx

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        global _running
        _running = Program()
        plain(self, x, y, z)

    interpreter.InterpreterBuilder.set_grid_idx = set_grid_idx
