"""The cache formats: how one element of a cache is stored. Everything that depends on the format reads this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.cache.latent_rows import GROUP as LATENT_GROUP
from quire.cache.latent_rows import SMALLEST_SCALE, scale_bytes
from quire.cache.zero_points import LARGEST_CODE, parts_of_scale, scale_and_zero
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
    group: int = 0
    """Elements of a head that share a scale in the page, besides the scale of the cache; 0 without such scales. The scales of a
    page follow all of its codes (`quire.cache.groups`)."""
    group_dtype: torch.dtype = torch.float8_e4m3fn
    """The type of these scales."""
    latent: int = 0
    """The first elements of a head, e4m3 with scales in the head (`quire.cache.latent_rows`), of a format that stores the others in
    another type; 0 for other formats. V is these elements."""
    zero_point: bool = False
    """Whether each token and head has a zero point, the code of 0, in the low four bits of its scale (`quire.cache.zero_points`).
    Codes are then unsigned, and elements are read as `(code - zero point) * scale`."""
    swizzled: bool = False
    """Whether the group scales of each four tokens are permuted, as TensorRT-LLM's kernels for SM100 read those of V."""

    @property
    def quantised(self) -> bool:
        return self.largest is not None

    @property
    def scaled(self) -> bool:
        """Whether a cache has scales beside its pages."""
        return self.quantised and not self.latent

    @property
    def uniform(self) -> bool:
        """Whether an element of storage is one of a head."""
        return self.pack == 1 and not self.latent

    @property
    def itemsize(self) -> int:
        """Bytes of an element of storage."""
        return self.dtype.itemsize

    @property
    def codec(self) -> str:
        """The name of the format that kernels convert elements of: formats that differ only in their order have one."""
        return self.name.removesuffix(SWIZZLED)

    @property
    def unit(self) -> int:
        """What a head's elements must be a multiple of."""
        return 64 if self.latent else 4 * self.group if self.swizzled else self.group or self.pack

    def codes_of(self, elements: int) -> int:
        """The elements of storage that hold the codes of a number of elements."""
        return elements // self.pack

    def elements_in(self, codes: int) -> int:
        """The elements that so many elements of storage hold, scales of groups in other places not counted."""
        return self.elements_of(codes) if self.latent else codes * self.pack

    def units_of(self, elements: int) -> int:
        """The elements of storage of a head with a number of elements: codes, and scales of groups."""
        if self.latent:
            return min(elements, self.latent) + scale_bytes(min(elements, self.latent)) + 2 * max(elements - self.latent, 0)
        scales = elements // self.group * self.group_dtype.itemsize // self.itemsize if self.group else 0
        return elements // self.pack + scales

    def elements_of(self, units: int) -> int:
        """The elements of a head of a number of elements of storage: the inverse of `units_of`, rounded down."""
        if self.latent:
            whole = self.units_of(self.latent)
            return min(units, whole) * self.latent // whole + max(units - whole, 0) // 2
        return units * self.unit // self.units_of(self.unit)

    def bytes_of(self, elements: int) -> int:
        """The bytes of a head with a number of elements."""
        return self.units_of(elements) * self.itemsize

    @property
    def integer(self) -> bool:
        """Whether elements are integers, so that a scale is required."""
        return not self.dtype.is_floating_point and not self.group and not self.latent

    @property
    def fp8(self) -> bool:
        """Whether elements are 8-bit floats."""
        return self.itemsize == 1 and self.dtype.is_floating_point

    def token_scale(self, x: torch.Tensor) -> torch.Tensor:
        """The scale that a write computes for each row `[.., dim]`, fp32 `[..]`: the largest element becomes the format's; 1 for
        zeros; NaN or infinite if the row contains such an element."""
        assert self.largest is not None
        if self.zero_point:
            return scale_and_zero(x)
        scale = x.float().abs().amax(-1) / self.largest
        return torch.where(scale == 0, 1.0, scale)

    def quantise(self, x: torch.Tensor, scale: torch.Tensor | float | None) -> torch.Tensor:
        """Rows `[.., dim]` in this format, as `encode`. `scale` broadcasts against them; None if there is none."""
        if scale is None:
            return self.encode(x)
        factor, zero = self.parts_of(scale)
        return self.encode(x.float() / factor, zero)

    def parts_of(self, scale: Any) -> tuple[Any, torch.Tensor | None]:
        """The number that elements are multiplied by, and their zero point: scales as they are, unless they contain zero points."""
        return parts_of_scale(scale) if self.zero_point else (scale, None)

    def encode(self, x: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        """Converts fp32 values, already divided by their scale, to this format. Values saturate, also if the cast does not. If the
        format packs elements, the last axis of the result is shorter; scales of groups follow the codes. `zero` are the zero points
        of a format that has them."""
        if self.largest is None:
            return x.to(self.dtype)
        if self.latent:
            return encode_latent(x, self.latent)
        if zero is not None:
            return _pairs((x.round().nan_to_num(0.0) + zero).clamp(0, self.largest).to(torch.uint8))
        x = x.clamp(-self.largest, self.largest)
        if self.group:
            return torch.cat(encode_groups(x, self.group), -1)
        if self.integer:
            x = x.round().nan_to_num(0.0)
        if self.pack > 1:
            return _pairs(x.to(torch.int8).bitwise_and(0xF).view(torch.uint8))
        return x.to(self.dtype)

    def scaled_in_place(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Decoded elements, fp32, as what they stand for: multiplied by their scales, after zero points are subtracted."""
        factor, zero = self.parts_of(scale)
        return x.mul_(factor) if zero is None else x.sub_(zero).mul_(factor)

    def unpack(self, stored: torch.Tensor) -> torch.Tensor:
        """The elements of storage, bytes as uint8, of a format that packs two in each: int8, the last axis twice as long. With
        scales of groups behind the codes: fp32, multiplied by them. With zero points: codes, from 0."""
        if self.latent:
            return decode_latent(stored, self.latent)
        if self.group:
            codes = self.codes_of(self.elements_of(stored.shape[-1]))
            return decode_groups(stored[..., :codes], stored[..., codes:], self.group)
        if self.zero_point:
            return torch.stack((stored & 0xF, stored >> 4), -1).flatten(-2).view(torch.int8)
        # The low four bits are shifted up first: shifting down extends the sign.
        low = stored.bitwise_left_shift(4).view(torch.int8).bitwise_right_shift(4)
        return torch.stack((low, stored.view(torch.int8).bitwise_right_shift(4)), -1).flatten(-2)

    def __str__(self) -> str:
        return self.name


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of e2m1; bit 3 of a code is the sign."""
E4M3_LARGEST, E4M3_SMALLEST = 448.0, 2.0**-9
SWIZZLED = "_swizzled"


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the even one below."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def encode_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 values as e2m1 codes, two in a byte, and e4m3 scales of groups, both uint8. The scale of a group is its largest
    magnitude / 6, at least the smallest number of e4m3, so that nothing is divided by 0; NaN if the group contains NaN."""
    groups = x.unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1) / E2M1[-1]).clamp(E4M3_SMALLEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    scaled = groups / scale.float().unsqueeze(-1)
    size = scaled.abs().nan_to_num(0.0).clamp(max=E2M1[-1]).contiguous()  # bucketize warns otherwise
    # Between powers of two codes are equidistant: 0.5 apart below 2, 1 below 4, 2 above. round() takes ties to even codes.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size = (size / step).round() * step
    codes = torch.bucketize(size, torch.tensor(E2M1, device=x.device)).to(torch.uint8)
    codes = (codes | (torch.signbit(scaled) & ~scaled.isnan()).to(torch.uint8) << 3).flatten(-2)
    return _pairs(codes), scale.view(torch.uint8)


def decode_groups(codes: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """The inverse of `encode_groups`, fp32."""
    table = torch.tensor((*E2M1, *(-x for x in E2M1)), device=codes.device)
    values = table[torch.stack((codes & 0xF, codes >> 4), -1).long()].flatten(-2)
    scale = scales.contiguous().view(torch.float8_e4m3fn).float()
    return (values.unflatten(-1, (-1, group)) * scale.unsqueeze(-1)).flatten(-2)


def encode_latent(x: torch.Tensor, latent: int) -> torch.Tensor:
    """Heads `[.., latent + rotated]` as bytes. The scale of a group is its largest magnitude / 448, at least the smallest normal
    number, so that nothing is divided by 0; NaN if the group contains NaN."""
    groups = x[..., :latent].float().unflatten(-1, (-1, LATENT_GROUP))
    scales = (groups.abs().amax(-1) / E4M3_LARGEST).clamp(min=SMALLEST_SCALE)
    codes = (groups / scales.unsqueeze(-1)).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    rotated = x[..., latent:].to(torch.bfloat16)
    return torch.cat([_typed(part, torch.uint8) for part in (codes, scales, rotated)], -1)


def decode_latent(rows: torch.Tensor, latent: int) -> torch.Tensor:
    """The inverse of `encode_latent`, fp32, also of rows without a rotated part."""
    end = latent + scale_bytes(latent)
    groups = rows[..., :latent].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, LATENT_GROUP))
    numbers = (groups * _typed(rows[..., latent:end], torch.float32).unsqueeze(-1)).flatten(-2)
    if rows.shape[-1] == end:
        return numbers
    return torch.cat((numbers, _typed(rows[..., end:], torch.bfloat16).float()), -1)


def _typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of bytes as numbers. `contiguous` would keep strides of axes of length 1, which `view` refuses."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


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
        Format("int4_zp", torch.uint8, float(LARGEST_CODE), pack=2, zero_point=True),
        Format("nvfp4", torch.uint8, E4M3_LARGEST * E2M1[-1], pack=2, group=16),
        Format("nvfp4" + SWIZZLED, torch.uint8, E4M3_LARGEST * E2M1[-1], pack=2, group=16, swizzled=True),
        Format("fp8_ds_mla", torch.uint8, E4M3_LARGEST, latent=512),
    )
}

FLOAT_NAMES = tuple(f.name for f in FORMATS.values() if not f.quantised)
FP8_NAMES = tuple(f.name for f in FORMATS.values() if f.fp8)
SCALED_NAMES = tuple(f.name for f in FORMATS.values() if f.scaled)
FP8_TYPES = frozenset(f.dtype for f in FORMATS.values() if f.fp8)
BYTE_NAMES = tuple(f.name for f in FORMATS.values() if f.quantised and f.uniform)
"""The formats with one element in a byte."""
QUERY_NAMES = (*FLOAT_NAMES, *FP8_NAMES)
"""The types that queries may have."""

OCP_FP8, FNUZ_FP8 = FORMATS["e4m3fn"], FORMATS["e4m3fnuz"]
"""The fp8 formats with 3 mantissa bits: of the Open Compute Project, and of AMD's gfx94 GPUs."""

_BY_DTYPE = {f.dtype: f for f in FORMATS.values() if f.uniform}
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
