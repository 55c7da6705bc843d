"""Long rows cut into units, for Hopper's kernel: in which order, with which facts. And work that is counted."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.gluon.units import FIELDS, HEADER, units_kernel
from quire.kernels.triton.device.arguments import BatchTensors, Cache, New, Out
from quire.kernels.triton.device.features import Features
from quire.kernels.triton.device.schedule import find_sequence, total_work
from quire.kernels.triton.host.launcher import arguments_of
from quire.kernels.triton.host.program import as_bytes
from quire.problem import ANY, Extent
from support.launched import prepared
from support.scenario import build

TOKENS = 8
"""Of a query tile here: 32 rows of a group of four."""


def named(arguments):  # type: ignore[no-untyped-def]
    return tuple(record(*value) for record, value in zip((Out, Cache, BatchTensors, New, Features), arguments))


def units_of(s, **how) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """What the kernel writes down: first how many were taken, how many there are and the short rows, then the units."""
    call, launcher = prepared("mixed", s, s.q, **how)
    assert launcher.long is not None and launcher.long.TOKENS == TOKENS
    short = launcher.tiles.short[1, 1].TOKENS
    _, cache, rows, _, features = named(arguments_of(call, as_bytes, Extent.of(s.q, s.cache, s.batch), short))
    units = torch.full((HEADER.value + 200 * FIELDS.value,), -7, dtype=torch.int32, device=s.q.device)
    units_kernel[(s.batch.seqs,)](units, rows, cache, features, launcher.long, launcher.constants)
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


def test_a_missing_page_is_recorded(device: str) -> None:
    s = build(2, **ROWS, device=device)
    s.batch.page_table[4, 1] = s.cache.pages
    assert units_of(s) == expected(s, broken=4)
    s.batch.page_table[0, 0] = -1
    assert units_of(s) == expected(s, broken=4), "a short row is none of its business"


def test_excluded_sequences_have_no_units(device: str) -> None:
    s = build(3, **ROWS, device=device)
    assert units_of(s, only=(0, 20)) == expected(s, most=20)


def test_more_rows_than_are_scanned_at_once(device: str) -> None:
    s = build(4, [5 if row % 300 == 7 else 1 for row in range(1100)], [9] * 1100, group=4, kv_heads=1, device=device)
    assert units_of(s) == expected(s)


@triton.jit
def count_kernel(found, rows, at, T: tl.constexpr, C: tl.constexpr):
    tl.store(found, total_work(rows, False, T, C))
    row, begin = find_sequence(rows, at, False, T, C)
    tl.store(found + 1, row)
    tl.store(found + 2, begin)


def test_work_beyond_32_bits_is_counted(device: str) -> None:
    """A hundred rows of nearly 2^31 keys each, in a table that exists once."""
    s = build(5, [1] * 100, [2] * 100, kv_heads=1, device=device)
    # The launcher of the batch with its first table: a table that exists once is generic memory, which counts in 64 bits anyway.
    call, launcher = prepared("decode", s, s.q)
    assert launcher.problem.memory == "aligned" and not launcher.constants.WIDE
    s.batch.page_table = s.batch.page_table[:1, :1].expand(100, 2**27)
    s.batch.kv_lens.fill_(2**31 - 64)
    extent = Extent.of(s.q, s.cache, s.batch)
    assert not launcher.schedule(call, extent).fits
    constants, tile = launcher.generic.constants, launcher.generic.tiles.short[1, 1]
    assert constants.WIDE
    _, _, rows, _, _ = named(arguments_of(call, as_bytes, extent, ANY))
    found = torch.zeros(3, dtype=torch.int64, device=device)
    one = -(-(2**31 - 64) // tile.KEYS) + constants.UNIT_OVERHEAD
    at = 97 * one + 5
    assert at >= 2**31
    count_kernel[(1,)](found, rows, at, tile, constants)
    assert found.tolist() == [100 * one, 97, 97 * one]
