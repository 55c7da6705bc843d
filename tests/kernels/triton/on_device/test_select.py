"""Selections: both kinds with the features, against the reference; and entries and pages that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import Select
from support.launched import attend, card, run
from support.scenario import build

LENS: dict[str, Any] = {"q_lens": [1, 20, 3, 0, 2], "kv_lens": [35, 40, 100, 7, 66], "padding": 2, "page_size": 8}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads": {"select_heads": 2, "index": (torch.int64, torch.int32, torch.int32)},
    "window-alibi": {"window": 20, "alibi": True, "causal": "mixed"},
    "non-causal-right": {"window": (30, 3), "causal": False, "sinks": True},
    "int8-tokens": {"format": "int8", "scales": "token", "layout": "vllm_x", "select_heads": 2, "softcap": 3.0},
    "fp8-heads": {"format": "e4m3fn", "scales": "head", "q_dtype": "fp16"},
    "group": {"group": 20, "select_heads": 2},
    "invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("select", ["positions", "columns"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, select: str, device: str) -> None:
    which = list(FEATURES).index(name) + (select == "columns")
    attend(("mixed", "decode")[which % 2], device, **LENS, select=select, **FEATURES[name])


@pytest.mark.parametrize("select", ["positions", "columns"])
def test_units_that_are_split(select: str, device: str) -> None:
    """The keys of one query are divided among programs."""
    case: dict[str, Any] = {"q_lens": [1], "kv_lens": [300], "kv_heads": 1, "page_size": 32, "select": select}
    attend("decode", device, how={"platform": card(device, 3)}, **case)


@pytest.mark.parametrize("select", ["positions", "columns"])
def test_what_does_not_exist_gives_nan(select: str, device: str) -> None:
    """An entry out of range, and a page out of range, affect the queries and heads that select them."""
    s = build(2, [1, 2], [30, 20], page_size=8, select=select, select_heads=2, device=device)
    assert s.batch.select is not None
    entries = s.batch.select.entries
    good, _ = run("mixed", s)
    far = 30 if select == "positions" else 4
    for bad in (-2, far, 2**31 - 1):
        wrong = entries.clone()
        wrong[0, 1, :2] = torch.tensor([bad, -1])
        other = s.batch.with_select(Select(**{select: wrong}))
        s.batch, kept = other, s.batch
        out, lse = run("mixed", s)
        s.batch = kept
        assert lse is not None and out[0, 2:].isnan().all() and lse[0, 2:].isnan().all()
        assert torch.equal(out[0, :2], good[0, :2]) and torch.equal(out[1:], good[1:])
    s.batch.page_table[1] = s.cache.pages
    out, _ = run("mixed", s)
    seen = s.expected_lse[1:3] > -torch.inf
    assert torch.equal(out[0], good[0])
    assert bool(out[1:3].isnan().all(-1)[seen].all()) or select == "columns"
    assert out[1:3].isnan().any()


@pytest.mark.parametrize("count", [0, 2])
def test_nothing_selected(count: int, device: str) -> None:
    s = build(2, [1, 2], [30, 20], select="columns", device=device, sinks=torch.zeros(4))
    s.batch = s.batch.with_select(Select(columns=torch.full((2, 1, count), -1, dtype=torch.int32, device=device)))
    s.batch.page_table.fill_(-1)
    out, lse = run("mixed", s)
    assert (out == 0).all() and lse is not None and (lse == 0).all()
