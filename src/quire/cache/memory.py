"""Memory overlap: whether two tensors share bytes, and whether two elements of one tensor do.

Results are cached by shape and strides, because the operators of a compiled graph build a cache from its tensors in every call.
Tensors that are traced have no addresses yet; they are reported as not overlapping.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class StridedShape(NamedTuple):
    """Shape and strides of a tensor, without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    """Bytes of an element."""


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements may have the same address. They do not, if the extent of each axis fits into the next larger stride."""
    return not _is_traced(t) and _overlaps(_strided(t))


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may use the same bytes. Views of different columns of the same rows do not: the parts of a fused
    projection, or K and V of a joint page."""
    if _is_traced(a) or _is_traced(b) or a.device != b.device or a.device.type == "meta":
        return False
    return _share(_strided(a), _strided(b), b.data_ptr() - a.data_ptr())


def _is_traced(t: torch.Tensor) -> bool:
    return torch.compiler.is_dynamo_compiling() or (type(t) is not torch.Tensor and hasattr(t, "fake_mode"))


def _strided(t: torch.Tensor) -> StridedShape:
    return StridedShape(t.shape, t.stride(), t.element_size())


@lru_cache(maxsize=4096)
def _overlaps(t: StridedShape) -> bool:
    reach = 0
    for stride, size in sorted(zip(t.strides, t.shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


@lru_cache(maxsize=4096)
def _share(a: StridedShape, b: StridedShape, distance: int) -> bool:
    """`distance`: from the first byte of a to that of b."""
    if not all(a.shape) or not all(b.shape):
        return False
    return -_length(b) < distance < _length(a) and not _columns_disjoint(a, b, distance)


def _length(t: StridedShape) -> int:
    """Bytes from its first element to the end of its last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.strides)) + 1) * t.size


def _columns_disjoint(a: StridedShape, b: StridedShape, distance: int) -> bool:
    """Whether memory can be divided into rows of one length such that the two tensors use different columns."""
    steps = [[(s * t.size, n) for s, n in zip(t.strides, t.shape) if n > 1] for t in (a, b)]
    for row in {step for step, _ in steps[0]} & {step for step, _ in steps[1]}:
        widths = []
        for t, axes in zip((a, b), steps):
            if row == 0 or any(step % row for step, _ in axes if step >= row):
                break
            widths.append(sum(step * (n - 1) for step, n in axes if step < row) + t.size)
        else:
            at = distance % row
            if widths[0] <= at and at + widths[1] <= row:
                return True
    return False
