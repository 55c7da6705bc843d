"""Many short rows at once: key heads then share tiles where the table says so. Right all the same, and each head by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import quire
from gpu.calls import DEVICE, check, fresh_out
from support.scenario import Scenario, build

SEQS = 6 if DEVICE == "cpu" else 60
LONGEST = 130 if DEVICE == "cpu" else 1500
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 50},
    "alibi": {"alibi": True, "window": 90},
    "softcap and sinks": {"softcap": 4.0, "sinks": True},
    "fp16, a group of eight, long indices": {"q_dtype": "fp16", "format": "fp16", "group": 8, "index": (torch.int64,) * 3},
    "one query head a group, heads first": {"group": 1, "layout": "hnd"},
    "head_dim 64, pages of 544": {"head_dim": 64, "page_size": 544},
}


def made(**case: Any) -> Scenario:
    kv_lens = [1 + 97 * row % LONGEST for row in range(SEQS)]
    usual = {"kv_heads": 8, "group": 4, "head_dim": 128, "format": "bf16", "q_dtype": "bf16", "padding": 2}
    s = build(80, [1] * SEQS, kv_lens, **usual | case, device=DEVICE)
    s.batch.max_q_len = 1
    return s


def attend(s: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    return quire.attend(s.q, s.cache, s.batch, s.options, out=fresh_out(s), lse=True, kernel="triton-decode")


@pytest.mark.parametrize("name", CALLS)
def test_many_short_rows(name: str) -> None:
    s = made(**CALLS[name])
    check(s, *attend(s))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_spoils_its_own_head_alone(bad: float) -> None:
    s = made()
    clean, clean_lse = attend(s)
    row, head, dim = 3, 5, 77
    page = s.batch.page_table[row, 1]
    s.cache.v[page, 2, head, dim] = bad
    out, lse = attend(s)
    spoiled = torch.zeros_like(out, dtype=torch.bool)
    spoiled[row, 4 * head : 4 * head + 4, dim] = True
    assert torch.equal(~out.isfinite(), spoiled) and torch.equal(lse, clean_lse)
    out[spoiled] = clean[spoiled]
    check(s, out, lse)
