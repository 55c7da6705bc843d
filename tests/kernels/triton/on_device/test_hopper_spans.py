"""Spans and shards in Hopper's kernel: as test_hopper.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.triton.host.tuning import SMALL_GLUON
from support.launched import attend, check, needs_hopper, run
from support.scenario import Scenario, build

pytestmark = needs_hopper
SMALL = SMALL_GLUON._replace(long_keys=32)
BF16: dict[str, Any] = {"format": "bf16", "q_dtype": "bf16", "head_dim": 64, "group": 4}
E4M3: dict[str, Any] = {"format": "e4m3fn"}
LENS: dict[str, Any] = {"q_lens": [1, 40, 20, 0], "kv_lens": [5, 60, 90, 7], "padding": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"spans": "causal"},
    "images": {"spans": "images", "alibi": True},
    "images-of-256": {"spans": "images", "head_dim": 256, "kv_heads": 1, "page_size": 32},
    "images-context": {"spans": "images", "form": "context", "page_size": 8},
    "prefix-group-5": {"spans": "prefix", "group": 5, "page_size": 7, "softcap": 5.0},
    "chunks-bytes": {"spans": "chunks", **E4M3},
    "any": {"spans": "any", "sinks": True, "index": (torch.int64,) * 3},
    "any-context-pages-of-1": {"spans": "any", "form": "context", "page_size": 1},
    "any-bytes-pages-of-8": {"spans": "any", "page_size": 8, **E4M3},
    "any-heads-of-34": {"spans": "any", "head_dim": 34},
    "shard": {"shard": (1, 3, 5)},
    "shard-window-context": {"shard": (0, 2, 16), "form": "context", "window": (15, 4), "causal": "mixed", "alibi": True},
    "shard-bytes": {"shard": (1, 2, 1), "page_size": 1, **E4M3},
    "shard-any-context": {"shard": (1, 2, 16), "spans": "any", "form": "context", "alibi": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, device: str) -> None:
    attend("gluon", device, how={"tuning": SMALL}, **{**LENS, **BF16, **FEATURES[name]})


def hopper(s: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = run("gluon", s, tuning=SMALL)
    assert lse is not None
    return out, lse


def test_tiles_that_every_query_sees(device: str) -> None:
    """They are computed without a mask, between those that only some queries see."""
    spans = [(3 * i, 190 + i) for i in range(20)]
    attend("gluon", device, how={"tuning": SMALL}, q_lens=[20], kv_lens=[210], page_size=4, spans=spans, **BF16)


@pytest.mark.parametrize("format", ["bf16", "e4m3fn"])
@pytest.mark.parametrize("page_size", [4, 8])
def test_gaps_are_not_read(page_size: int, format: str, device: str) -> None:
    """Keys between the spans of a tile are NaN, and have no entry in the table."""
    spans = [(3, 20), (100, 108), (5, 5)] * 7
    s = build(2, [1, 20], [120, 120], spans=spans, page_size=page_size, device=device, **{**BF16, "format": format})
    assert (s.batch.page_table[1, 24 // page_size : 96 // page_size] == -1).all()
    check("gluon", s, *hopper(s))


def test_a_span_that_ends_where_another_begins_leaves_no_gap(device: str) -> None:
    """Nor does one that a longer one hides. All of their keys are seen by some query, none by all."""
    spans = [(0, 64), (64, 80), (80, 128), (90, 100), (96, 160)] * 4
    attend("gluon", device, how={"tuning": SMALL}, q_lens=[20], kv_lens=[160], page_size=8, spans=spans, **BF16)


@pytest.mark.parametrize("spans", [[(8, 60)] * 20, [(8, 40), (64, 90)] * 10], ids=["without gaps", "with gaps"])
@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_missing_page_gives_nan(page: int, spans: list[tuple[int, int]], device: str) -> None:
    """To the units that see it. Nothing is read out of bounds."""
    s = build(3, [20, 20], [60, 90], spans=[(0, 60)] * 20 + spans, page_size=4, device=device, **BF16)
    s.batch.page_table[1][s.batch.page_table[1] == -1] = page  # no span reaches these
    check("gluon", s, *hopper(s))
    s.batch.page_table[1, 7] = page
    out, lse = hopper(s)
    assert out[20:].isnan().all() and lse[20:].isnan().all()
    out[20:], lse[20:], s.expected[20:], s.expected_lse[20:] = 0.0, 0.0, 0.0, 0.0
    check("gluon", s, out, lse)


def test_a_table_that_ends_before_the_context(device: str) -> None:
    """It is right if no span needs the rest, also if a token sees keys on both sides. A span that needs it gives NaN."""
    spans = [(2, 8), *[(185, 200)] * 17, (6, 12), (199, 200)]
    s = build(4, [20], [200], form="context", page_size=4, device=device, spans=spans, **BF16)
    s.batch.page_table = s.batch.page_table[:, :3].contiguous()
    check("gluon", s, *hopper(s))
    s.batch.spans[0] = torch.tensor([0, 13])  # type: ignore[index]
    assert hopper(s)[0].isnan().all()


def test_a_table_that_ends_before_the_last_key(device: str) -> None:
    s = build(5, [18, 18], [300, 300], spans=[(4, 11)] * 36, page_size=4, device=device, **BF16)
    s.batch.page_table = s.batch.page_table[:, :3].contiguous()
    check("gluon", s, *hopper(s))
    s.batch.spans[20] = torch.tensor([290, 300])  # type: ignore[index]
    out, _ = hopper(s)
    assert out[18:].isnan().all() and not out[:18].isnan().any()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_span_outside_of_the_sequence_is_clipped(index: torch.dtype, device: str) -> None:
    s = build(6, [18], [50], spans=[(0, 50)] * 4 + [(5, 50)] * 14, page_size=4, index=(index,) * 3, device=device, **BF16)
    s.batch.spans[3] = torch.tensor([torch.iinfo(index).min, torch.iinfo(index).max])  # type: ignore[index]
    s.batch.spans[4:, 1] = torch.iinfo(index).max  # type: ignore[index]
    check("gluon", s, *hopper(s))


def test_new_keys_alone_need_no_page(device: str) -> None:
    """Nor if keys of the context, which no query sees, would be in the same page."""
    s = build(7, [20], [50], form="context", spans=[(30, 31 + i) for i in range(20)], page_size=16, device=device, **BF16)
    assert (s.batch.page_table == -1).all()
    check("gluon", s, *hopper(s))


def test_no_query_sees_a_key(device: str) -> None:
    attend("gluon", device, how={"tuning": SMALL}, q_lens=[20], kv_lens=[90], spans=[(50, 50), (80, 3)] * 10, **BF16)


def test_units_of_long_sequences(device: str) -> None:
    """Several programs list the units of a sequence; each has keys of its own."""
    spans = [(max(0, i // 32 * 32 - 32), i + 1) for i in range(170)]
    attend("gluon", device, how={"tuning": SMALL}, q_lens=[170], kv_lens=[170], kv_heads=1, spans=spans, **BF16)
