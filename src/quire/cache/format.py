"""How one element of a cache is stored: a name, a storage type and, if quantised, the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ArgumentError, describe


@dataclass(frozen=True)
class Format:
    """One cache format. Quantised formats store `x / scale`, saturating, and are read as `stored * scale`."""

    name: str
    dtype: torch.dtype
    largest: float | None = None

    @property
    def quantised(self) -> bool:
        return self.largest is not None

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 values, already divided by their scale, in this format. Casts saturate here, whatever torch's cast does."""
        if self.largest is None:
            return x.to(self.dtype)
        x = x.clamp(-self.largest, self.largest)
        if self.dtype is torch.int8:
            x = x.round().nan_to_num(0.0)
        return x.to(self.dtype)

    def __str__(self) -> str:
        return self.name


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", torch.float32),
        Format("fp16", torch.float16),
        Format("bf16", torch.bfloat16),
        Format("e4m3fn", torch.float8_e4m3fn, 448.0),
        Format("e4m3fnuz", torch.float8_e4m3fnuz, 240.0),
        Format("e5m2", torch.float8_e5m2, 57344.0),
        Format("int8", torch.int8, 127.0),
    )
}

_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}


def format_of(dtype: torch.dtype, name: str | None = None) -> Format:
    """The format of a storage type. Bytes (uint8) have none of their own: their format must be named."""
    names = ", ".join(FORMATS)
    if name is None:
        if dtype is torch.uint8:
            eight_bit = ", ".join(f.name for f in FORMATS.values() if f.itemsize == 1)
            raise ArgumentError("format", "uint8 storage without a format", f"format= one of {eight_bit}")
        if not isinstance(dtype, torch.dtype) or dtype not in _BY_DTYPE:
            raise ArgumentError("dtype", describe(dtype), f"a storage type of {names}")
        return _BY_DTYPE[dtype]
    if not isinstance(name, str) or name not in FORMATS:
        raise ArgumentError("format", describe(name), names)
    found = FORMATS[name]
    if dtype not in (found.dtype, torch.uint8) or (dtype is torch.uint8 and found.itemsize != 1):
        bytes_too = " or torch.uint8" if found.itemsize == 1 else ""
        raise ArgumentError("format", f"{name!r} over {dtype} storage", f"{found.dtype}{bytes_too} storage")
    return found
