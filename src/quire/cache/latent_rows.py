"""The rows of `fp8_ds_mla`: how vLLM and FlashMLA store a latent and the rotated part of a key in one head of 656 bytes.

    bytes 0 to 511     512 elements of the latent, fp8 with 3 mantissa bits
    bytes 512 to 527   4 scales, fp32, each of 128 elements
    bytes 528 to 655   64 rotated elements, bf16

A row without its rotated part, 528 bytes, is the value of the token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.errors import ArgumentError, describe

if TYPE_CHECKING:
    from quire.cache.format import Format

GROUP = 128
"""Elements of the latent that share a scale."""
ROTATED = 64
"""Elements of the rotated part."""
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
WORD = 4
"""Rows begin at multiples of this number of bytes: scales are read as fp32."""


def scale_bytes(latent: int) -> int:
    """The bytes of the scales of so many elements."""
    return latent // GROUP * 4


def rotated_view(k_view: torch.Tensor, format: Format) -> torch.Tensor:
    """The rotated parts of rows `[pages, kv_heads, slot/, slot%, dim/, bytes]`, a view in bf16."""
    rotated = k_view[:, :, 0, :, 0, format.units_of(format.latent) :].view(torch.bfloat16)
    return rotated[:, :, None, :, None]


def check_latent_sizes(format: Format, head_dim: int, v_in_k: int | None) -> None:
    """Raises ArgumentError unless a format of latents is that of such a cache."""
    if not format.latent:
        return
    if v_in_k != format.latent:
        raise ArgumentError("v_in_k", v_in_k, f"{format.latent} with {format}: V is the latent")
    if head_dim != format.latent + ROTATED:
        raise ArgumentError("head_dim", head_dim, f"{format.latent + ROTATED} with {format}")


def check_latent_pages(k_pages: torch.Tensor, formats: tuple[Format, Format], v_in_k: int | None) -> None:
    """Raises ArgumentError unless pages can have the rows of a format of latents, if one is given."""
    format = next((format for format in formats if format.latent), None)
    if format is None:
        return
    row = format.units_of(format.latent + ROTATED)
    if k_pages.shape[-1:] != (row,):
        raise ArgumentError("k_pages", describe(k_pages), f"a last axis of {row}, the bytes of a head in {format}")
    check_latent_sizes(format, format.latent + ROTATED, v_in_k)
    places = (k_pages.storage_offset(), *k_pages.stride()[:-1])
    if k_pages.stride(-1) != 1 or any(place % WORD for place in places):
        given = f"strides {k_pages.stride()} from byte {places[0]}"
        raise ArgumentError("k_pages", given, f"contiguous rows of {format}, at multiples of {WORD} bytes")
