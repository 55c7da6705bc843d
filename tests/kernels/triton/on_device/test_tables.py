"""Page tables that are narrower than the lengths: valid if no query sees a key beyond them, and then not read there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import Batch
from support.launched import check, run
from support.scenario import Scenario, build

KERNELS = ("decode", "mixed")
HIDDEN: dict[str, dict[str, Any]] = {
    "window-of-one": {"window": 1},
    "to-the-right": {"window": (0, 3), "causal": False},
    "per-sequence": {"window": (0, 2), "causal": "mixed"},
    "tree": {"window": 1, "mask": True},
    "invariant": {"window": 1, "batch_invariant": True},
    "invariant-tree": {"window": 1, "mask": True, "batch_invariant": True},
}
"""Options under which no query sees a cached key in context form."""


def narrowed(s: Scenario, columns: int) -> Scenario:
    """The same call with a table of so many columns, in memory that holds no more."""
    batch = s.batch
    s.batch = Batch(batch.page_table[:, :columns].clone(), batch.kv_lens, batch.q_starts)
    return s


@pytest.mark.parametrize("options", HIDDEN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_column_at_all(kernel: str, options: str, device: str) -> None:
    """Short sequences, one with a context of several tiles, and one whose new tokens fill a tile of long ones."""
    wide: dict[str, Any] = {"index": (torch.int64,) * 3} if options == "window-of-one" else {}
    s = build(3, [1, 19], [70, 20], form="context", device=device, kv_heads=1, group=1, page_size=32, **wide, **HIDDEN[options])
    narrowed(s, 0)
    check(kernel, s, *run(kernel, s))


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_sequence_needs_a_column(kernel: str, device: str) -> None:
    """The window reaches one token back: the first sequence has one in the cache, and the table has its column alone. The others
    have no context, or a context that the table has no column for: that one is NaN, and no other."""
    s = build(4, [1, 3, 2], [9, 3, 90], form="context", device=device, kv_heads=1, group=1, window=(1, 0), padding=1)
    narrowed(s, 1)
    out, lse = run(kernel, s)
    assert lse is not None
    assert out[4:6].isnan().all() and lse[4:6].isnan().all(), "a sequence whose page has no column is not NaN"
    out[4:6], lse[4:6] = s.expected[4:6].to(out.dtype), s.expected_lse[4:6].to(lse.dtype)
    check(kernel, s, out, lse)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tree_that_sees_its_context_needs_it(kernel: str, device: str) -> None:
    """Without a window, a tree sees its whole context: without columns it is NaN."""
    s = build(5, [3, 2], [3, 70], form="context", device=device, kv_heads=1, group=1, mask=True)
    narrowed(s, 0)
    out, lse = run(kernel, s)
    assert lse is not None
    assert out[3:5].isnan().all() and lse[3:5].isnan().all(), "a tree without its context is not NaN"
    out[3:5], lse[3:5] = s.expected[3:5].to(out.dtype), s.expected_lse[3:5].to(lse.dtype)
    check(kernel, s, out, lse)
