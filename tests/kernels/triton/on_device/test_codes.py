"""The arithmetic of eight-bit formats, code by code. `make gpu-test` asks the card for it, too: instructions are its own there."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton.device.formats import decode, encode, whole_of
from support.launched import platform_at
from support.scenario import LARGEST, TYPES

EIGHT_BITS = ["e4m3fn", "e4m3fnuz", "e5m2", "int8"]


@triton.jit
def decode_kernel(out, codes, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, decode(tl.load(codes + at), FORMAT, HARDWARE, "fp16"))


@triton.jit
def encode_kernel(out, numbers, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, encode(tl.load(numbers + at), FORMAT, HARDWARE))


def hardware_can(device: str) -> bool:
    return device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("format, hardware", [*((f, False) for f in EIGHT_BITS), ("e4m3fn", True)])
def test_every_code_is_decoded(format: str, hardware: bool, device: str) -> None:
    if hardware and not hardware_can(device):
        pytest.skip("this card does not convert e4m3fn")
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.zeros(256, dtype=torch.float16, device=device)
    decode_kernel[(1,)](out, codes, format, hardware)
    expected = codes.cpu().view(TYPES[format]).float()
    assert torch.allclose(out.cpu().float(), expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def decode_units_kernel(
    out, units, zero, COUNT: tl.constexpr, PACK: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr, NVIDIA: tl.constexpr
):  # fmt: skip
    parts = decode(tl.load(units + tl.arange(0, COUNT)), FORMAT, False, DOT, None, zero, NVIDIA)
    tl.store(out + tl.arange(0, PACK * COUNT), whole_of(parts, PACK))


@pytest.mark.parametrize("dot", ["fp16", "bf16"])
@pytest.mark.parametrize("unit", [torch.uint8, torch.uint16, torch.uint32], ids=str)
def test_all_codes_of_every_unit_are_decoded(unit: torch.dtype, dot: str, device: str) -> None:
    first = torch.arange(256, dtype=torch.uint8)
    codes = torch.cat((first, first * 7 + 3, first.flip(0), first * 13))
    out = torch.zeros(2 * len(codes), dtype=TYPES[dot], device=device)
    units, sizes = codes.view(unit).to(device), (len(codes) // unit.itemsize, 2 * unit.itemsize)
    nvidia = device != "cpu" and torch.version.hip is None
    decode_units_kernel[(1,)](out, units, None, *sizes, "int4", dot, nvidia)
    both = torch.stack((codes % 16, codes // 16), 1).flatten().float()
    assert torch.equal(out.cpu().float(), torch.where(both < 8, both, both - 16))
    for zero in (0, 6, 15):
        decode_units_kernel[(1,)](out, units, zero, *sizes, "int4_zp", dot, nvidia)
        assert torch.equal(out.cpu().float(), both - zero)


@pytest.mark.parametrize("format, hardware", [*((f, False) for f in EIGHT_BITS), ("e4m3fn", True), ("e5m2", True)])
def test_numbers_are_encoded_to_the_nearest(format: str, hardware: bool, device: str) -> None:
    """Each number of the format, the middle between two neighbours, and what lies just beside both; and beyond the largest."""
    if hardware and not platform_at(device).encodes_fp8:
        pytest.skip("only a card has that instruction")
    count = 4096
    exact = torch.arange(256, dtype=torch.uint8).view(TYPES[format]).double()
    exact = exact[exact.isfinite() & (exact.abs() <= LARGEST[format])].unique()
    middle = (exact[1:] + exact[:-1]) / 2
    numbers = torch.cat((exact, middle)).float()
    numbers = torch.cat((numbers, *(torch.nextafter(numbers, torch.tensor(end)) for end in (torch.inf, -torch.inf))))
    extremes = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 0.0, -0.0, 1e-30, -1e-30, torch.nan])
    numbers = torch.cat((numbers, extremes))
    numbers = torch.cat((numbers, torch.zeros(count - len(numbers)))).to(device)
    out = torch.zeros(count, dtype=torch.uint8, device=device)
    encode_kernel[(1,)](out, numbers, format, hardware, count)
    clamped = numbers.cpu().clamp(-LARGEST[format], LARGEST[format])
    if format == "int8":
        expected = clamped.nan_to_num(0.0).round().to(torch.int8).view(torch.uint8)
    else:
        expected = clamped.to(TYPES[format]).view(torch.uint8)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("format", ["fp32", "float"])
def test_floats_stay(format: str, device: str) -> None:
    numbers = torch.randn(256, device=device)
    out = torch.zeros(256, device=device)
    encode_kernel[(1,)](out, numbers, format, False, 256)
    assert torch.equal(out, numbers)
