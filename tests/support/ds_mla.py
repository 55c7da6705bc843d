"""vLLM's `fp8_ds_mla` by its definition, element by element (csrc/cache_kernels.cu, concat_and_cache_ds_mla_kernel, and FlashMLA's
README): 512 elements in e4m3, four scales in fp32, 64 elements in bf16."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from support.nvfp4 import _e4m3, nearest

NAME = "fp8_ds_mla"
LATENT, GROUP, ROTATED, BYTES = 512, 128, 64, 656
SMALLEST = 2.0**-126
NAN = 0x7F


class Stored(NamedTuple):
    """Stored heads."""

    codes: torch.Tensor
    """uint8 `[.., 512]`."""
    scales: torch.Tensor
    """fp32 `[.., 4]`."""
    rotated: torch.Tensor
    """bf16 `[.., 64]`."""

    def double(self) -> torch.Tensor:
        """The numbers that they stand for, `[.., 576]`."""
        table = torch.cat((_e4m3(), torch.tensor([float("nan")]).double()))
        size = table[(self.codes % 128).long()]
        number = torch.where(self.codes >= 128, -size, size).unflatten(-1, (-1, GROUP))
        return torch.cat(((number * self.scales.double().unsqueeze(-1)).flatten(-2), self.rotated.double()), -1)

    def bytes(self) -> torch.Tensor:
        """uint8 `[.., 656]`, packed by Python's struct."""
        rows = zip(*(part.flatten(0, -2).tolist() for part in (self.codes, self.scales, self.rotated.view(torch.uint16).int())))
        packed = b"".join(struct.pack("<512B4f64H", *codes, *scales, *rotated) for codes, scales, rotated in rows)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(*self.codes.shape[:-1], BYTES)


def encoded(x: torch.Tensor) -> Stored:
    """Numbers `[.., 576]`: the scale of 128 is their largest magnitude / 448, in fp32, at least the smallest normal number; a code
    is the nearest number of e4m3, of two at the same distance the even one. The quotients are those of fp32."""
    groups = x[..., :LATENT].float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    scales = torch.where(largest.isnan(), torch.nan, torch.maximum(largest / 448, torch.tensor(SMALLEST)))
    value = groups / scales.unsqueeze(-1)
    codes = nearest(value.abs().nan_to_num(0.0).clamp(max=448.0).double(), _e4m3()) + 128 * torch.signbit(value)
    codes = torch.where(value.isnan(), NAN, codes)
    return Stored(codes.flatten(-2).to(torch.uint8), scales, x[..., LATENT:].float().to(torch.bfloat16))


def decoded(rows: torch.Tensor) -> torch.Tensor:
    """Heads of 656 bytes, or of 528 without the rotated part, as numbers."""
    flat = rows.reshape(-1, rows.shape[-1])
    more = f"{(rows.shape[-1] - 528) // 2}H"
    found = [struct.unpack(f"<512B4f{more}", bytes(row.tolist())) for row in flat]
    table = torch.cat((_e4m3(), torch.tensor([float("nan")]).double()))
    codes = torch.tensor([row[:LATENT] for row in found])
    scales = torch.tensor([row[LATENT : LATENT + 4] for row in found], dtype=torch.float64)
    rotated = (torch.tensor([row[LATENT + 4 :] for row in found], dtype=torch.int32) << 16).view(torch.float32).double()
    number = torch.where(codes >= 128, -table[codes % 128], table[codes % 128]) * scales.repeat_interleave(GROUP, -1)
    return torch.cat((number, rotated), -1).view(*rows.shape[:-1], -1)
