"""Uninitialised memory shows: `tests/conftest.py` poisons what quire allocates, and only that."""

from __future__ import annotations

import pytest
import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2]
MAKERS = {
    "empty": "torch.empty(64, dtype=dtype)",
    "empty_like": "torch.empty_like(torch.zeros(64, dtype=dtype))",
    "empty_strided": "torch.empty_strided((64,), (1,), dtype=dtype)",
    "new_empty": "torch.zeros(64).new_empty(64, dtype=dtype)",
}


def made_in(module: str, expression: str, dtype: torch.dtype) -> torch.Tensor:
    return eval(expression, {"__name__": module, "torch": torch, "dtype": dtype})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_quire_gets_nan(maker: str, dtype: torch.dtype) -> None:
    assert made_in("quire.kernels.some", MAKERS[maker], dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_quire_gets_the_lowest_integer(dtype: torch.dtype) -> None:
    assert (made_in("quire.batch", MAKERS["empty"], dtype) == torch.iinfo(dtype).min).all()


@pytest.mark.parametrize("module", ["torch.nn", "quirement", "tests"])
def test_others_are_left_alone(module: str) -> None:
    kept = "torch.empty(64, dtype=dtype, out=torch.ones(64))"
    assert (made_in(module, kept, torch.float32) == 1).all()
    assert made_in("quire", kept, torch.float32).isnan().all()
