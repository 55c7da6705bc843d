"""The codecs of the formats that are stored in bytes: bytes to fp16 and fp32 to bytes, in registers, by integer arithmetic that
every target has. Each format has a pair of functions `decode_<format>` and `encode_<format>`; `decode` and `encode` select one by
the format's name.

Both e4m3 formats and e5m2 fit into fp16 exactly, NaN and denormals included. Their bits, moved to where fp16 keeps them, are the
value times a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.cache.latent_rows import GROUP
from quire.cache.latent_rows import SMALLEST_SCALE as SMALLEST

GROUPED_FACTOR = tl.constexpr(128.0)
"""What elements of formats with scales of groups are divided by when they are decoded: the scale of the cache makes up for it."""


LATENT_GROUP = tl.constexpr(GROUP)
"""Elements of a latent that share a scale."""
SMALLEST_SCALE = tl.constexpr(SMALLEST)


@triton.jit
def decode(
    x, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, DOT: tl.constexpr, groups=None, zero=None, NVIDIA: tl.constexpr = False
):  # fmt: skip
    """Converts stored elements to a type that products take: bytes become fp16, other types stay. Units of several elements (bytes
    with two, or 16 or 32 bits with four or eight) become a tuple of parts: the first elements of all units, all second ones, and so
    on (`parts_of`). `DOT` is the type of the product, to which they may be converted at once. `groups` are the scales of groups, of
    a format that has them, and `zero` the zero points `[keys, 1]`."""
    if FORMAT == "e4m3fn":
        return decode_e4m3fn(x, HARDWARE)
    elif FORMAT == "e4m3fnuz":
        return decode_e4m3fnuz(x)
    elif FORMAT == "e5m2":
        return decode_e5m2(x)
    elif FORMAT == "int8":
        return decode_int8(x)
    elif FORMAT == "int4":
        return decode_int4(x, DOT, NVIDIA)
    elif FORMAT == "int4_zp":
        return decode_int4_zp(x, zero, DOT)
    elif FORMAT == "nvfp4":
        return decode_nvfp4(x, groups, HARDWARE, NVIDIA)
    else:
        return x


@triton.jit
def encode(x, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Converts fp32 values, already divided by their scale: saturating, rounded to nearest even; a NaN stays NaN (0 in int8).
    Values of formats with scales of groups stay as they are: `encode_nvfp4` makes codes and scales."""
    if FORMAT == "e4m3fn":
        return encode_e4m3fn(x, HARDWARE)
    elif FORMAT == "e4m3fnuz":
        return encode_e4m3fnuz(x)
    elif FORMAT == "e5m2":
        return encode_e5m2(x, HARDWARE)
    elif FORMAT == "int8":
        return encode_int8(x)
    elif FORMAT == "int4":
        return encode_int4(x)
    else:
        return x


@triton.jit
def decode_e4m3fn(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = x.to(tl.uint16)
        number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def encode_e4m3fn(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return float_to_byte(x, 3, 7, 448.0, 0x7F)


@triton.jit
def decode_e4m3fnuz(x):
    wide = x.to(tl.uint16)
    number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 128.0
    return tl.where(wide == 0x80, float("nan"), number)


@triton.jit
def encode_e4m3fnuz(x):
    byte = float_to_byte(x, 3, 8, 240.0, 0x80)
    # The code of -0 is NaN here: zero has no sign.
    return tl.where((byte == 0x80) & (x == x), 0, byte).to(tl.uint8)


@triton.jit
def decode_e5m2(x):
    return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def encode_e5m2(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return float_to_byte(x, 2, 15, 57344.0, 0x7F)


@triton.jit
def decode_int8(x):
    return x.to(tl.int8, bitcast=True).to(tl.float16)


@triton.jit
def encode_int8(x):
    return rounded(x, 127.0).to(tl.uint8, bitcast=True)


@triton.jit
def decode_int4(x, DOT: tl.constexpr, NVIDIA: tl.constexpr):
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    parts = no_parts()
    for at in tl.static_range(0, BITS, 4):
        parts += (int4_of(x, at, DOT, NVIDIA),)
    return parts


@triton.jit
def int4_of(x, AT: tl.constexpr, DOT: tl.constexpr, NVIDIA: tl.constexpr):
    """The element at bit AT of each unit, as bf16 or fp16."""
    # Flipping the sign bit of a code adds 8 to it. It then counts the last bits of a power of two: 1024 in fp16; 2^23 in fp32,
    # whose upper half is bf16.
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    if NVIDIA and BITS > 8:
        if DOT == "bf16":
            return tl.inline_asm_elementwise(
                int4_assembly(BITS, AT, DOT), operands_of(BITS, 0), [x], tl.bfloat16, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                int4_assembly(BITS, AT, DOT), operands_of(BITS, 0), [x], tl.float16, is_pure=True, pack=2
            )
    elif DOT == "bf16":
        code = (x >> AT).to(tl.uint32) & 0xF
        return upper_half((code ^ 0x4B000008).to(tl.float32, bitcast=True) - 8388616.0)
    else:
        code = (x >> AT).to(tl.uint16) & 0xF
        return (code ^ 0x6408).to(tl.float16, bitcast=True) - 1032.0


@triton.constexpr_function
def int4_assembly(bits, at, dot):
    """PTX for the elements at bit `at` of two units of 16 or 32 bits. Both are in one register from the first instruction on, where
    the compiler would combine results. In bf16 they count the last bits of 128; in fp16 those at bit 4 count 16 units, so that
    fewer are shifted."""
    if dot == "bf16":
        shift, mask, power, factor, rest, kind = at % 16, 0x000F000F, 0x43084308, 0x3F803F80, 0xC308C308, "bf16x2"
    elif at % 8 == 0:
        shift, mask, power, factor, rest, kind = at % 16, 0x000F000F, 0x64086408, 0x3C003C00, 0xE408E408, "f16x2"
    else:
        shift, mask, power, factor, rest, kind = at % 16 - 4, 0x00F000F0, 0x64806480, 0x2C002C00, 0xD480D480, "f16x2"
    return f"""{{
        .reg .b32 x, factor, rest;
        {halves_assembly(bits, at)}
        shr.b32 x, x, {shift};
        lop3.b32 x, x, {mask}, {power}, 0x6a;
        mov.b32 factor, {factor};
        mov.b32 rest, {rest};
        fma.rn.{kind} $0, x, factor, rest;
    }}"""


@triton.constexpr_function
def halves_assembly(bits, at):
    """PTX for a register of the halves of two words in which bit `at` is, or of two units of 16 bits."""
    return "mov.b32 x, $1;" if bits == 16 else f"prmt.b32 x, $1, $2, {0x7632 if at >= 16 else 0x5410};"


@triton.constexpr_function
def operands_of(bits, more):
    """The operands of such PTX: a register of results, one or two of units, and `more`."""
    return ",".join(["=r"] + ["r"] * (bits // 16 + more))


@triton.jit
def no_parts():
    """The tuple to which parts are added."""
    return ()


@triton.jit
def parts_of(x, PACK: tl.constexpr):
    """Columns `[rows, dim]` as a tuple of PACK parts `[rows, dim / PACK]`: the first elements of all units of storage, all second
    ones, and so on."""
    if PACK == 1:
        return (x,)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        even, odd = parts_of(even, PACK // 2), parts_of(odd, PACK // 2)
        parts = no_parts()
        for nth in tl.static_range(PACK // 2):
            parts += (even[nth], odd[nth])
        return parts


@triton.jit
def whole_of(parts, PACK: tl.constexpr):
    """The columns of which `parts_of` makes these parts."""
    if PACK == 1:
        return parts[0]
    else:
        even, odd = no_parts(), no_parts()
        for nth in tl.static_range(PACK // 2):
            even += (parts[2 * nth],)
            odd += (parts[2 * nth + 1],)
        return tl.interleave(whole_of(even, PACK // 2), whole_of(odd, PACK // 2))


@triton.jit
def decode_int4_zp(x, zero, DOT: tl.constexpr):
    # As `decode_int4`, with codes from 0 on: the power of two and the zero point are subtracted at once.
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    parts = no_parts()
    for at in tl.static_range(0, BITS, 4):
        if DOT == "bf16":
            code = ((x >> at).to(tl.uint32) & 0xF) | 0x4B000000
            parts += (upper_half(code.to(tl.float32, bitcast=True) - (zero.to(tl.float32) + 8388608.0)),)
        else:
            code = ((x >> at).to(tl.uint16) & 0xF) | 0x6400
            parts += (code.to(tl.float16, bitcast=True) - (zero.to(tl.float16) + 1024.0),)
    return parts


@triton.constexpr_function
def has_zero_points(FORMAT):
    """Whether scales contain zero points."""
    return FORMAT == "int4_zp"


@triton.jit
def zero_of(scale):
    """The zero points in the low bits of scales, int32."""
    return scale.to(tl.int32, bitcast=True) & 0xF


@triton.jit
def without_zero(scale):
    return (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)


@triton.jit
def upper_half(x):
    """fp32 as bf16, where that is exact."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def encode_int4(x):
    return pairs_of(rounded(x, 7.0).to(tl.uint8, bitcast=True) & 0xF)


@triton.jit
def encode_with_zero(x):
    """fp32 rows as codes from 0 to 15, which reach from the smallest element, or 0, to the largest, or 0; and their scales, with
    zero points."""
    low = tl.minimum(tl.min(x, 1), 0.0)
    high = tl.maximum(tl.max(x, 1), 0.0)
    # The ends are divided before they are subtracted: their difference may be too large for fp32.
    most = tl.full(low.shape, 15.0, tl.float32)
    scale = without_zero(tl.div_rn(high, most) - tl.div_rn(low, most))
    # Minimum and maximum ignore NaN; the scale of a row with a NaN must be NaN.
    scale = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), tl.where(scale == 0.0, 1.0, scale))
    zero = tl.minimum(rounded(tl.div_rn(-low, scale), 31.0), 15)
    codes = rounded(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), 31.0) + zero[:, None]
    codes = tl.minimum(tl.maximum(codes, 0), 15).to(tl.uint8)
    return pairs_of(codes), (scale.to(tl.int32, bitcast=True) | zero.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def pairs_of(codes):
    """Two codes in a byte, the even one below."""
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return low | (high << 4)


@triton.jit
def decode_nvfp4(x, groups, HARDWARE: tl.constexpr, NVIDIA: tl.constexpr):
    """Units as parts in fp16: the value / 2^7 (`GROUPED_FACTOR`), which is exact."""
    # The bits of e2m1 where fp16 keeps them are the value / 2^14. The scale takes as much of that power as it can: 448 * 2^7 is
    # less than the largest number of fp16.
    KEYS: tl.constexpr = x.shape[0]
    UNITS: tl.constexpr = x.shape[1]
    EACH: tl.constexpr = UNITS // groups.shape[1]
    scale = tl.broadcast_to((decode_e4m3fn(groups, HARDWARE) * 128.0)[:, :, None], [KEYS, UNITS // EACH, EACH])
    scale = tl.reshape(scale, [KEYS, UNITS])
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    parts = no_parts()
    for at in tl.static_range(0, BITS, 4):
        parts += (e2m1_of(x, scale, at, NVIDIA),)
    return parts


@triton.jit
def e2m1_of(x, scale, AT: tl.constexpr, NVIDIA: tl.constexpr):
    """The element at bit AT of each unit, as fp16, times its scale."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    if NVIDIA and BITS > 8:
        return tl.inline_asm_elementwise(
            e2m1_assembly(BITS, AT), operands_of(BITS, 1), [x, scale], tl.float16, is_pure=True, pack=2
        )
    else:
        code = (x >> AT).to(tl.uint16)
        return (((code & 0x7) << 9) | ((code & 0x8) << 12)).to(tl.float16, bitcast=True) * scale


@triton.constexpr_function
def e2m1_assembly(bits, at):
    """PTX for the elements at bit `at` of two units, and their scales, as `int4_assembly`."""
    shift = 9 - at % 16
    return f"""{{
        .reg .b32 x, sign;
        {halves_assembly(bits, at)}
        shl.b32 sign, x, {shift + 3};
        and.b32 sign, sign, 0x80008000;
        {"shl" if shift > 0 else "shr"}.b32 x, x, {abs(shift)};
        lop3.b32 x, x, 0x0e000e00, sign, 0xea;
        mul.rn.f16x2 $0, x, ${bits // 16 + 1};
    }}"""


@triton.jit
def encode_nvfp4(x, GROUP: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 `[rows, dim]` as codes, two in a byte, and e4m3 scales of groups `[rows, groups]`."""
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // GROUP
    parts = tl.reshape(x, [ROWS, GROUPS, GROUP])
    largest = tl.max(tl.abs(parts), 2)
    # Not less than the smallest number of e4m3, so that nothing is divided by 0.
    largest = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)), 0.001953125)
    # A maximum ignores NaN; the scale of a group with a NaN must be NaN.
    largest = tl.where(tl.max((parts != parts).to(tl.int32), 2) > 0, float("nan"), largest)
    groups = encode_e4m3fn(largest, HARDWARE)
    scale = tl.broadcast_to(decode_e4m3fn(groups, False).to(tl.float32)[:, :, None], parts.shape)
    byte = float_to_byte(tl.div_rn(parts, scale), 1, 1, 6.0, 0)
    codes = tl.reshape((byte & 7) | ((byte >> 4) & 8), [ROWS, GROUPS * GROUP // 2, 2])
    low, high = tl.split(codes)
    return low | (high << 4), groups


@triton.jit
def decode_latent(codes, scales, HARDWARE: tl.constexpr):
    """Codes `[rows, dim]` and scales `[rows, groups]` as fp32."""
    ROWS: tl.constexpr = codes.shape[0]
    DIM: tl.constexpr = codes.shape[1]
    numbers = tl.reshape(decode_e4m3fn(codes, HARDWARE).to(tl.float32), [ROWS, DIM // LATENT_GROUP, LATENT_GROUP])
    return tl.reshape(numbers * scales[:, :, None], [ROWS, DIM])


@triton.jit
def encode_latent(x, HARDWARE: tl.constexpr):
    """The codes of a latent `[rows, dim]`, and its scales `[rows, groups]`."""
    ROWS: tl.constexpr = x.shape[0]
    DIM: tl.constexpr = x.shape[1]
    groups = tl.reshape(x.to(tl.float32), [ROWS, DIM // LATENT_GROUP, LATENT_GROUP])
    largest = tl.max(tl.abs(groups), 2)
    scales = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    scales = tl.maximum(scales, SMALLEST_SCALE)
    # A maximum ignores NaN; the scale of a group with a NaN must be NaN.
    scales = tl.where(tl.max((groups != groups).to(tl.int32), 2) > 0, float("nan"), scales)
    codes = encode_e4m3fn(tl.div_rn(groups, tl.broadcast_to(scales[:, :, None], groups.shape)), HARDWARE)
    return tl.reshape(codes, [ROWS, DIM]), scales


@triton.jit
def rounded(x, LARGEST: tl.constexpr):
    """fp32 rounded to integers of 8 bits, saturating; 0 for NaN."""
    near = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)
    # Adding and subtracting 3 * 2^22 rounds to an integer, ties to even.
    return ((near + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def float_to_byte(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr):
    """Rounds fp32 to a float of 8 bits with a sign, an exponent and MANTISSA bits; saturates at LARGEST."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    CUT: tl.constexpr = 23 - MANTISSA
    # Round to nearest even by adding just under half of the last place that stays, and its own last bit.
    normal = ((bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    # Adding a power of two whose ulp is the smallest denormal rounds the value to a multiple of it.
    power = (bits & 0) + ((127 + CUT + 1 - BIAS) << 23)
    denormal = (magnitude + power.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) - power
    code = tl.where(bits < ((128 - BIAS) << 23), denormal, normal)
    return tl.where(x == x, sign | code, NAN).to(tl.uint8)
