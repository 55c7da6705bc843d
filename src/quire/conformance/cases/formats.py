"""Formats by the kit's own tables and formulas, so that an error in the library's table is detected."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
    "int4_zp": torch.uint8,
    "nvfp4": torch.uint8,
    "nvfp4_swizzled": torch.uint8,
    "fp8_ds_mla": torch.uint8,
}
LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0, "int4_zp": 15.0}
LARGEST |= {"nvfp4": 448.0 * 6, "nvfp4_swizzled": 448.0 * 6}
PACK = {"int4": 2, "int4_zp": 2, "nvfp4": 2, "nvfp4_swizzled": 2}
"""Elements in a byte, the first in the lowest bits; 1 in other formats."""
GROUP = {"nvfp4": 16, "nvfp4_swizzled": 16}
"""Elements that share a scale in the page."""
ZERO_POINTS = "int4_zp"
"""Codes 0 to 15; the code of 0 is in the last four bits of the scale of a token and head."""
FP8 = ("e4m3fn", "e4m3fnuz", "e5m2")
WITH_INFINITY = ("e5m2",)
"""Formats of one byte in which a number that is too large becomes infinite; in other floating-point formats it becomes NaN."""
INTEGERS = ("int8", "int4")
SCALE_FORMAT = "e4m3fn"
"""The format of the scales of groups."""
DS_MLA = "fp8_ds_mla"
"""vLLM's and FlashMLA's: 512 bytes of e4m3, 4 scales of 128 of them in fp32, and the elements from 512 on in bf16."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of codes 0 to 7; 8 more is the negative number."""
SMALLEST, LARGEST_SCALE = 2.0**-9, 448.0
NAN = 0x7F


def units_of(format: str, dim: int) -> int:
    """The elements of storage of a head: codes, and scales of groups."""
    if format == DS_MLA:
        return 528 + 2 * (dim - 512)
    return dim // PACK.get(format, 1) + (dim // GROUP[format] if format in GROUP else 0)


def encode_groups(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 numbers as codes, one in each entry, and bytes of e4m3. The scale of a group maps its largest magnitude to 6."""
    groups = x.clamp(-largest, largest).unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6).clamp(SMALLEST, LARGEST_SCALE).to(torch.float8_e4m3fn)
    value = (groups / scale.float().unsqueeze(-1)).nan_to_num(0.0)
    # Halfway between two numbers the one with the even code is taken: the boundary belongs to it.
    middles = [(a + b) / 2 for a, b in pairwise(E2M1)]
    codes = sum((value.abs() > m if i % 2 == 0 else value.abs() >= m).to(torch.uint8) for i, m in enumerate(middles))
    assert isinstance(codes, torch.Tensor)
    return (codes + 8 * (value < 0)).flatten(-2).to(torch.uint8), scale.view(torch.uint8)


def numbers_of_groups(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers that codes stand for, fp64."""
    return numbers_of_codes(codes) * numbers_of_scales(scales).repeat_interleave(16, -1)


def numbers_of_codes(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor((*E2M1, *(-x for x in E2M1)), dtype=torch.float64)[codes.long()]


def numbers_of_scales(scales: torch.Tensor) -> torch.Tensor:
    return scales.contiguous().view(torch.float8_e4m3fn).double()


def zero_point(scale: torch.Tensor) -> torch.Tensor:
    """The code of 0."""
    return scale.view(torch.int32) % 16


def without_zero_point(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(torch.int32) // 16 * 16).view(torch.float32)


def scale_with_zero_point(rows: torch.Tensor) -> torch.Tensor:
    """The scales of rows `[.., dim]` by which codes cover their numbers and 0."""
    low, high = rows.float().amin(-1).clamp(max=0), rows.float().amax(-1).clamp(min=0)
    scale = without_zero_point((high - low) / 15)
    scale = torch.where(scale == 0, 1.0, scale)
    return (scale.view(torch.int32) + (-low / scale).round().clamp(max=15).int()).view(torch.float32)


def encode_with_zero_point(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of rows with the scales of their tokens `[.., 1]`, one in each entry; NaN is code 13."""
    codes = (x.float() / without_zero_point(scale)).round() + zero_point(scale)
    return torch.where(codes.isnan(), 13.0, codes.clamp(0, 15)).to(torch.uint8)


def encode_latent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers as bytes, and the numbers that they stand for, fp64. The scale of 128 elements maps their largest magnitude to 448;
    it is at least the smallest normal number."""
    groups = x[..., :512].float().unflatten(-1, (4, 128))
    scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    rest = x[..., 512:].float().to(torch.bfloat16)
    parts = [codes.flatten(-2), scale.squeeze(-1), rest]
    numbers = torch.cat(((codes.double() * scale.double()).flatten(-2), rest.double()), -1)
    return torch.cat([part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in parts], -1), numbers


def latent_byte(dim: torch.Tensor) -> torch.Tensor:
    """Where an element begins in its head."""
    return torch.where(dim < 512, dim, 528 + 2 * (dim - 512))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The last axis times the Hadamard matrix H[i, j] = (-1)^popcount(i & j) / sqrt(n), in the dtype of x."""
    return x @ hadamard_matrix(x.shape[-1]).to(x.dtype)


@lru_cache
def hadamard_matrix(n: int) -> torch.Tensor:
    """The matrix, fp64 [n, n]; n is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * n**-0.5


def in_sequency_order(x: torch.Tensor) -> torch.Tensor:
    """`hadamard`, by the matrix whose rows are ordered by how often their sign changes. Only faults use it."""
    matrix = hadamard_matrix(x.shape[-1])
    changes = (matrix.sign().diff(dim=-1) != 0).sum(-1)
    return x @ matrix[changes.argsort()].to(x.dtype)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the even one below."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def grouped_at(
    layout: str, format: str, size: int, heads: int, dim: int, s: torch.Tensor, h: torch.Tensor, unit: torch.Tensor
) -> torch.Tensor:
    """Where byte `unit` of slot s and head h is in its page, nhd or hnd: first the dim / 2 bytes of codes of all slots and heads,
    then the dim / 16 scales of all. Swizzled, of four slots and four parts of the scales, slot and part change places."""
    codes, groups = dim // 2, dim // 16
    group = (unit - codes).clamp(min=0)
    slot = s
    if format == "nvfp4_swizzled":
        slot, group = s // 4 * 4 + group // (groups // 4), group % (groups // 4) * 4 + s % 4
    row, row_of_scale = (s * heads + h, slot * heads + h) if layout == "nhd" else (h * size + s, h * size + slot)
    return torch.where(unit < codes, row * codes + unit, size * heads * codes + row_of_scale * groups + group)
