"""Several tensors in one piece of memory: what crosses to another device or process then crosses in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 16
"""Every tensor starts at a multiple of so many bytes: kernels may load vectors of this size."""


class Span(NamedTuple):
    """Where a tensor lies in the memory."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `memory`, bytes."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return memory[self.start : self.start + size].view(self.dtype).view(self.shape)


def pack(tensors: Sequence[torch.Tensor], *, pin: bool = False) -> tuple[torch.Tensor, list[Span]]:
    """Copies tensors of one device into one piece of its memory, bytes `[n]`."""
    spans, end = [], 0
    for tensor in tensors:
        spans.append(Span(end, tensor.dtype, tuple(tensor.shape)))
        end += -(-tensor.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=tensors[0].device, pin_memory=pin)
    for span, tensor in zip(spans, tensors):
        span.of(memory).copy_(tensor)
    return memory, spans


def packed_copies(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of tensors of one device on another, or on the same, as views of one piece of memory. To a GPU there is one copy,
    which nobody waits for: it comes from pinned memory that torch keeps until the copy is done."""
    to_gpu = tensors[0].device.type == "cpu" and device.type == "cuda"
    memory, spans = pack(tensors, pin=to_gpu)
    memory = memory.to(device, non_blocking=to_gpu)
    return [span.of(memory) for span in spans]
