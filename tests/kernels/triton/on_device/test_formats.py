"""Every format, scale, layout, index type and pair of types; and the arithmetic of eight-bit formats, code by code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton.formats import decode, encode
from quire.kernels.triton.target import target_of
from support.launched import attend
from support.scenario import LARGEST, TYPES

LENS: dict[str, Any] = {"q_lens": [1, 20, 3], "kv_lens": [5, 40, 70], "padding": 1}
EIGHT_BITS = ["e4m3fn", "e4m3fnuz", "e5m2", "int8"]


@pytest.mark.parametrize("kernel, form, scales, q_dtype", [
    ("decode", "full", "tensor", "bf16"),
    ("mixed", "full", "head", "bf16"),
    ("mixed", "context", "head", "bf16"),
    ("decode", "full", "token", "fp16"),
    ("mixed", "context", "token", "fp32"),
])  # fmt: skip
@pytest.mark.parametrize("format", EIGHT_BITS)
def test_eight_bits(format: str, kernel: str, form: str, scales: str, q_dtype: str, device: str) -> None:
    attend(kernel, device, **LENS, format=format, form=form, scales=scales, q_dtype=q_dtype)


@pytest.mark.parametrize(
    "format, q_dtype", [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16")]
)
@pytest.mark.parametrize("kernel, form", [("decode", "full"), ("mixed", "context")])
def test_floats(format: str, q_dtype: str, kernel: str, form: str, device: str) -> None:
    attend(kernel, device, **LENS, format=format, form=form, q_dtype=q_dtype)


@pytest.mark.parametrize("storage", ["bytes", "padded"])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm_x", "vllm_joint", "aiter"])
def test_layouts(layout: str, storage: str, device: str) -> None:
    attend("mixed", device, **LENS, layout=layout, format="e4m3fn", storage=storage, q_dtype="bf16")


@pytest.mark.parametrize("layout", ["hnd", "vllm_x", "aiter"])
def test_layouts_with_token_scales(layout: str, device: str) -> None:
    attend("decode", device, **LENS, layout=layout, format="int8", scales="token", q_dtype="fp16", page_size=8)


@pytest.mark.parametrize("index", [(torch.int64, torch.int32, torch.int32), (torch.int32, torch.int64, torch.int64)], ids=str)
@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_index_types(index: Any, kernel: str, device: str) -> None:
    attend(kernel, device, **LENS, index=index, causal="mixed", window=30)


@triton.jit
def decode_kernel(out, codes, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, decode(tl.load(codes + at), FORMAT, HARDWARE))


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


@pytest.mark.parametrize("format, hardware", [*((f, False) for f in EIGHT_BITS), ("e4m3fn", True), ("e5m2", True)])
def test_numbers_are_encoded_to_the_nearest(format: str, hardware: bool, device: str) -> None:
    """Each number of the format, the middle between two neighbours, and what lies just beside both; and beyond the largest."""
    if hardware and not target_of(torch.device(device)).hardware_encodes:
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
