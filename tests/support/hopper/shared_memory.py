"""Shared memory: what is in it, and when each element was last written and read, by which partition or asynchronous operation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from support.hopper.barriers import Barrier
from support.hopper.partitions import FENCES, MOST_PARTITIONS, READERS, HopperError, Partition, Program

NOT_WRITTEN = np.iinfo(np.int64).max


@dataclasses.dataclass
class Allocation:
    """What the views of one allocation have in common."""

    program: Program
    name: str
    begin: int
    barriers: dict[int, Barrier]
    """By address."""


class SharedView:
    """A part of an allocation, as `shared_memory_descriptor`."""

    def __init__(self, of: Allocation, dtype: Any, arrays: tuple[np.ndarray, ...]):
        self.of, self.dtype, self.arrays = of, dtype, arrays
        self.data, self.writer, self.written, self.read_at = arrays
        """What it holds; the clock and the time of the last write; the time of the last read by each clock of READERS."""

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def __str__(self) -> str:
        first = int(self.data.__array_interface__["data"][0]) - self.of.begin
        return f"{self.of.name} from byte {first} on"

    # Views

    def index(self, index: Any) -> SharedView:
        at = number(index)
        if not 0 <= at < self.data.shape[0]:
            raise HopperError(f"slot {at} of {self.data.shape[0]} of {self}")
        return self._view(lambda array: array[at])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> SharedView:
        begin, count, axis = number(start), number(length), number(dim)
        if begin < 0 or begin + count > self.data.shape[axis]:
            raise HopperError(f"elements [{begin}, {begin + count}) of {self.shape}, axis {axis}, of {self}")
        return self._view(lambda array: array[(slice(None),) * axis + (slice(begin, begin + count),)])

    def permute(self, order: Any) -> SharedView:
        axes = [number(axis) for axis in order]
        return self._view(lambda array: array.transpose(*axes, *range(len(axes), array.ndim)))

    def reshape(self, shape: Any) -> SharedView:
        sizes = [number(size) for size in shape]

        def reshaped(array: np.ndarray) -> np.ndarray:
            result = array.reshape(*sizes, *array.shape[self.data.ndim :])
            assert np.shares_memory(result, array), "a view that is no view"
            return result

        return self._view(reshaped)

    def _view(self, change: Any) -> SharedView:
        return SharedView(self.of, self.dtype, tuple(change(array) for array in self.arrays))

    # Accesses

    def load(self, layout: Any = None) -> Any:
        """Loads by all threads of the partition that runs."""
        me = self.of.program.now
        self.read(me, me.number, int(me.known[me.number]))
        return tensor_of(self.data.copy(), self.dtype)

    def store(self, value: Any) -> None:
        if value.dtype != self.dtype or list(value.shape) != self.shape:
            raise HopperError(f"a {value.dtype} {list(value.shape)} is stored to {self.dtype} {self.shape} of {self}")
        me = self.of.program.now
        self.write(me, me.number, int(me.known[me.number]), value.handle.data, me.known)

    def read(self, me: Partition, clock: int, time: int) -> None:
        """A read by a partition, or by its products."""
        if (self.written > me.known[self.writer]).any():
            self._fail(me, "reads", self.written > me.known[self.writer])
        stored = self.writer < MOST_PARTITIONS
        if clock != me.number and (self.written > me.known[self.writer % MOST_PARTITIONS + FENCES])[stored].any():
            raise HopperError(f"products of {me.name} read {self}, which was stored without a fence after it")
        self.read_at[..., clock] = time

    def write(self, me: Partition, clock: int, time: int, values: np.ndarray, known: np.ndarray) -> None:
        """A write that begins when so much is known."""
        written = (self.written != NOT_WRITTEN) & (self.written > known[self.writer])
        if written.any():
            self._fail(me, "overwrites", written)
        if (self.read_at > known[:READERS]).any():
            reader = int((self.read_at > known[:READERS]).reshape(-1, READERS).any(0).argmax())
            raise HopperError(f"{me.name} overwrites {self} while {self.of.program.name_of(reader)} may still read it")
        self.data[...] = values
        self.writer[...], self.written[...] = clock, time

    def _fail(self, me: Partition, does: str, where: np.ndarray) -> None:
        if (self.written[where] == NOT_WRITTEN).any():
            raise HopperError(f"{me.name} {does} {self}, which was never written")
        raise HopperError(f"{me.name} {does} {self} while {self.of.program.name_of(int(self.writer[where][0]))} may still write it")

    # Barriers

    @property
    def barrier(self) -> Barrier:
        found = self.of.barriers.get(self.data.__array_interface__["data"][0])
        if found is None:
            raise HopperError(f"{self} is no barrier: it was not initialised")
        return found

    def make_barrier(self, count: int) -> None:
        made = self.of.barriers[self.data.__array_interface__["data"][0]] = Barrier(self, count)
        self.of.program.barriers.append(made)


def allocate(program: Program, dtype: Any, shape: list[int], name: str) -> SharedView:
    """Memory that holds nothing yet."""
    data = np.zeros(shape, interpreter._get_np_dtype(dtype))
    arrays = (
        data,
        np.zeros(shape, np.int8),
        np.full(shape, NOT_WRITTEN, np.int64),
        np.zeros((*shape, READERS), np.int64),
    )
    return SharedView(Allocation(program, name, data.__array_interface__["data"][0], {}), dtype, arrays)


def tensor_of(data: np.ndarray, dtype: Any) -> Any:
    """An array as a tensor of the interpreter."""
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def name_views(value: Any, name: str = "") -> None:
    """Names allocations by the members of the records that have them."""
    if isinstance(value, SharedView):
        value.of.name = name
    elif isinstance(value, tuple):
        for member, one in zip(getattr(value, "_fields", [""] * len(value)), value):
            name_views(one, ".".join(filter(None, (name, member))))


def number(value: Any) -> int:
    value = getattr(value, "value", value)
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)
