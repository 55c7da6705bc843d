"""Which bytes a tensor touches: whether two of them share some, and whether one touches a byte twice."""

from __future__ import annotations

import torch


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements may lie at one address. Views that leave room for each axis inside the next larger one do not."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may touch the same bytes, whoever owns them. Views that keep to different columns of the same rows are
    apart: the parts of a fused projection, or K and V of a joint page."""
    if _has_no_address(a) or _has_no_address(b) or not a.numel() or not b.numel() or a.device != b.device:
        return False
    (first, last), (start, stop) = _span(a), _span(b)
    return first < stop and start < last and not _columns_apart(a, b)


def _has_no_address(t: torch.Tensor) -> bool:
    """Whether it only stands for a tensor: a graph is being made, and where its tensors will lie nobody knows."""
    return t.device.type == "meta" or torch.compiler.is_dynamo_compiling() or hasattr(t, "fake_mode")


def _span(t: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first element to the end of its last."""
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()


def _columns_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether memory can be seen as rows of one length such that the two keep to different columns of them."""
    steps = [[(s * t.element_size(), n) for s, n in zip(t.stride(), t.shape) if n > 1] for t in (a, b)]
    for row in {step for step, _ in steps[0]} & {step for step, _ in steps[1]}:
        widths = []
        for t, axes in zip((a, b), steps):
            if row == 0 or any(step % row for step, _ in axes if step >= row):
                break
            widths.append(sum(step * (n - 1) for step, n in axes if step < row) + t.element_size())
        else:
            at = (b.data_ptr() - a.data_ptr()) % row
            if widths[0] <= at and at + widths[1] <= row:
                return True
    return False
