"""Zero points: the code that stands for 0, from 0 to 15, in the low four bits of an fp32 scale. vLLM stores them so. Whatever
copies a scale copies its zero point. An element is `(code - zero point) * scale`.

The range of codes always includes 0: then the zero point is a code, and a row of equal numbers has a scale above 0."""

from __future__ import annotations

import torch

ZERO_BITS = 0xF
LARGEST_CODE = 15


def scale_and_zero(x: torch.Tensor) -> torch.Tensor:
    """The scales of rows `[.., dim]`, fp32 `[..]`, with zero points. Codes 0 to 15 reach from the smallest element, or 0, to the
    largest, or 0. The scale is 1 for zeros, and not finite if the row has such an element."""
    x = x.float()
    # The ends are divided before they are subtracted: their difference may be too large for fp32.
    low, high = (end / LARGEST_CODE for end in (x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)))
    bits = (high - low).view(torch.int32) & ~ZERO_BITS
    factor = torch.where(bits == 0, 1.0, bits.view(torch.float32))
    zero = (-x.amin(-1).clamp(max=0.0) / factor).round().nan_to_num(0.0).clamp(0, LARGEST_CODE)
    return (factor.view(torch.int32) | zero.to(torch.int32)).view(torch.float32)


def parts_of_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales without zero points, and the zero points, both fp32."""
    bits = scale.view(torch.int32)
    return (bits & ~ZERO_BITS).view(torch.float32), (bits & ZERO_BITS).float()
