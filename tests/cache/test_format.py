"""Formats: names, storage types, and encoding to the nearest value a format has, saturating."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.format import FORMATS, encode_groups, format_of
from quire.errors import ArgumentError
from support import nvfp4

BYTES = "e4m3fn, e4m3fnuz, e5m2, int8, int4, int4_zp, nvfp4, nvfp4_swizzled, fp8_ds_mla"
QUANTISED = [f for f in FORMATS.values() if f.scaled and not f.group and not f.zero_point]
GROUPED = [f for f in FORMATS.values() if f.group]
names = pytest.mark.parametrize("format", QUANTISED, ids=str)


def numbers(format, stored):
    """What stored elements stand for, two for each byte of int4: the even one is in its low bits."""
    if format.name != "int4":
        return stored.to(torch.float64)
    codes = torch.stack((stored % 16, stored // 16), -1).flatten().to(torch.float64)
    return torch.where(codes < 8, codes, codes - 16)


def encoded(format, x):
    """The numbers that a format stores for `x [n]`."""
    return numbers(format, format.encode(torch.cat((x, x[:1])) if len(x) % 2 else x))[: len(x)]


def values(format):
    """All finite values of a format in bytes, in order, but the smallest integer, which has no opposite."""
    stored = numbers(format, torch.arange(256, dtype=torch.uint8).view(format.dtype))
    if format.integer:
        stored = stored[stored != stored.min()]
    return stored[stored.isfinite()].unique()


@names
def test_the_largest_is_the_largest(format):
    assert values(format).max() == format.largest
    assert values(format).min() == -format.largest


@names
def test_every_value_encodes_to_itself(format):
    exact = values(format).float()
    assert torch.equal(encoded(format, exact).float(), exact)


@names
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_what_is_too_large_saturates(format, sign):
    beyond = torch.tensor([format.largest * 1.0001, format.largest * 1.5, 1e30, math.inf]) * sign
    assert encoded(format, beyond).tolist() == [sign * format.largest] * 4


@names
@given(data=st.data())
def test_encoding_takes_a_nearest_value(format, data):
    x = data.draw(st.lists(st.floats(-2 * format.largest, 2 * format.largest, width=32), min_size=1, max_size=50))
    x = torch.tensor(x, dtype=torch.float32)
    got = encoded(format, x)
    nearest = (values(format) - x.double()[:, None]).abs().amin(1)
    assert torch.equal((got - x.double()).abs(), nearest)


@names
def test_nan_never_becomes_a_number_by_luck(format):
    got = encoded(format, torch.tensor([math.nan, -math.nan]))
    assert (got == 0).all() if format.integer else got.isnan().all()


def test_two_elements_of_a_byte_are_in_order():
    x = torch.tensor([[1.0, -2.0, 7.0, -7.0], [0.4, 6.6, -100.0, 3.5]])
    stored = FORMATS["int4"].encode(x)
    assert stored.tolist() == [[0xE1, 0x97], [0x70, 0x49]]
    assert FORMATS["int4"].unpack(stored).tolist() == [[1, -2, 7, -7], [0, 7, -7, 4]]
    assert FORMATS["int4"].unpack(torch.tensor([0x8F], dtype=torch.uint8)).tolist() == [-1, -8]
    assert (FORMATS["int4"].bytes_of(128), FORMATS["bf16"].bytes_of(128)) == (64, 256)


def rows(*values):
    """Rows of one group each, of 16 numbers that begin with these."""
    return torch.tensor([[*row, *[0.0] * (16 - len(row))] for row in values])


@pytest.mark.parametrize("format", GROUPED, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_codes_and_scales_of_groups(format, seed):
    """As an encoder says that searches tables; rounding to even at ties, saturation, zeros, tiny groups, NaN and infinity."""
    x = nvfp4.edge_rows(9, 2, 48, seed)
    want = nvfp4.encoded(x.clamp(-2688.0, 2688.0))
    assert torch.equal(format.encode(x), torch.cat((want.bytes(), want.scales), -1))
    read = format.unpack(format.encode(x))
    assert torch.equal(read.double().nan_to_num(nan=1e9), want.double().nan_to_num(nan=1e9))


def test_bytes_of_a_group():
    """Worked out by hand: 3 is half of the largest magnitude, 6 times the scale 1; 2.5 is a tie, and 2 has the even code."""
    x = rows([6.0, -3.0, 0.5, -0.25, 2.5, 0.75], [0.0, -0.0], [1e-5, 1e-3], [math.nan, 6.0], [1e9])
    stored = FORMATS["nvfp4"].encode(x)
    assert stored.shape == (5, 9) and FORMATS["nvfp4"].units_of(128) == FORMATS["nvfp4"].bytes_of(128) == 72
    assert stored[:, 8].tolist() == [0x38, 0x01, 0x01, 0x7F, 0x7E]  # 1, 2^-9, 2^-9, NaN, 448
    assert stored[0, :4].tolist() == [0xD7, 0x81, 0x24, 0x00]  # 6 -3, 0.5 -0 (a tie), 2 1
    assert stored[1, :2].tolist() == [0x80, 0x00] and stored[2, 0] == 0x10  # -0; 1e-3 is about half of 2^-9
    assert FORMATS["nvfp4"].unpack(stored)[4, 0] == FORMATS["nvfp4"].largest == 2688
    assert FORMATS["nvfp4"].unpack(stored)[3].isnan().all()


def test_bytes_of_a_latent():
    """Worked out by hand: 7 of 448 is the scale 1/64; a group of zeros has the smallest normal scale; the end of a key is bf16."""
    x = torch.zeros(576)
    x[0], x[1], x[128], x[512], x[575] = 7.0, -3.5, 448.0, 1.5, -2.0
    stored = FORMATS["fp8_ds_mla"].encode(x)
    assert stored.shape == (656,) and FORMATS["fp8_ds_mla"].units_of(512) == 528
    assert stored[[0, 1, 128]].tolist() == [0x7E, 0xF6, 0x7E]  # 448, -224, 448
    assert stored[512:528].tolist() == [0, 0, 0x80, 0x3C, 0, 0, 0x80, 0x3F, *[0, 0, 0x80, 0] * 2]  # 2^-6, 1, 2^-126, 2^-126
    assert stored[528:530].tolist() == [0xC0, 0x3F] and stored[654:].tolist() == [0x00, 0xC0]
    assert torch.equal(FORMATS["fp8_ds_mla"].unpack(stored), x)
    assert torch.equal(FORMATS["fp8_ds_mla"].unpack(stored[:528]), x[:512])


@pytest.mark.parametrize("format", GROUPED, ids=str)
@given(data=st.data())
def test_groups_are_within_half_a_step(format, data):
    """An element is off by half the distance of its neighbours, or by what lies above 6 scales: a scale may be 1/16 too small."""
    x = data.draw(st.lists(st.floats(-2688, 2688, width=32), min_size=16, max_size=16))
    x = torch.tensor(x, dtype=torch.float32)
    got, top = format.unpack(format.encode(x)), max(float(x.abs().max()) / 6, 2.0**-9)
    step = torch.where(x.abs() < 2.2 * top, 0.5, torch.where(x.abs() < 4.4 * top, 1.0, 2.0))
    assert ((got - x).abs() <= step / 2 * top * (1 + 1 / 8) + 1e-9).all()


@pytest.mark.parametrize("elements", [16, 48, 64, 512, 576])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_elements_of_units_is_the_inverse(format, elements):
    if elements % format.unit == 0 and elements >= format.latent:
        assert format.elements_of(format.units_of(elements)) == elements


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_plain_formats_are_a_cast(name):
    x = torch.randn(100)
    assert torch.equal(FORMATS[name].encode(x), x.to(FORMATS[name].dtype))
    assert not FORMATS[name].quantised


@pytest.mark.parametrize("name", FORMATS)
def test_a_storage_type_names_its_format(name):
    format = FORMATS[name]
    assert format_of(format.dtype, name) is format
    assert not format.uniform or format_of(format.dtype) is format
    assert (str(format), format.itemsize) == (name, torch.empty(0, dtype=format.dtype).element_size())


@pytest.mark.parametrize("format", [*QUANTISED, *GROUPED], ids=str)
def test_bytes_take_a_named_format(format):
    assert format_of(torch.uint8, format.name) is format


@pytest.mark.parametrize(
    ("dtype", "name", "message"),
    [
        (
            torch.uint8,
            None,
            f"format: given uint8 storage without a format; allowed: format= one of {BYTES}",
        ),
        (
            torch.float64,
            None,
            f"dtype: given torch.float64; allowed: a storage type of fp32, fp16, bf16, {BYTES}",
        ),
        (
            torch.uint8,
            "fp8",
            f"format: given 'fp8'; allowed: fp32, fp16, bf16, {BYTES}",
        ),
        (torch.uint8, "bf16", "format: given 'bf16' over torch.uint8 storage; allowed: torch.bfloat16 storage"),
        (
            torch.float8_e5m2,
            "e4m3fn",
            "format: given 'e4m3fn' over torch.float8_e5m2 storage; allowed: torch.float8_e4m3fn or torch.uint8 storage",
        ),
        (
            torch.int8,
            "e4m3fn",
            "format: given 'e4m3fn' over torch.int8 storage; allowed: torch.float8_e4m3fn or torch.uint8 storage",
        ),
        (torch.int8, "int4", "format: given 'int4' over torch.int8 storage; allowed: torch.uint8 storage"),
    ],
    ids=["bytes", "fp64", "unknown", "wide-bytes", "other-fp8", "int8-as-fp8", "int8-as-int4"],
)
def test_what_is_refused(dtype, name, message):
    with pytest.raises(ArgumentError) as caught:
        format_of(dtype, name)
    assert str(caught.value) == message


def test_groups_of_a_view_are_encoded_without_a_warning(recwarn):
    x = torch.randn(3, 2, 32)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        found = encode_groups(x.transpose(0, 1), 16)
    finally:
        torch.set_warn_always(before)
    assert [str(warning.message) for warning in recwarn] == []
    for mine, other in zip(found, encode_groups(x.transpose(0, 1).contiguous(), 16)):
        assert torch.equal(mine, other)
