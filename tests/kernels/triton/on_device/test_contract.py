"""The clauses of the contract that bind kernels, and the parts of a call that only other code of ours asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import Batch
from quire.problem import ANY
from support.launched import GUARD, attend, bits, card, check, run
from support.scenario import Scenario, build

LENS: dict[str, Any] = {"q_lens": [1, 20, 0, 3], "kv_lens": [50, 37, 60, 75], "padding": 2}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "context": {"form": "context"},
    "window": {"window": 9, "form": "context"},
    "window-both-sides": {"window": (4, 4), "causal": False},
    "tree": {"mask": True, "window": 40},
    "token-scales": {"format": "int8", "scales": "token", "window": 11},
    "bf16-large-pages": {"format": "bf16", "q_dtype": "bf16", "layout": "aiter", "page_size": 64},
    "e5m2": {"format": "e5m2", "q_dtype": "bf16"},
}
BOTH = pytest.mark.parametrize("kernel", ["decode", "mixed"])


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_poison_does_not_show(name: str, kernel: str, device: str) -> None:
    """Clause 1: what is not required has no influence, to the bit."""
    clean = build(30, **LENS, **CASES[name], poison=0.0, bad_id=0, device=device)
    out, lse = run(kernel, clean)
    assert lse is not None
    check(kernel, clean, out, lse)
    for poison, bad_id in ((math.nan, -1), (math.inf, 2**31 - 1)):
        dirty = build(30, **LENS, **CASES[name], poison=poison, bad_id=bad_id, device=device)
        assert torch.equal(dirty.expected, clean.expected), "the poison reached something that is required"
        dirty_out, dirty_lse = run(kernel, dirty)
        assert torch.equal(bits(dirty_out), bits(out))
        assert torch.equal(dirty_lse, lse)


@BOTH
@pytest.mark.parametrize("name", ["full", "context", "window", "tree"])
@pytest.mark.parametrize(
    "row, bad_id, index",
    [(0, -1, torch.int32), (1, 10**9, torch.int32), (3, 2**40 + 1, torch.int64), (1, -1, torch.int64)],
    ids=str,
)
def test_a_missing_page_makes_its_row_nan(row: int, bad_id: int, index: torch.dtype, name: str, kernel: str, device: str) -> None:
    """Clause 4: it is not read, the whole row shows it, and no other row does."""
    s = build(31, **LENS, **CASES[name], index=(index, torch.int32, torch.int32), device=device)
    needed = (s.batch.page_table[row] >= 0).nonzero().flatten()
    s.batch.page_table[row, needed[-1]] = bad_id
    out, lse = run(kernel, s)
    assert lse is not None
    nan_at(s, out, lse, row)


@BOTH
@pytest.mark.parametrize("columns", [0, 2])
def test_a_short_table_makes_its_row_nan(columns: int, kernel: str, device: str) -> None:
    s = build(32, q_lens=[1, 18, 2], kv_lens=[20, 60, 2], device=device)
    s.batch.page_table = s.batch.page_table[:, :columns].contiguous()
    out, lse = run(kernel, s)
    assert lse is not None
    for row, kv_len in enumerate((20, 60, 2)):
        if kv_len > columns * 16:
            rows = slice(*s.batch.q_starts[row : row + 2].tolist())
            assert out[rows].isnan().all() and lse[rows].isnan().all()
    if columns:
        nan_at(s, out, lse, 1)


@BOTH
def test_a_length_beyond_the_table_affects_no_other_sequence(kernel: str, device: str) -> None:
    """With so many heads, the tiles of that one row are more than 32 bits count."""
    s = build(34, q_lens=[1] * 4, kv_lens=[50, 70, 20, 33], kv_heads=48, head_dim=16, device=device)
    s.batch.kv_lens[1] = 2**31 - 33
    out, lse = run(kernel, s, platform=card(device, 3))
    assert lse is not None
    nan_at(s, out, lse, 1)


@BOTH
def test_a_window_may_need_no_page(kernel: str, device: str) -> None:
    """Each query sees itself alone, and that is new: the page in which the context ends is not needed."""
    attend(kernel, device, q_lens=[40, 1], kv_lens=[62, 9], form="context", window=1, page_size=4, group=8)


@BOTH
def test_no_pages_at_all(kernel: str, device: str) -> None:
    s = build(33, q_lens=[1, 18], kv_lens=[20, 18], form="context", device=device)
    cache = type(s.cache).wrap(s.cache.k[:0], s.cache.v[:0], layout="nhd")
    out, lse = run(kernel, replace(s, cache=cache))
    assert lse is not None
    nan_at(s, out, lse, 0)


def nan_at(s: Scenario, out: torch.Tensor, lse: torch.Tensor, row: int) -> None:
    """One row is NaN, the others are right."""
    begin, end = s.batch.q_starts[row : row + 2].tolist()
    assert out[begin:end].isnan().all() and lse[begin:end].isnan().all()
    expected, weighted, expected_lse = s.expected.clone(), s.weighted.clone(), s.expected_lse.clone()
    for tensor, good in ((out, expected), (lse, expected_lse)):
        tensor[begin:end] = good[begin:end].to(tensor.dtype)
    replace(s, expected=expected, weighted=weighted).check(out, lse)


@BOTH
@pytest.mark.parametrize("with_lse", [True, False])
def test_padding_rows_can_be_zeroed(with_lse: bool, kernel: str, device: str) -> None:
    s = build(34, **LENS, device=device)
    out, lse = run(kernel, s, lse=with_lse, zero_padding=True)
    s.check(out, lse)
    assert (out[s.live :] == 0).all()
    assert lse is None or (lse[s.live :] == 0).all()


@BOTH
@pytest.mark.parametrize("fewest, most", [(1, 1), (2, ANY), (1, 2), (2, 19), (4, 20), (21, 30)])
def test_only_rows_of_some_lengths(fewest: int, most: int, kernel: str, device: str) -> None:
    s = build(35, **LENS, device=device)
    out, lse = run(kernel, s, only=(fewest, most))
    assert lse is not None
    for row, q_len in enumerate(LENS["q_lens"]):
        begin, end = s.batch.q_starts[row : row + 2].tolist()
        if not fewest <= q_len <= most:
            assert out[begin:end].isnan().all() and lse[begin:end].isnan().all(), "a row was written that was not requested"
            out[begin:end], lse[begin:end] = s.expected[begin:end].float(), s.expected_lse[begin:end].float()
    check(kernel, s, out, lse)


@BOTH
@pytest.mark.parametrize("context_from", [2, 4])
def test_rows_of_either_form_in_one_call(context_from: int, kernel: str, device: str) -> None:
    attend(kernel, device, **LENS, form="context", context_from=context_from, window=60, how={"context_from": context_from})


@BOTH
def test_same_inputs_same_bits(kernel: str, device: str) -> None:
    s = build(36, **LENS, format="bf16", q_dtype="bf16", device=device)
    (out, lse), (again, lse_again) = run(kernel, s), run(kernel, s)
    assert torch.equal(bits(out[: s.live]), bits(again[: s.live]))
    assert lse is not None and torch.equal(lse, lse_again)


@pytest.mark.parametrize("format, q_dtype", [("bf16", "bf16"), ("e4m3fn", "bf16"), ("fp32", "fp32")])
def test_batch_invariant_bits(format: str, q_dtype: str, device: str) -> None:
    """A row alone, its last queries alone, another hint, another GPU: the same bits."""
    s = build(37, [3, 25, 1], [40, 190, 70], format=format, q_dtype=q_dtype, window=(150, 0), batch_invariant=True, device=device)
    whole, lse = run("mixed", s, platform=card(device, 8))
    check("mixed", s, whole, lse)
    for last in (25, 7, 1):
        tokens = slice(28 - last, 28)
        starts = torch.tensor([0, last], dtype=torch.int32, device=device)
        alone = replace(
            s, q=s.q[tokens], batch=Batch(s.batch.page_table[1:2], s.batch.kv_lens[1:2], starts, max_q_len=last), live=last
        )
        out, _ = run("decode", alone, platform=card(device, 5))
        assert torch.equal(bits(out), bits(whole[tokens]))


def test_padding_was_guarded(device: str) -> None:
    s = build(38, **LENS, device=device)
    out, _ = run("mixed", s)
    out[-1, -1, -1] = GUARD + 8
    with pytest.raises(AssertionError, match="padding row"):
        check("mixed", s, out, None)
