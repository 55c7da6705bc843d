"""The codec of the torch kernels: stored elements as fp32. The inverse is `Format.encode`."""

from __future__ import annotations

import torch

from quire.cache.format import FNUZ_FP8, OCP_FP8, Format, decode_groups


def decode(stored: torch.Tensor, format: Format, out: torch.Tensor, groups: torch.Tensor | None = None) -> None:
    """Writes stored elements, bytes of an 8-bit format, to `out` as fp32; the elements of one byte are adjacent. torch converts fp8
    with 3 mantissa bits one element at a time, so those are converted via fp16: sign and magnitude are shifted to their places in
    fp16, and the result is multiplied by a power of two. `groups` are the scales of groups, `[.., groups]`, if there are any."""
    if format.itemsize > 1:
        out.copy_(stored)
        return
    if groups is not None:
        out.copy_(decode_groups(stored.flatten(-2), groups, format.group).view(out.shape))
        return
    if not format.uniform:
        out.copy_(format.unpack(stored))
        return
    power = {OCP_FP8: 256.0, FNUZ_FP8: 128.0}.get(format)
    magnitude, nan = (0x7F, 0x7F) if format is OCP_FP8 else (0xFF, 0x80)
    if power is None or bool((stored & magnitude == nan).any()):
        out.copy_(stored.view(format.dtype))
        return
    bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(bits.view(torch.float16))
    out.mul_(power)
