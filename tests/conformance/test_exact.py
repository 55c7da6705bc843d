"""The exact computation agrees with `quire.reference`, and reads caches in the layouts of `quire.cache`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire import reference
from quire.conformance.cases.build import build
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.cases.suite import cases_of
from quire.conformance.oracle.exact import exact
from quire.conformance.runner.threads import one_thread
from support import ds_mla

SMALL = [
    case
    for case in (*cases_of("smoke"), *cases_of("standard"))
    if case.table not in ("far", "very-far", "high") and max(case.kv_lens) < 500
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def selected_positions(call: KernelCall, seq: int, rows: slice, kv_len: int) -> torch.Tensor | None:
    """The selection of a sequence as the reference takes it."""
    if call.select_positions is not None:
        return call.select_positions[rows]
    if call.select_columns is None:
        return None
    columns, size = call.select_columns[seq], call.page_size
    at = torch.where(columns < 0, -1, columns * size)[..., None] + torch.arange(size)
    at = torch.where((columns < 0)[..., None] | (at >= kv_len), -1, at).flatten(1)
    return at.expand(rows.stop - rows.start, -1, -1)


def hadamard_matrix(n: int) -> torch.Tensor:
    """Sylvester's matrix of ±1 / sqrt(n), float64 `[n, n]`."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * 0.5**0.5, hadamard_matrix(n // 2))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_exact_computation_equals_the_reference(case: Case) -> None:
    call = build(case)
    cache, got = call.cache(), exact(call)
    dense = []
    parts = (
        (cache.k_view, cache.k_groups, cache.k_scale, cache.k_format),
        (cache.v_view, cache.v_groups, cache.v_scale, cache.v_format),
    )
    for view, groups, scale, format in parts:
        rows = [part.flatten(4).flatten(2, 3).transpose(1, 2) for part in (view, groups) if part is not None]
        stored = (torch.cat(rows, -1) if len(rows) > 1 else rows[0].contiguous()).view(format.dtype)
        numbers = (stored if format.uniform else format.unpack(stored)).double()
        if format.latent:
            numbers = ds_mla.decoded(stored)  # not rounded to fp32
        if scale is not None:
            factor, zero = format.parts_of(scale[..., None] if scale.dim() == 3 else scale.reshape(-1, 1))
            numbers = (numbers if zero is None else numbers - zero) * factor.double()
        dense.append(numbers)
    if call.hadamard:  # The matrix is its own inverse.
        dense[0] = dense[0] @ hadamard_matrix(case.head_dim)
    starts = call.q_starts.tolist()
    for i, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens)):
        rows = slice(starts[i], starts[i + 1])
        rank, ranks, interleave = case.shard
        cached = kv_len if call.new is None else kv_len - q_len
        # The positions in the cache, in order: the n-th of them is the n-th key of the pages. Others stay zero.
        at = torch.tensor([p for p in range(cached) if p // interleave % ranks == rank], dtype=torch.long)
        key = torch.arange(len(at))
        # A table may end with the last page that is read.
        column = (key // case.page_size).clamp(max=max(call.page_table.shape[1] - 1, 0))
        page = call.page_table[i].long()[column].clamp(min=0)
        k, v = (torch.zeros(max(cached, 0), *pages.shape[2:], dtype=torch.float64) for pages in dense)
        k[at], v[at] = (pages[page, key % case.page_size] for pages in dense)
        if call.new is not None:
            k, v = (torch.cat((x, fresh[rows].double())) for x, fresh in zip((k, v), (call.new_k, call.new_v)))
        want, lse = reference.attention(
            call.q[rows].double() * (call.q_scale or 1.0),
            k,
            v,
            scale=call.scale,
            causal=bool(call.causal[i]) if isinstance(call.causal, torch.Tensor) else call.causal,
            window=call.window,
            softcap=call.softcap,
            alibi=call.alibi,
            sinks=call.sinks,
            mask=None if call.mask is None else call.mask[rows],
            positions=None if call.positions is None else call.positions[rows],
            shard=call.shard,
            spans=None if call.spans is None else call.spans[rows],
            select=selected_positions(call, i, rows, kv_len),
        )
        torch.testing.assert_close(got.out[rows], want, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got.lse[rows], lse, rtol=1e-10, atol=1e-12)
    assert not got.written[call.live :].any()
