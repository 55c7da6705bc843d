"""The cache formats: how one element of a cache is stored. Everything that depends on the format reads this table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ArgumentError, describe


@dataclass(frozen=True)
class Format:
    """One cache format. Quantised formats store `x / scale`, saturating, and are read as `stored * scale`.

    >>> FORMATS["int8"].quantised, FORMATS["int8"].largest
    (True, 127.0)
    """

    name: str
    dtype: torch.dtype
    largest: float | None = None
    """The largest magnitude that a quantised format stores; None if the format is not quantised."""

    @property
    def quantised(self) -> bool:
        return self.largest is not None

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def integer(self) -> bool:
        """Whether elements are integers, so that a scale is required."""
        return not self.dtype.is_floating_point

    @property
    def fp8(self) -> bool:
        """Whether elements are 8-bit floats."""
        return self.itemsize == 1 and not self.integer

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Converts fp32 values, already divided by their scale, to this format. Values saturate, also if the cast does not."""
        if self.largest is None:
            return x.to(self.dtype)
        x = x.clamp(-self.largest, self.largest)
        if self.integer:
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

FLOAT_NAMES = tuple(f.name for f in FORMATS.values() if not f.quantised)
FP8_NAMES = tuple(f.name for f in FORMATS.values() if f.fp8)
QUANTISED_NAMES = tuple(f.name for f in FORMATS.values() if f.quantised)
FP8_TYPES = frozenset(f.dtype for f in FORMATS.values() if f.fp8)
QUERY_NAMES = (*FLOAT_NAMES, *FP8_NAMES)
"""The types that queries may have."""

OCP_FP8, FNUZ_FP8 = FORMATS["e4m3fn"], FORMATS["e4m3fnuz"]
"""The fp8 formats with 3 mantissa bits: of the Open Compute Project, and of AMD's gfx94 GPUs."""

_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}
_NAMES = {f.dtype: f.name for f in FORMATS.values()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type: its format's name if there is one (fp32, bf16, ...), else torch's."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def format_of(dtype: torch.dtype, name: str | None = None) -> Format:
    """The format of a storage type. For torch.uint8 the format must be named.

    Raises ArgumentError if there is no such format, or if it is not stored in this type."""
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
