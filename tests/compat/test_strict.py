"""`strict=True`: a decode row whose token is not in the cache is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compat.case import Case, build
from quire.compat.vllm import chunked_prefill_paged_decode
from quire.errors import ContractError

LENS: dict[str, Any] = {"q_lens": [1, 9, 1, 3], "seq_lens": [40, 40, 20, 3]}


def brought_along(device: str, **spec: Any) -> Case:
    """A case whose decode rows bring their token along too, as engines do."""
    case = build(device, **LENS, **spec)
    lens = case.arguments["seq_lens"].tolist()
    for row in (0, 2):
        for name, dense in zip(("key", "value"), case.dense):
            case.arguments[name][case.starts[row]] = dense[sum(lens[: row + 1]) - 1].to(case.arguments[name].dtype)
    return case


def forget(case: Case, name: str, row: int) -> tuple[int, int]:
    """Takes a decode row's token out of a cache again: its slot holds the bits of a fresh page."""
    at = int(case.arguments["seq_lens"][row]) - 1
    page, offset = case.pages[row][at // case.page_size], at % case.page_size
    cache = case.arguments[name]
    cache[(page, slice(None), slice(None), offset)] = 0
    return page, page * case.page_size + offset


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_a_token_that_is_there_is_not_reported(kv_cache_dtype: str, device: str) -> None:
    case = brought_along(device, kv_cache_dtype=kv_cache_dtype, dtype=torch.bfloat16)
    case.run(chunked_prefill_paged_decode, strict=True)
    case.check()


def test_a_token_that_saturated_is_there(device: str) -> None:
    case = brought_along(device, kv_cache_dtype="fp8")
    largest = 448 * float(case.arguments["k_scale"])
    at = case.pages[0][39 // 16], slice(None), slice(None), 39 % 16
    case.arguments["key_cache"][at] = 0x7E  # 448, the largest
    case.arguments["key"][case.starts[0]] = 3 * largest
    case.run(chunked_prefill_paged_decode, strict=True)
    case.arguments["key"][case.starts[0]] = -3 * largest
    with pytest.raises(ContractError, match="position 39 of sequence 0"):
        case.run(chunked_prefill_paged_decode, strict=True)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
@pytest.mark.parametrize("row", [0, 2])
def test_a_missing_token_is_named(kv_cache_dtype: str, name: str, row: int, device: str) -> None:
    case = brought_along(device, kv_cache_dtype=kv_cache_dtype)
    page, slot = forget(case, name, row)
    with pytest.raises(ContractError, match=r"compat\.vllm\.chunked_prefill_paged_decode: 1 violation") as missing:
        case.run(chunked_prefill_paged_decode, strict=True)
    (violation,) = missing.value.violations
    position = int(case.arguments["seq_lens"][row]) - 1
    assert (violation.rule, violation.argument) == ("residency", name)
    assert (violation.seq, violation.token, violation.page, violation.slot) == (row, position, page, slot)
    assert case.output.isnan().all(), "something was written"


def test_without_strict_the_cache_is_believed(device: str) -> None:
    case = brought_along(device)
    forget(case, "key_cache", 0)
    case.run(chunked_prefill_paged_decode)
    case.check(rows=[1, 2, 3], out=torch.cat((case.output[:1] * torch.nan, case.output[1:])))


def test_values_are_checked_wherever_they_lie(device: str) -> None:
    case = brought_along(device)
    case.arguments["block_table"][3, 0] = -1  # not needed: the row brings all of its tokens along
    case.run(chunked_prefill_paged_decode, strict=True)
    case.arguments["block_table"][2, 1] = 10**6
    with pytest.raises(ContractError, match=r"\[table\] block_table\[2, 1\]"):
        case.run(chunked_prefill_paged_decode, strict=True)
