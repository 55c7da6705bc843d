"""Asynchronous products of a partition's matrices. They read shared memory until the partition has waited for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from support.hopper.partitions import HopperError, Partition
from support.hopper.shared_memory import SharedView, tensor_of
from support.interpreter import numbers_of

ROWS = 64
"""Rows of a product: a multiple of what four warps compute."""
DEPTH = 16
"""Terms of a product of 16-bit factors: a multiple of those of one instruction."""


class Accumulator:
    """The sums of a product, which do not exist before it has been waited for."""

    def __init__(self, partition: Partition, data: np.ndarray):
        self.partition, self.data, self.time = partition, data, partition.start(partition.products)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)


def start_product(a: Any, b: SharedView, acc: Any, use_acc: Any = True, is_async: Any = False) -> Accumulator:
    """a b + acc, or a b. `a` is a tensor or in shared memory, `b` in shared memory."""
    if not is_async:
        raise NotImplementedError("products that are not asynchronous")
    me = b.of.program.now
    (rows, depth), (_, columns) = a.shape, b.shape
    if rows % ROWS or depth % DEPTH or columns % 8 or list(b.shape) != [depth, columns] or list(acc.shape) != [rows, columns]:
        raise HopperError(f"a product of {list(a.shape)} and {b.shape}, added to {list(acc.shape)}")
    if a.dtype != b.dtype or b.dtype not in (tl.float16, tl.bfloat16):
        raise HopperError(f"a product of {a.dtype} and {b.dtype}")
    before = acc.data if isinstance(acc, Accumulator) else acc.handle.data
    made = Accumulator(me, before)
    factors = []
    for operand in (a, b):
        if isinstance(operand, SharedView):
            operand.read(me, me.products, made.time)
            operand = tensor_of(operand.data.copy(), operand.dtype)
        factors.append(numbers_of(operand.handle).astype(np.float32))
    made.data = factors[0] @ factors[1] + (before if use_acc else np.float32(0))
    return made


def wait_for_products(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Waits until at most so many of the last products of this partition are under way. Returns the sums of `deps`."""
    me = deps[0].partition
    me.complete(me.products, num_outstanding)
    for one in deps:
        if one.partition is not me or one.time > me.known[me.products]:
            raise HopperError(f"{me.name} uses a product that it has not waited for")
    sums = tuple(tensor_of(one.data, tl.float32) for one in deps)
    return sums[0] if len(sums) == 1 else sums
