"""Hopper's kernel for long queries with all that it supports: on an H100 or H200, and in the emulator of `support.hopper`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import KVCache
from quire.kernels.triton.host.tuning import SMALL_GLUON
from support.launched import attend, check, needs_hopper, platform_at, run
from support.scenario import build

pytestmark = needs_hopper
SMALL = SMALL_GLUON._replace(long_keys=32)
BF16: dict[str, Any] = {"format": "bf16", "q_dtype": "bf16"}
E4M3: dict[str, Any] = {"format": "e4m3fn", "q_dtype": "bf16"}
# Long sequences and a short one, one without new tokens; more units than there are slots for queries; contexts of none and of
# several tiles.
LENS: dict[str, Any] = {"q_lens": [1, 40, 20, 0], "kv_lens": [5, 40, 75, 7], "padding": 2, "head_dim": 64, "group": 4}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"format": "fp16", "q_dtype": "fp16", "page_size": 32},
    "pages-of-1": {"page_size": 1},
    "pages-of-7": {"page_size": 7, "layout": "hnd"},
    "pages-of-8": {"page_size": 8, "layout": "vllm_joint", "index": (torch.int64,) * 3},
    "context": {"form": "context"},
    "context-pages-of-1": {"form": "context", "page_size": 1, "window": 20},
    "window": {"window": 20},
    "window-both-sides": {"window": (30, 3), "causal": False, "page_size": 24},
    "causal-by-sequence": {"causal": "mixed", "window": (15, 4)},
    "non-causal": {"causal": False},
    "softcap": {"softcap": 5.0},
    "large-softcap": {"softcap": 300.0},
    "alibi": {"alibi": True, "softcap": 20.0},
    "sinks": {"sinks": True, "scale": -0.3},
    "group-5": {"group": 5},
    "group-7": {"group": 7, "form": "context"},
    "heads-of-80": {"head_dim": 80},
    "heads-of-96": {"head_dim": 96, "page_size": 7},
    "heads-of-192-and-128": {"head_dim": 192, "v_head_dim": 128},
    "heads-of-256": {"head_dim": 256, "kv_heads": 1},
    "heads-of-34-and-40": {"head_dim": 34, "v_head_dim": 40},
    "bytes": {**E4M3},
    "bytes-pages-of-1": {**E4M3, "page_size": 1},
    "bytes-by-head": {"format": "int8", "q_dtype": "bf16", "scales": "head", "head_dim": 80},
    "bytes-fp16": {"format": "e5m2", "q_dtype": "fp16", "window": 20},
    "bytes-heads-of-256": {**E4M3, "head_dim": 256, "kv_heads": 1},
    "q-scale": {"q_scale": torch.tensor(0.5)},
}
LARGER_TILES: dict[str, dict[str, Any]] = {
    "pages-of-8": {"page_size": 8},
    "heads-of-34": {"head_dim": 34, "window": 20, "form": "context"},
    "bytes-heads-of-34": {**E4M3, "head_dim": 34},
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, device: str) -> None:
    attend("gluon", device, how={"tuning": SMALL}, **{**LENS, **BF16, **FEATURES[name]})


@pytest.mark.parametrize("name", LARGER_TILES)
def test_larger_tiles(name: str, device: str) -> None:
    """They are loaded in several parts."""
    attend("gluon", device, how={"tuning": SMALL_GLUON}, **{**LENS, **BF16, **LARGER_TILES[name]})


def test_a_group_larger_than_a_tile(device: str) -> None:
    case: dict[str, Any] = {"q_lens": [5, 1, 2], "kv_lens": [40, 5, 2], "kv_heads": 1, "group": 160, "head_dim": 64, **BF16}
    attend("gluon", device, how={"tuning": SMALL}, **case)


@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
@pytest.mark.parametrize("short", [[], [1, 2]])
def test_launches(short: list[int], multiprocessors: int, device: str) -> None:
    """All units are computed by the first launch, by the second, or by both."""
    platform = replace(platform_at(device), multiprocessors=multiprocessors)
    case: dict[str, Any] = {"q_lens": [20, *short, 50], "kv_lens": [50, *(n + 30 for n in short), 50], "group": 4, "head_dim": 64}
    attend("gluon", device, how={"tuning": SMALL, "platform": platform}, **case, **BF16)


@pytest.mark.parametrize("format", ["bf16", "e4m3fn"])
@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_missing_page_gives_nan(page: int, format: str, device: str) -> None:
    """To the whole sequence, and to no other one. Nothing is read out of bounds."""
    s = build(3, [20, 1, 30], [60, 50, 70], page_size=16, head_dim=64, format=format, q_dtype="bf16", device=device)
    s.batch.page_table[2, 1] = page
    out, lse = run("gluon", s, tuning=SMALL)
    assert lse is not None and out[21:].isnan().all() and lse[21:].isnan().all()
    out[21:], lse[21:], s.expected[21:], s.expected_lse[21:] = 0.0, 0.0, 0.0, 0.0
    check("gluon", s, out, lse)


def test_no_sequence_is_long(device: str) -> None:
    attend("gluon", device, how={"tuning": SMALL}, q_lens=[1, 1], kv_lens=[40, 3], head_dim=64, **BF16)


@pytest.mark.parametrize("form", ["full", "context"])
def test_elements_of_a_head_that_are_not_adjacent(form: str, device: str) -> None:
    """In pages; those of new keys are, where memory is aligned."""
    s = build(3, **{**LENS, **BF16}, form=form, device=device)
    parts = [torch.stack((part, torch.full_like(part, torch.nan)), -1)[..., 0] for part in (s.cache.k, s.cache.v)]
    strided = replace(s, cache=KVCache.wrap(*parts, layout="nhd"))
    check("gluon", strided, *run("gluon", strided, tuning=SMALL))
