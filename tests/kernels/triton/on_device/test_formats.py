"""Every format, scale, layout, index type and pair of types."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.launched import attend

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


@pytest.mark.parametrize("formats, kernel, form, scales, q_dtype, layout, dims", [
    (("int4", "int4"), "decode", "full", "token", "bf16", "nhd", (16, 16)),
    (("int4", "int4"), "mixed", "context", "token", "fp32", "vllm_joint", (24, 40)),
    (("int4", "int4"), "mixed", "full", "head", "fp16", "vllm_x", (40, 16)),
    (("int8", "int4"), "decode", "full", "token", "fp16", "aiter", (16, 24)),
    (("int4", "bf16"), "mixed", "context", "tensor", "bf16", "hnd", (16, 16)),
    (("bf16", "int4"), "decode", "full", "token", "bf16", "nhd", (16, 16)),
    (("int4_zp", "int4_zp"), "decode", "full", "token", "bf16", "nhd", (16, 16)),
    (("int4_zp", "int4_zp"), "mixed", "context", "token", "fp32", "vllm_joint", (24, 40)),
    (("int4_zp", "int8"), "mixed", "full", "token", "fp16", "vllm_x", (40, 16)),
    (("int4", "int4_zp"), "decode", "full", "token", "fp16", "aiter", (16, 24)),
    (("bf16", "e4m3fn"), "mixed", "full", "head", "bf16", "nhd", (16, 16)),
    (("nvfp4", "nvfp4"), "decode", "full", "tensor", "bf16", "nhd", (64, 48)),
    (("nvfp4", "nvfp4"), "mixed", "full", "head", "bf16", "hnd", (48, 32)),
    (("nvfp4", "nvfp4_swizzled"), "mixed", "context", "tensor", "bf16", "hnd", (32, 64)),
    (("nvfp4_swizzled", "nvfp4"), "decode", "full", "token", "bf16", "nhd", (64, 16)),
    (("int8", "nvfp4"), "mixed", "context", "token", "fp32", "nhd", (24, 16)),
    (("bf16", "nvfp4"), "decode", "full", "tensor", "fp16", "hnd", (16, 48)),
    (("int4", "int4"), "decode", "full", "token", "bf16", "nhd", (128, 96)),
    (("int4", "int4"), "decode", "full", "token", "fp16", "nhd", (64, 128)),
    (("int4", "nvfp4"), "mixed", "context", "head", "bf16", "hnd", (64, 128)),
    (("nvfp4", "int4"), "decode", "full", "token", "bf16", "nhd", (112, 64)),
])  # fmt: skip
def test_formats_of_keys_and_values(
    formats: tuple[str, str],
    kernel: str,
    form: str,
    scales: str,
    q_dtype: str,
    layout: str,
    dims: tuple[int, int],
    device: str,
) -> None:
    stored = {"format": formats[0], "v_format": formats[1], "head_dim": dims[0], "v_head_dim": dims[1], "layout": layout}
    attend(kernel, device, **LENS, **stored, form=form, scales=scales, q_dtype=q_dtype)


def test_codes_that_are_not_in_words(device: str) -> None:
    """Pages of 9 bytes do not begin at multiples of four."""
    attend("mixed", device, **LENS, format="nvfp4", head_dim=16, kv_heads=1, page_size=1, q_dtype="bf16")


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
