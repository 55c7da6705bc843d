"""Triton's interpreter, made exact: for tests alone.

As it comes, the interpreter multiplies bf16 as if its bits were integers, rounds wrongly to 16 and 8 bits, reads any address it is
given, and spends most of its time on things that tests of kernels do not ask for. `install` mends this, and counts the outcomes of
the kernels' branches. It must have been switched on, by TRITON_INTERPRET=1, before Triton is imported for the first time.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import numpy as np
import torch

from support.branches import Counting, Taken

ON = os.environ.get("TRITON_INTERPRET") == "1"
COUNTED = ("quire.kernels.triton.", "quire.kernels.gluon.")
"""Modules whose branches are counted."""

_SOFT = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
}
"""Types that numpy has not: arrays hold their bits."""


def install() -> Taken:
    """Mends the interpreter, and returns the outcomes that branches take from now on."""
    from triton.runtime import interpreter

    assert ON, "TRITON_INTERPRET=1 must be set before this process starts"
    taken = Taken()
    _mend_numbers(interpreter)
    _mend_memory(interpreter)
    _mend_speed(interpreter)
    _rewrite_kernels(interpreter, taken)
    return taken


def numbers_of(handle: Any) -> np.ndarray:
    """The values of a tensor, as numpy can compute with them."""
    soft = _SOFT.get(handle.dtype.scalar.name)
    if soft is None:
        return handle.data
    return torch.from_numpy(np.array(handle.data, order="C")).view(soft).float().numpy()


def _mend_numbers(interpreter: Any) -> None:
    """bf16 and fp8 are computed with as fp32, and rounded as torch does it: once, to nearest even."""
    import triton.language as tl

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def stored(values: np.ndarray, dtype: Any) -> Any:
        if dtype.scalar.name.startswith("fp8"):
            raise NotImplementedError(
                "a cast to fp8 means something else on every target: quire.kernels.triton.device.formats encodes"
            )
        if dtype.scalar == tl.bfloat16:
            values = torch.from_numpy(np.array(values, dtype=np.float32, order="C")).bfloat16().view(torch.uint16).numpy()
        return handle(values.astype(interpreter._get_np_dtype(dtype), copy=False), dtype.scalar)

    def is_soft(*dtypes: Any) -> bool:
        return any(dtype.scalar.name in _SOFT for dtype in dtypes)

    plain_cast, plain_binary, plain_unary = builder.cast_impl, builder.binary_op, builder.unary_op

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        return stored(numbers_of(src), dst_type) if is_soft(src.dtype, dst_type) else plain_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return stored(numbers_of(src), dst_type)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not is_soft(lhs.dtype):
            return plain_binary(self, lhs, rhs, op)
        values = op(numbers_of(lhs), numbers_of(rhs))
        return handle(values, tl.int1) if values.dtype == np.bool_ else stored(values, lhs.dtype)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return stored(op(numbers_of(arg)), arg.dtype) if is_soft(arg.dtype) else plain_unary(self, arg, op)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        # As in a matrix unit, a row does not depend on where it is in the tile: with BLAS, it does.
        left, right = (np.ascontiguousarray(numbers_of(x), dtype=d.data.dtype) for x in (a, b))
        return handle(np.einsum("mk,kn->mn", left, right) + d.data, d.dtype.scalar)

    for member in (cast_impl, create_fp_to_fp, binary_op, unary_op, create_dot):
        setattr(builder, member.__name__, member)


def _mend_memory(interpreter: Any) -> None:
    """What is read and written must lie in a tensor that the kernel was given."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    begins, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    plain_load, plain_store, plain_atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    plain_init = executor._init_args_hst

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, (list, tuple)):
            return [tensor for member in value for tensor in tensors(member)]
        return [value] if isinstance(value, torch.Tensor) else []

    def _init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        nonlocal begins, ends
        args, kwargs = plain_init(self, args_dev, kwargs)
        storages = [tensor.untyped_storage() for tensor in tensors([*args, *kwargs.values()])]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        begins, ends = np.array(spans, np.uint64).reshape(-1, 2).T
        return args, kwargs

    def check(what: str, ptrs: Any, mask: Any) -> None:
        first = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        last = first + np.uint64(max(1, ptrs.get_element_ty().primitive_bitwidth // 8) - 1)
        inside = np.searchsorted(begins, first, side="right") - 1
        wrong = (inside < 0) | (last >= ends[inside])
        if wrong.any():
            raise IndexError(f"{what} outside of every tensor, {int(wrong.sum())} of {first.size} elements")

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        check("load", ptrs, mask)
        return plain_load(self, ptrs, mask, *args)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        check("store", ptrs, mask)
        return plain_store(self, ptrs, value, mask, *args)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *args: Any) -> Any:
        check("atomic", ptr, mask)
        return plain_atomic(self, op, ptr, val, mask, *args)

    executor._init_args_hst = _init_args_hst
    for member in (create_masked_load, create_masked_store, create_atomic_rmw):
        setattr(builder, member.__name__, member)


def _mend_speed(interpreter: Any) -> None:
    """Integer arithmetic is not done twice to look for overflows, and the language is patched once a launch and module, not once a
    call. Warnings about infinities and NaN, which tests put there on purpose, are not given."""
    executor, function = interpreter.GridExecutor, interpreter.InterpretedFunction
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    plain_run = executor.__call__
    patched: set[str] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return plain_run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    executor.__call__, function.__call__ = run, call
    _mend_types(interpreter)


def _mend_types(interpreter: Any) -> None:
    """What follows from a type alone is computed once for each type, not for each operation: the attributes of a type of blocks,
    the shape of its tensors, numpy's type, and that a tensor or a number is no constexpr. The type of a tuple is computed when it
    is asked for."""
    import triton.language as tl

    block_type, tensor, tuple_ = tl.core.block_type, tl.core.tensor, tl.core.tuple
    plain_block, plain_tensor, plain_numpy = block_type.__init__, tensor.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), getattr(element_ty, "const", None), *map(int, shape))
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            plain_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)

    def type_of_tuple(self: Any) -> Any:
        if "_type" not in vars(self):
            vars(self)["_type"] = tl.core._type_for_tuple_values(self.values)
        return vars(self)["_type"]

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = plain_numpy(dtype)
        return numpy_types[name]

    plain_unwrap, wraps_nothing = tl.core._unwrap_if_constexpr, frozenset((tensor, bool, int, float, str, type(None)))

    def unwrap(value: Any) -> Any:
        return value if type(value) in wraps_nothing else plain_unwrap(value)

    tl.core._unwrap_if_constexpr = unwrap
    block_type.__init__, tensor.__init__, tuple_.__init__ = init_block, init_tensor, init_tuple
    tuple_.type = property(type_of_tuple, lambda self, type: vars(self).update(_type=type))
    interpreter._get_np_dtype = get_np_dtype


def _rewrite_kernels(interpreter: Any, taken: Taken) -> None:
    """Branches report their outcomes. What a loop counts is a tensor, as it is where kernels are compiled."""
    rewriter = interpreter.FunctionRewriter
    plain_transform = rewriter._transform_ast

    class Both:
        """The interpreter's own rewriting after ours."""

        def __init__(self, counting: Counting):
            self.counting = counting

        def visit(self, tree: Any) -> Any:
            return rewriter.ast_transformer.visit(self.counting.visit(tree))

    def counted_range(*bounds: Any) -> Any:
        return map(interpreter._implicit_cvt, range(*bounds))

    def _transform_ast(self: Any, src: str) -> Any:
        if self.fn.__module__.startswith(COUNTED):
            self.fn.__globals__.update({Counting.NAME: taken.took, "range": counted_range})
            self.ast_transformer = Both(Counting(self.fn.__module__, self.def_file_lineno - 1))
        return plain_transform(self, src)

    rewriter._transform_ast = _transform_ast
