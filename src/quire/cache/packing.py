"""Packs several tensors into one buffer, so that they are copied to another device or process in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 16
"""Alignment of each tensor in bytes: kernels may load vectors of this size."""


class PackedTensor(NamedTuple):
    """Offset, type and shape of one tensor in a packed buffer."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `memory`, a uint8 buffer."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return memory[self.start : self.start + size].view(self.dtype).view(self.shape)


def pack(tensors: Sequence[torch.Tensor], *, pin: bool = False) -> tuple[torch.Tensor, list[PackedTensor]]:
    """Copies tensors of one device into one uint8 buffer `[n]` on that device."""
    spans, end = [], 0
    for tensor in tensors:
        spans.append(PackedTensor(end, tensor.dtype, tuple(tensor.shape)))
        end += -(-tensor.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=tensors[0].device, pin_memory=pin)
    for span, tensor in zip(spans, tensors):
        span.of(memory).copy_(tensor)
    return memory, spans


def packed_copies(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies tensors of one device to `device` and returns them as views of one buffer. To a GPU this is one asynchronous copy from
    pinned memory, which torch keeps alive until the copy is done."""
    to_gpu = tensors[0].device.type == "cpu" and device.type == "cuda"
    memory, spans = pack(tensors, pin=to_gpu)
    memory = memory.to(device, non_blocking=to_gpu)
    return [span.of(memory) for span in spans]
