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
    pack: int = 1
    """Elements in one element of storage. Of two in a byte, the even one has the low four bits."""

    @property
    def quantised(self) -> bool:
        return self.largest is not None

    @property
    def itemsize(self) -> int:
        """Bytes of an element of storage."""
        return self.dtype.itemsize

    def bytes_of(self, elements: int) -> int:
        """The bytes of a number of elements."""
        return elements // self.pack * self.itemsize

    @property
    def integer(self) -> bool:
        """Whether elements are integers, so that a scale is required."""
        return not self.dtype.is_floating_point

    @property
    def fp8(self) -> bool:
        """Whether elements are 8-bit floats."""
        return self.itemsize == 1 and not self.integer

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Converts fp32 values, already divided by their scale, to this format. Values saturate, also if the cast does not. If the
        format packs elements, the last axis of the result is shorter."""
        if self.largest is None:
            return x.to(self.dtype)
        x = x.clamp(-self.largest, self.largest)
        if self.integer:
            x = x.round().nan_to_num(0.0)
        if self.pack > 1:
            codes = x.to(torch.int8).bitwise_and(0xF).view(torch.uint8)
            return codes[..., ::2] | codes[..., 1::2] << 4
        return x.to(self.dtype)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """The elements of storage, bytes as uint8, of a format that packs two in each: int8, the last axis twice as long."""
        # The low four bits are shifted up first: shifting down extends the sign.
        low = stored.bitwise_left_shift(4).view(torch.int8).bitwise_right_shift(4)
        return torch.stack((low, stored.view(torch.int8).bitwise_right_shift(4)), -1).flatten(-2)

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
        Format("int4", torch.uint8, 7.0, pack=2),
    )
}

FLOAT_NAMES = tuple(f.name for f in FORMATS.values() if not f.quantised)
FP8_NAMES = tuple(f.name for f in FORMATS.values() if f.fp8)
QUANTISED_NAMES = tuple(f.name for f in FORMATS.values() if f.quantised)
FP8_TYPES = frozenset(f.dtype for f in FORMATS.values() if f.fp8)
BYTE_NAMES = tuple(f.name for f in FORMATS.values() if f.quantised and f.pack == 1)
"""The formats with one element in a byte."""
QUERY_NAMES = (*FLOAT_NAMES, *FP8_NAMES)
"""The types that queries may have."""

OCP_FP8, FNUZ_FP8 = FORMATS["e4m3fn"], FORMATS["e4m3fnuz"]
"""The fp8 formats with 3 mantissa bits: of the Open Compute Project, and of AMD's gfx94 GPUs."""

_BY_DTYPE = {f.dtype: f for f in FORMATS.values() if f.pack == 1}
_NAMES = {dtype: f.name for dtype, f in _BY_DTYPE.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type: its format's name if there is one (fp32, bf16, ...), else torch's."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def format_of(dtype: torch.dtype, name: str | None = None, argument: str = "format") -> Format:
    """The format of a storage type. For torch.uint8 the format must be named. `argument` is what an error calls the name.

    Raises ArgumentError if there is no such format, or if it is not stored in this type."""
    names = ", ".join(FORMATS)
    if name is None:
        if dtype is torch.uint8:
            in_bytes = ", ".join(f.name for f in FORMATS.values() if f.itemsize == 1)
            raise ArgumentError(argument, "uint8 storage without a format", f"{argument}= one of {in_bytes}")
        if not isinstance(dtype, torch.dtype) or dtype not in _BY_DTYPE:
            raise ArgumentError("dtype", describe(dtype), f"a storage type of {names}")
        return _BY_DTYPE[dtype]
    found = format_named(name, argument)
    if dtype not in (found.dtype, torch.uint8) or (dtype is torch.uint8 and found.itemsize != 1):
        storage = dict.fromkeys((found.dtype, torch.uint8) if found.itemsize == 1 else (found.dtype,))
        raise ArgumentError(argument, f"{name!r} over {dtype} storage", f"{' or '.join(map(str, storage))} storage")
    return found


def format_named(name: object, argument: str = "format") -> Format:
    """The format of a name. Raises ArgumentError if there is none."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ArgumentError(argument, describe(name), ", ".join(FORMATS))
    return FORMATS[name]


def formats_given(
    dtype: torch.dtype | None, format: str | None, k_format: str | None, v_format: str | None
) -> tuple[Format, Format]:
    """The formats of K and V: those named for one of them, else the common one. Without any it is bf16."""
    k = None if k_format is None else format_named(k_format, "k_format")
    v = None if v_format is None else format_named(v_format, "v_format")
    if k is not None and v is not None:
        unused = ("format", format) if format is not None else ("dtype", dtype)
        if unused[1] not in (None, torch.uint8):
            raise ArgumentError(unused[0], describe(unused[1]), "None: k_format and v_format say how both are stored")
        return k, v
    common = format_named("bf16" if format is None else format) if dtype is None else format_of(dtype, format)
    return k or common, v or common


def formats_of_storage(
    k_pages: torch.Tensor, v_pages: torch.Tensor, format: str | None, k_format: str | None, v_format: str | None
) -> tuple[Format, Format]:
    """The formats of K and V from their storage. Types may differ only where the format of one is named."""
    if k_pages.dtype != v_pages.dtype and k_format is None and v_format is None:
        raise ArgumentError(
            "v_pages", describe(v_pages), f"the type of k_pages, {describe(k_pages)}; or name k_format and v_format"
        )
    k_name, v_name = "format" if k_format is None else "k_format", "format" if v_format is None else "v_format"
    return format_of(k_pages.dtype, k_format or format, k_name), format_of(v_pages.dtype, v_format or format, v_name)
