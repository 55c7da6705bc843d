"""The codecs of the 8-bit formats: bytes to fp16 and fp32 to bytes, in registers, by integer arithmetic that every target has.

Both e4m3 formats and e5m2 fit into fp16 exactly, NaN and denormals included. Their bits, moved to where fp16 keeps them, are the
value times a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(x, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Converts stored elements to a type that products take: bytes become fp16, other types stay."""
    if FORMAT == "e4m3fn":
        if HARDWARE:
            return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            wide = x.to(tl.uint16)
            number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
            return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)
    elif FORMAT == "e4m3fnuz":
        wide = x.to(tl.uint16)
        number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 128.0
        return tl.where(wide == 0x80, float("nan"), number)
    elif FORMAT == "e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "int8":
        return x.to(tl.int8, bitcast=True).to(tl.float16)
    else:
        return x


@triton.jit
def encode(x, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Converts fp32 values, already divided by their scale: saturating, rounded to nearest even; a NaN stays NaN (0 in int8)."""
    if HARDWARE and FORMAT == "e4m3fn":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif HARDWARE and FORMAT == "e5m2":
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif FORMAT == "e4m3fn":
        return _float_to_byte(x, 3, 7, 448.0, 0x7F)
    elif FORMAT == "e4m3fnuz":
        byte = _float_to_byte(x, 3, 8, 240.0, 0x80)
        # The code of -0 is NaN here: zero has no sign.
        return tl.where((byte == 0x80) & (x == x), 0, byte).to(tl.uint8)
    elif FORMAT == "e5m2":
        return _float_to_byte(x, 2, 15, 57344.0, 0x7F)
    elif FORMAT == "int8":
        near = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
        # Adding 3 * 2^22 leaves no room for a fraction: the sum is rounded to nearest even.
        return ((near + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        return x


@triton.jit
def _float_to_byte(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr):
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    CUT: tl.constexpr = 23 - MANTISSA
    # Round to nearest even by adding just under half of the last place that stays, and its own last bit.
    normal = ((bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    # A denormal is what is left of it beside a number whose last place is the smallest denormal.
    overlapped = (bits & 0) + ((127 + CUT + 1 - BIAS) << 23)
    denormal = (magnitude + overlapped.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) - overlapped
    code = tl.where(bits < ((128 - BIAS) << 23), denormal, normal)
    return tl.where(x == x, sign | code, NAN).to(tl.uint8)
