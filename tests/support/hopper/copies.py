"""Asynchronous copies from memory to shared memory: element by element, and boxes of tensors by the tensor memory accelerator."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from support.hopper.partitions import CLOCKS, THREADS, HopperError, Partition
from support.hopper.shared_memory import SharedView, number

VECTOR = 16
"""Bytes that a thread copies at a time, and what copies are aligned to."""
LARGEST_STRIDE, LARGEST_BOX = 2**40, 256
"""Bytes of a stride of a tensor of boxes, and elements of a side of a box: more cannot be said in a descriptor."""


def copy_elements(to: SharedView, pointer: Any, mask: Any = None) -> None:
    """Starts a copy; zeros where the mask is False."""
    me = to.of.program.now
    at = np.broadcast_to(pointer.handle.data, to.shape)
    wanted = np.broadcast_to(np.ones((), bool) if mask is None else mask.handle.data, to.shape)
    size = pointer.dtype.element_ty.primitive_bitwidth // 8
    if pointer.dtype.element_ty != to.dtype:
        raise HopperError(f"{pointer.dtype.element_ty} elements are copied to {to.dtype} of {to}")
    vectors, parts = at.reshape(-1, VECTOR // size), wanted.reshape(-1, VECTOR // size)
    steps = vectors - vectors[:, :1] != size * np.arange(VECTOR // size, dtype=np.uint64)
    if (parts != parts[:, :1]).any() or ((vectors[:, :1] % VECTOR != 0) | steps)[parts[:, 0]].any():
        raise HopperError(f"{VECTOR} bytes that are not together, or not aligned, are copied to {to}")
    to.write(me, me.copies, me.start(me.copies), _values(at, wanted, pointer.dtype), me.known)


def arrive_when_copied(barrier: SharedView, increment_count: Any = True) -> None:
    """All threads arrive when the copies that they have started have completed."""
    me = barrier.of.program.now
    if increment_count:
        raise NotImplementedError("arrivals that were not counted before")
    barrier.barrier.arrive(THREADS, _only(me, me.copies))


def wait_for_copies(num_outstanding: Any = 0) -> None:
    if number(num_outstanding):
        raise NotImplementedError("groups of copies")
    _program().now.complete(_program().now.copies)


class Descriptor(NamedTuple):
    """A tensor in memory, of which boxes are copied."""

    base: Any
    sizes: list[int]
    strides: list[int]
    box: list[int]

    @property
    def dtype(self) -> Any:
        return self.base.dtype.element_ty


def make_tensor_descriptor(base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any) -> Descriptor:
    made = Descriptor(base, *([number(one) for one in numbers] for numbers in (shape, strides, block_shape)))
    size = made.dtype.primitive_bitwidth // 8
    steps = [stride * size for stride in made.strides[:-1]]
    if int(base.handle.data.item()) % VECTOR or any(step % VECTOR or not 0 <= step < LARGEST_STRIDE for step in steps):
        raise HopperError(f"a tensor that no box can be copied from: strides of {steps} bytes")
    if made.strides[-1] != 1 or made.box[-1] * size < VECTOR or max(made.box) > LARGEST_BOX:
        raise HopperError(f"a box of {made.box} elements, the last axis with stride {made.strides[-1]}")
    return made


def copy_box(tensor: Descriptor, coord: Any, barrier: SharedView, to: SharedView) -> None:
    """One thread starts a copy; zeros outside of the tensor. The barrier counts the bytes of the whole box."""
    me, size = to.of.program.now, tensor.dtype.primitive_bitwidth // 8
    if to.shape != tensor.box or to.dtype != tensor.dtype:
        raise HopperError(f"a box of {tensor.box} {tensor.dtype} is copied to {to.shape} {to.dtype} of {to}")
    offset, inside = np.zeros(tensor.box, np.int64), np.ones(tensor.box, bool)
    for axis, (first, length, stride) in enumerate(zip(coord, tensor.sizes, tensor.strides)):
        place = (number(first) + np.arange(tensor.box[axis])).reshape([-1 if i == axis else 1 for i in range(len(coord))])
        offset, inside = offset + place * stride, inside & (place >= 0) & (place < length)
    at = tensor.base.handle.data.astype(np.uint64) + (offset * size).astype(np.uint64)
    # What the thread itself has read and written must be ordered before for all threads of its partition.
    known = me.known.copy()
    known[me.number] = me.of_all_threads[me.number]
    to.write(me, me.boxes, me.start(me.boxes), _values(at, inside, tensor.base.dtype), known)
    barrier.barrier.copied(to.data.size * size, _only(me, me.boxes))


def _values(at: np.ndarray, wanted: np.ndarray, dtype: Any) -> np.ndarray:
    handle, builder = interpreter.TensorHandle, interpreter.interpreter_builder
    mask = handle(np.ascontiguousarray(wanted), tl.int1)
    return builder.create_masked_load(handle(np.ascontiguousarray(at), dtype), mask, None, None, None, False).data


def _only(me: Partition, clock: int) -> np.ndarray:
    """What operations leave at a barrier: that they have completed."""
    left = np.zeros(CLOCKS, np.int64)
    left[clock] = me.started[clock]
    return left


def _program() -> Any:
    from support.hopper import language

    return language.running()
