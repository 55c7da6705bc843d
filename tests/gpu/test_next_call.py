"""Other numbers, tables and hints in the next call: launchers are kept for calls of a kind, which these must be part of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import quire
from compat.calls import in_cache, unified
from compat.case import build
from gpu.calls import DEVICE
from quire.compat import vllm
from support.scenario import build as build_scenario

LENS: dict[str, Any] = {"q_lens": [1, 9, 1, 30], "seq_lens": [40, 40, 1, 75]}
NUMBERS: list[dict[str, Any]] = [{"scale": 0.05}, {"scale": 1.0}, {"scale": 0.05, "window": 12}, {"scale": 0.05}]


def test_chunked_prefill() -> None:
    for numbers in NUMBERS:
        case = build(DEVICE, **LENS, **numbers)
        case.run(vllm.chunked_prefill_paged_decode)
        case.check()


def test_unified() -> None:
    for numbers in NUMBERS:
        case = in_cache(DEVICE, **LENS, **numbers)
        unified(case)
        case.check()


@pytest.mark.parametrize("name", ["q_scale", "out_scale"])
def test_scales_on_the_host(name: str) -> None:
    """Another number in another tensor, then in the same one."""
    s = build_scenario(90, [1, 9, 1], [40, 40, 20], format="e4m3fn", q_dtype="e4m3fn", q_scale=0.03, head_dim=64, device=DEVICE)
    numbers = [2.0**-6, 2.0**-4, 0.25]
    scale = torch.tensor(numbers[0])
    for nth, number in enumerate(numbers):
        scale = scale.fill_(number) if nth == 2 else torch.tensor(number)
        out_dtype = torch.float8_e4m3fn if name == "out_scale" else torch.bfloat16
        out, same = (torch.empty(s.q.shape, dtype=out_dtype, device=DEVICE) for _ in range(2))
        quire.attend(s.q, s.cache, s.batch, replace(s.options, **{name: scale}), out=out)
        quire.attend(s.q, s.cache, s.batch, replace(s.options, **{name: number}), out=same)
        assert torch.equal(out.float(), same.float())


def test_a_table_that_grows() -> None:
    """A decoding loop that replaces its batch's table when a page is added."""
    s = build_scenario(91, [1, 1], [17, 40], format="bf16", q_dtype="bf16", head_dim=64, device=DEVICE)
    wide = s.batch.page_table
    narrow = quire.Batch(wide[:, :2].contiguous(), s.batch.kv_lens.clamp(max=20), s.batch.q_starts, max_q_len=1)
    quire.attend(s.q, s.cache, narrow, s.options)
    narrow.page_table, narrow.kv_lens = wide, s.batch.kv_lens
    out = torch.full_like(s.q, torch.nan)
    quire.attend(s.q, s.cache, narrow, s.options, out=out)
    s.check(out, None, 1.0, torch.bfloat16)
