"""`quire.checked(quantisation=True)` warns of what a write loses, and the stored numbers are what the warning says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import quire
from quire.cache.format import FORMATS, SCALED_NAMES
from quire.errors import ArgumentError, QuantisationWarning

POOL = quire.PagePool(4, page_size=16)
GIVEN_SCALES = tuple(name for name in SCALED_NAMES if not FORMATS[name].zero_point)
"""The formats that can have one scale for all tokens, which some of them may not fit."""
ZERO_POINTS = tuple(name for name in SCALED_NAMES if FORMATS[name].zero_point)


def written(format: str, k: torch.Tensor, **how: Any) -> tuple[quire.KVCache, list[str]]:
    """A cache with these keys and values of ones, and the warnings of the write."""
    scales = how or {"k_scale": 1.0, "v_scale": 1.0}
    cache = quire.KVCache.allocate(
        POOL, kv_heads=k.shape[1], head_dim=k.shape[2], format=format, dtype=FORMATS[format].dtype, **scales
    )
    slots = torch.arange(k.shape[0])
    with warnings.catch_warnings(record=True) as said, quire.checked(quantisation=True):
        warnings.simplefilter("always")
        quire.write(k, torch.ones_like(k), cache, slots=slots)
    return cache, [str(one.message) for one in said if one.category is QuantisationWarning]


def numbers(cache: quire.KVCache) -> torch.Tensor:
    """The stored keys before their scale, fp32 `[pages, page_size, kv_heads, head_dim]`."""
    if cache.k_groups is not None:
        rows = torch.cat([part.flatten(4).flatten(2, 3) for part in (cache.k_view, cache.k_groups)], -1)
        return cache.k_format.unpack(rows).transpose(1, 2)
    return (cache.k_format.unpack(cache.k) if cache.k_format.pack > 1 else cache.k).float()


def test_scales_of_values_alone_are_checked() -> None:
    """K in bf16, V in int4: a scale of a required slot must be above 0, others may hold anything; writes may not alias them."""
    pool = quire.PagePool(4, 8)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, v_format="int4", scales="token")
    k = torch.randn(11, 2, 16).bfloat16()
    batch = pool.step({pool.sequence(): 11})
    out = quire.step(k, k, k, cache, batch)
    assert cache.k_scale is None and cache.v_scale is not None
    page = int(batch.page_table[0, 1])
    cache.v_scale[page, 3:] = -1.0
    assert torch.equal(quire.attend(k, cache, batch), out)
    cache.v_scale[page, 2, 1] = 0.0
    with pytest.raises(quire.ContractError, match=rf"v_scale\[{page}, 2, 1\]\s+given +0.0"):
        quire.attend(k, cache, batch)
    with pytest.raises(quire.ContractError, match="batch_invariant"):
        quire.attend(k, cache, batch, quire.Options(batch_invariant=True), new=(k, k))


@pytest.mark.parametrize("format", GIVEN_SCALES)
def test_saturation_is_counted_and_stored_as_the_largest_number(format: str) -> None:
    largest = FORMATS[format].largest
    assert largest is not None
    k = torch.ones(3, 2, 64)
    k[1, 0, 3], k[2, 1, 5] = 3 * largest, -1.5 * largest
    cache, said = written(format, k)
    assert len(said) == 1 and said[0].startswith("saturation: 2 of 384 elements of k") and "3 times" in said[0]
    stored = numbers(cache)
    assert stored[0, 1, 0, 3] == largest and stored[0, 2, 1, 5] == -largest


@pytest.mark.parametrize("format", GIVEN_SCALES)
def test_underflow_is_counted_by_token_and_head(format: str) -> None:
    k = torch.ones(3, 2, 64)
    k[1, 1] = 1e-9
    k[2, 0] = 0.0  # zeros lose nothing
    cache, said = written(format, k)
    assert len(said) == 1 and said[0].startswith("underflow: 1 of 6 vectors of k")
    assert not numbers(cache)[0, 1, 1].any()


@pytest.mark.parametrize("format", ["int8", *ZERO_POINTS])
def test_a_scale_for_each_token_loses_nothing(format: str) -> None:
    k = torch.ones(3, 2, 16)
    k[1], k[2] = 1e6, 1e-9
    assert written(format, k, scales="token")[1] == []


@pytest.mark.parametrize("format", ZERO_POINTS)
def test_underflow_with_zero_points_is_of_numbers_too_small_for_a_scale(format: str) -> None:
    """A scale below 16 times the smallest number of fp32 has no bits left besides those of its zero point."""
    k = torch.ones(3, 2, 16)
    k[1, 0, ::2] = -1.0  # codes of 0 other than 0
    k[1, 1] = -1e-44
    k[2, 0] = 0.0
    cache, said = written(format, k, scales="token")
    assert len(said) == 1 and said[0].startswith("underflow: 1 of 6 vectors of k")
    factor, zero = cache.k_format.parts_of(cache.k_scale)
    stored = (numbers(cache) - zero[..., None]) * factor[..., None]
    assert not stored[0, 1, 1].any() and not stored[0, 2, 0].any()
    # Half a step, and what 15 steps lack because the scale lost up to 16 of its last units to the zero point.
    bound = (0.5 + 15 * 16 * 2.0**-23) * factor[0, :2, 0, None]
    assert ((stored[0, :2, 0] - k[:2, 0]).abs() <= bound).all()


def test_largest_numbers_and_rows_that_are_not_written_give_no_warning() -> None:
    k = torch.full((2, 2, 16), 448.0)
    assert written("e4m3fn", k)[1] == []
    cache = quire.KVCache.allocate(POOL, kv_heads=2, head_dim=16, dtype=torch.float8_e4m3fn)
    with warnings.catch_warnings(), quire.checked(quantisation=True):
        warnings.simplefilter("error")
        quire.write(torch.full((1, 2, 16), 1e5), torch.ones(1, 2, 16), cache, slots=torch.tensor([-1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quire.write(torch.full((1, 2, 16), 1e5), torch.ones(1, 2, 16), cache, slots=torch.tensor([0]))


def test_a_value_that_is_no_bool_is_refused() -> None:
    with pytest.raises(ArgumentError, match="quantisation"), quire.checked(quantisation=1):  # type: ignore[arg-type]
        pass
