"""Formats: names, storage types, and encoding to the nearest value a format has, saturating."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.format import FORMATS, format_of
from quire.errors import ArgumentError

QUANTISED = [f for f in FORMATS.values() if f.quantised]
names = pytest.mark.parametrize("format", QUANTISED, ids=str)


def values(format):
    """All finite values of an eight-bit format, in order."""
    stored = torch.arange(256, dtype=torch.uint8).view(format.dtype).to(torch.float64)
    if format.name == "int8":
        stored = stored[stored != -128]
    return stored[stored.isfinite()].unique()


@names
def test_the_largest_is_the_largest(format):
    assert values(format).max() == format.largest
    assert values(format).min() == -format.largest


@names
def test_every_value_encodes_to_itself(format):
    exact = values(format).float()
    assert torch.equal(format.encode(exact).float(), exact)


@names
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_what_is_too_large_saturates(format, sign):
    beyond = torch.tensor([format.largest * 1.0001, format.largest * 1.5, 1e30, math.inf]) * sign
    assert format.encode(beyond).float().tolist() == [sign * format.largest] * 4


@names
@given(data=st.data())
def test_encoding_takes_a_nearest_value(format, data):
    x = data.draw(st.lists(st.floats(-2 * format.largest, 2 * format.largest, width=32), min_size=1, max_size=50))
    x = torch.tensor(x, dtype=torch.float32)
    got = format.encode(x).to(torch.float64)
    nearest = (values(format) - x.double()[:, None]).abs().amin(1)
    assert torch.equal((got - x.double()).abs(), nearest)


@names
def test_nan_never_becomes_a_number_by_luck(format):
    got = format.encode(torch.tensor([math.nan, -math.nan])).float()
    assert (got == 0).all() if format.name == "int8" else got.isnan().all()


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_plain_formats_are_a_cast(name):
    x = torch.randn(100)
    assert torch.equal(FORMATS[name].encode(x), x.to(FORMATS[name].dtype))
    assert not FORMATS[name].quantised


@pytest.mark.parametrize("name", FORMATS)
def test_a_storage_type_names_its_format(name):
    format = FORMATS[name]
    assert format_of(format.dtype) is format_of(format.dtype, name) is format
    assert (str(format), format.itemsize) == (name, torch.empty(0, dtype=format.dtype).element_size())


@names
def test_bytes_take_a_named_format(format):
    assert format_of(torch.uint8, format.name) is format


@pytest.mark.parametrize(
    ("dtype", "name", "message"),
    [
        (torch.uint8, None, "format: given uint8 storage without a format; allowed: format= one of e4m3fn, e4m3fnuz, e5m2, int8"),
        (
            torch.float64,
            None,
            "dtype: given torch.float64; allowed: a storage type of fp32, fp16, bf16, e4m3fn, e4m3fnuz, e5m2, int8",
        ),
        (torch.uint8, "fp8", "format: given 'fp8'; allowed: fp32, fp16, bf16, e4m3fn, e4m3fnuz, e5m2, int8"),
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
    ],
    ids=["bytes", "fp64", "unknown", "wide-bytes", "other-fp8", "int8-as-fp8"],
)
def test_what_is_refused(dtype, name, message):
    with pytest.raises(ArgumentError) as caught:
        format_of(dtype, name)
    assert str(caught.value) == message
