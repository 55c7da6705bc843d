"""NVFP4 by its definition, with tables and loops of its own: codes of e2m1, scales of e4m3, and where a page has both."""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN = 0x7F


def _e4m3() -> torch.Tensor:
    """The numbers of e4m3 from 0 to 448 in the order of their codes."""
    return torch.tensor([m / 512 if e == 0 else (8 + m) / 8 * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]).double()


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The index of the nearest entry of an ascending table, of two at the same distance the even one."""
    above = torch.bucketize(x.contiguous(), table).clamp(1, len(table) - 1)
    low, high = x - table[above - 1], table[above] - x
    take_high = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(take_high, above, above - 1)


class Grouped(NamedTuple):
    """Stored elements."""

    codes: torch.Tensor
    """One in each entry, uint8 `[.., dim]`."""
    scales: torch.Tensor
    """Bytes of e4m3, uint8 `[.., dim / 16]`."""

    def double(self) -> torch.Tensor:
        """The numbers that they stand for, NaN where a scale is NaN."""
        size = torch.tensor(MAGNITUDES).double()[(self.codes % 8).long()]
        value = torch.where(self.codes >= 8, -size, size)
        table = torch.cat((_e4m3(), torch.tensor([float("nan")]).double()))
        return (value.unflatten(-1, (-1, GROUP)) * table[(self.scales % 128).long()].unsqueeze(-1)).flatten(-2)

    def bytes(self) -> torch.Tensor:
        """Codes, two in a byte, the even one below."""
        return self.codes[..., 0::2] + 16 * self.codes[..., 1::2]


def encoded(x: torch.Tensor) -> Grouped:
    """fp32 values, divided by the scale of the cache: the scale of 16 is their largest magnitude / 6, rounded to e4m3, at least its
    smallest number; a code is the nearest number of e2m1. The quotients are those of fp32."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    wanted = (largest / 6).nan_to_num(0.0, posinf=448.0).clamp(2.0**-9, 448.0)
    scales = nearest(wanted.double(), _e4m3())
    value = groups / _e4m3()[scales].float().unsqueeze(-1)
    codes = nearest(value.abs().nan_to_num(0.0).clamp(max=6.0).double(), torch.tensor(MAGNITUDES).double())
    codes = torch.where(largest.isnan().unsqueeze(-1), 0, codes + 8 * (torch.signbit(value) & ~value.isnan()))
    return Grouped(codes.flatten(-2).to(torch.uint8), torch.where(largest.isnan(), NAN, scales).to(torch.uint8))


def pages_of(stored: Grouped, layout: str, swizzled: bool) -> torch.Tensor:
    """Elements `[pages, page_size, heads, dim]` as pages of a layout: all codes of a page, then all of its scales."""
    codes, scales = stored.bytes(), stored.scales
    pages, size, heads, _ = codes.shape
    order = (0, 1, 2, 3) if layout == "nhd" else (0, 2, 1, 3)
    if swizzled:
        scales = swizzle(scales)
    rows = [part.permute(order).reshape(pages, -1) for part in (codes, scales)]
    middle = (size, heads) if layout == "nhd" else (heads, size)
    return torch.cat(rows, 1).view(pages, *middle, -1)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """vLLM's order of the scales of V, `[pages, page_size, heads, groups]`: four tokens and four quarters of the groups change
    places (csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, swizzle_scale_offset)."""
    out, quarter = torch.empty_like(scales), scales.shape[3] // 4
    for t in range(scales.shape[1]):
        for s in range(scales.shape[3]):
            out[:, t // 4 * 4 + s // quarter, :, s % quarter * 4 + t % 4] = scales[:, t, :, s]
    return out


def edge_rows(rows: int, heads: int, dim: int, seed: int = 11) -> torch.Tensor:
    """New tokens of ordinary size in groups of any size, and groups of what rounding can do wrong: ties, zeros, saturation, groups
    too small for a scale, NaN and infinity."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, dim, generator=g) * 4.0 ** torch.randint(-3, 3, (rows, heads, 1), generator=g)
    groups = x.unflatten(-1, (-1, GROUP))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    groups[0, 0, 0] = torch.cat((ties, -ties))
    groups[1, 0, 0], groups[1, 1, -1] = 0.0, -0.0
    groups[2, 0, 0] *= 1e5
    groups[3, 0, 0] = 1e-6 * torch.randn(GROUP, generator=g)
    groups[3, 1, 0, 5], groups[4, 1, -1, 0], groups[5, -1, 0, 3] = float("nan"), float("inf"), -float("inf")
    return x
