"""Clause 1 on the GPU: what is not required never shows, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gpu.calls import DEVICE, attend, bits, check, every
from support.scenario import build

LENS: dict[str, Any] = {"q_lens": [1, 40, 0, 3, 1], "kv_lens": [150, 57, 60, 75, 9], "padding": 2}
CASES: dict[str, dict[str, Any]] = {
    "full": {"format": "bf16", "q_dtype": "bf16", "head_dim": 64},
    "context": {"format": "bf16", "q_dtype": "bf16", "head_dim": 64, "form": "context"},
    "window": {"window": 9, "form": "context"},
    "window-both-sides": {"window": (4, 4), "causal": False, "format": "fp16", "q_dtype": "fp16", "head_dim": 40, "page_size": 5},
    "tree": {"mask": True, "window": 40, "format": "bf16", "q_dtype": "bf16"},
    "token-scales": {"format": "int8", "scales": "token", "window": 11, "q_dtype": "bf16"},
    "large-pages": {"format": "e4m3fn", "q_dtype": "bf16", "layout": "aiter", "page_size": 64, "storage": "padded"},
    "bytes": {"format": "e4m3fn", "q_dtype": "bf16", "head_dim": 64, "window": 30, "page_size": 64, "storage": "padded"},
    "odd-head": {"format": "e5m2", "q_dtype": "bf16", "head_dim": 24, "v_head_dim": 40, "layout": "vllm_x"},
}
POISON = ((math.nan, -1), (3.0, 0), (math.inf, 2**31 - 1))
"""What stands where nothing is required: in slots, scales and padding rows, and in the table."""


@every
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_required_never_shows(name: str, kernel: str) -> None:
    results = []
    for poison, bad_id in POISON:
        s = build(30, **LENS, **CASES[name], poison=poison, bad_id=bad_id, device=DEVICE)
        out, lse = attend(s, kernel)
        check(s, out, lse)
        results.append((bits(out), bits(lse)))
    for out_bits, lse_bits in results[1:]:
        assert torch.equal(out_bits, results[0][0]) and torch.equal(lse_bits, results[0][1])
