"""Which bytes a tensor touches: whether two of them share some, and whether one touches a byte twice.

Both are worked out once for tensors that lie alike: a cache is put together from its tensors in every call of an operator. Tensors
that a graph is made of have no addresses yet; of those nothing is said.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Place(NamedTuple):
    """How a tensor lies, but for where it begins."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    """Bytes of an element."""


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements may lie at one address. Views that leave room for each axis inside the next larger one do not."""
    return not _stands_for_another(t) and _overlaps(_place(t))


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may touch the same bytes, whoever owns them. Views that keep to different columns of the same rows are
    apart: the parts of a fused projection, or K and V of a joint page."""
    if _stands_for_another(a) or _stands_for_another(b) or a.device != b.device or a.device.type == "meta":
        return False
    return _share(_place(a), _place(b), b.data_ptr() - a.data_ptr())


def _stands_for_another(t: torch.Tensor) -> bool:
    return torch.compiler.is_dynamo_compiling() or (type(t) is not torch.Tensor and hasattr(t, "fake_mode"))


def _place(t: torch.Tensor) -> Place:
    return Place(t.shape, t.stride(), t.element_size())


@lru_cache(maxsize=4096)
def _overlaps(t: Place) -> bool:
    reach = 0
    for stride, size in sorted(zip(t.strides, t.shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


@lru_cache(maxsize=4096)
def _share(a: Place, b: Place, distance: int) -> bool:
    """`distance`: from the first byte of a to that of b."""
    if not all(a.shape) or not all(b.shape):
        return False
    return -_length(b) < distance < _length(a) and not _columns_apart(a, b, distance)


def _length(t: Place) -> int:
    """Bytes from its first element to the end of its last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.strides)) + 1) * t.size


def _columns_apart(a: Place, b: Place, distance: int) -> bool:
    """Whether memory can be seen as rows of one length such that the two keep to different columns of them."""
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
