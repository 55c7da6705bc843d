"""Long rows cut into units, for Hopper's kernel: in which order, with which facts."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.gluon.units import FIELDS, HEADER, units_kernel
from quire.kernels.triton.launch import ANY, Plan, as_bytes
from support.scenario import build

TOKENS = 8
"""Of a query tile here: 32 rows of a group of four."""


def units_of(s, **how) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """What the kernel writes down: first how many were taken, how many there are and the short rows, then the units."""
    plan = Plan("mixed", s.q, s.cache, s.batch, s.options, s.new, s.q, **how)
    assert plan.long is not None and plan.long.TOKENS == TOKENS
    _, _, _, cache, rows, _, features = plan.arguments(s.q, s.cache, s.batch, s.options, s.new, s.q, None, at=as_bytes)
    units = torch.full((HEADER.value + 200 * FIELDS.value,), -7, dtype=torch.int32, device=s.q.device)
    units_kernel[(s.batch.seqs,)](units, rows, cache, features, plan.long, plan.constants)
    taken, count, short = units[:3].tolist()
    assert (units[HEADER.value + count * FIELDS.value :] == -7).all(), "something was written behind the last unit"
    return [[taken, count, short], *units[HEADER.value :].view(-1, FIELDS.value)[:count, :6].tolist()]


def expected(s, broken: int | None = None, most: int = ANY) -> list[list[int]]:  # type: ignore[no-untyped-def]
    starts, kv_lens = s.batch.q_starts.tolist(), s.batch.kv_lens.tolist()
    units, short = [], 0
    for row, (start, stop, kv_len) in enumerate(zip(starts, starts[1:], kv_lens)):
        q_len = stop - start
        if q_len > most:
            continue
        if q_len <= 4:
            short += q_len > 0
            continue
        tiles = -(-q_len // TOKENS)
        units += [[row, tile, start, q_len, kv_len, int(row == broken)] for tile in reversed(range(tiles))]
    return [[0, len(units), short], *units]


ROWS = {"q_lens": [1, 20, 0, 9, 33, 3], "kv_lens": [40, 60, 7, 9, 100, 3], "group": 4, "padding": 2}


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("form", ["full", "context"])
def test_units_are_in_order(form: str, index: torch.dtype, device: str) -> None:
    s = build(1, **ROWS, form=form, index=(index,) * 3, device=device)
    assert units_of(s) == expected(s)


def test_a_missing_page_is_noted(device: str) -> None:
    s = build(2, **ROWS, device=device)
    s.batch.page_table[4, 1] = s.cache.pages
    assert units_of(s) == expected(s, broken=4)
    s.batch.page_table[0, 0] = -1
    assert units_of(s) == expected(s, broken=4), "a short row is none of its business"


def test_rows_that_are_not_asked_for_have_none(device: str) -> None:
    s = build(3, **ROWS, device=device)
    assert units_of(s, only=(0, 20)) == expected(s, most=20)


def test_more_rows_than_are_scanned_at_once(device: str) -> None:
    s = build(4, [5 if row % 300 == 7 else 1 for row in range(1100)], [9] * 1100, group=4, kv_heads=1, device=device)
    assert units_of(s) == expected(s)
