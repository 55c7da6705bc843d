"""The tensors of a workload: the same each time, safe to read for everyone, and the same keys in every form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import check
from quire.bench.case import K_SCALE, Q_SCALE, build
from quire.bench.workloads import Workload

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "bf16", q_heads=4, kv_heads=2, head_dim=16)


def test_cases_are_repeatable() -> None:
    a, b = build(SMALL), build(SMALL)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert torch.equal(a.cache.k, b.cache.k)
    assert torch.equal(a.batch.page_table, b.batch.page_table)


@pytest.mark.parametrize("format", ["", "e4m3fn"])
def test_cases_keep_the_contract(format: str) -> None:
    case = build(replace(SMALL, format=format))
    assert check(case.q, case.cache, case.batch, case.options) == []


def test_tables_can_be_read_past_their_end() -> None:
    case = build(SMALL)
    table = case.batch.page_table
    assert table.shape[1] % 8 == 0
    assert 0 <= int(table.min()) <= int(table.max()) < case.cache.pages
    used = torch.cat(case.page_lists())
    assert sorted(used.tolist()) == list(range(case.cache.pages))


@pytest.mark.parametrize("format", ["", "e4m3fn"])
def test_new_tokens_are_what_the_cache_gives_back(format: str) -> None:
    case = build(replace(SMALL, format=format))
    token = 0
    for (new, context), pages in zip(SMALL.sequences, case.page_lists()):
        k, v = case.keys_and_values(pages)
        for given, stored in ((case.k, k), (case.v, v)):
            # Equal, not close: the scales are powers of two.
            assert torch.equal(given[token : token + new].float(), stored[context : context + new].float())
        token += new
    if format:
        assert case.cache.format.name == format
        assert float(case.cache.k_scale) == K_SCALE != 1


def test_queries_are_quantised_once() -> None:
    case = build(replace(SMALL, format="e4m3fn"))
    assert case.query("bf16") is case.q
    q = case.query("e4m3fn")
    assert q.dtype is torch.float8_e4m3fn
    torch.testing.assert_close(q.float() * Q_SCALE, case.q.float(), rtol=2**-4, atol=2**-9)


def test_contestants_can_map_the_same_memory(tmp_path: Path) -> None:
    first, second, apart = (build(SMALL, folder=folder).cache for folder in (str(tmp_path), str(tmp_path), None))
    assert torch.equal(first.k, apart.k)
    first.k[0, 0] = 7.0
    assert torch.equal(second.k, first.k)
    assert not torch.equal(apart.k, first.k)


def test_a_write_starts_from_an_empty_cache() -> None:
    case = build(replace(SMALL, operation="write"))
    assert not case.cache.k.any() and not case.cache.v.any()
    assert case.batch.slots is not None and case.batch.slots.unique().numel() == SMALL.tokens
    assert case.k.shape == (SMALL.tokens, 2, 16) and not torch.equal(case.k, case.v)


def test_outputs_start_as_nan() -> None:
    assert build(SMALL).out().isnan().all()
