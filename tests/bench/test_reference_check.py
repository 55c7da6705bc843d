"""Right results are within their budget; each kind of wrong one is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quire
from quire.bench.case import BenchCase, build
from quire.bench.implementations import CPU_IMPLEMENTATIONS, OWN_ON_CUDA, BoundImplementation, device_copy, own
from quire.bench.reference_check import QUERIES, BenchReference, expected, samples
from quire.bench.workloads import Workload
from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.budget import truth

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "bf16", q_heads=4, kv_heads=2, head_dim=16)
QUANTISED = replace(SMALL, format="e4m3fn")
WINDOWED = replace(SMALL, window=13)


def bound(name: str, case: BenchCase) -> BoundImplementation:
    found = (CPU_IMPLEMENTATIONS | OWN_ON_CUDA)[name](case)
    assert found is not None
    return found


# Not bf16: torch's own products of it can end the process on a CPU, which is why the peer has one of its own.
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["quire", "quire torch", "gather + SDPA"])
def test_implementations_are_right(name: str, dtype: str) -> None:
    case = build(replace(SMALL, dtype=dtype))
    found = BenchReference(case).check(bound(name, case).run(), dtype)
    assert 0 < found.error <= found.budget


@pytest.mark.parametrize("workload", [WINDOWED, replace(WINDOWED, form="context"), QUANTISED], ids=lambda w: w.label)
@pytest.mark.parametrize("name", ["quire", "quire fp8 q"])
def test_own_implementations_are_right(name: str, workload: Workload) -> None:
    case = build(workload)
    found = OWN_ON_CUDA[name](case)
    if name == "quire fp8 q" and not workload.format:
        assert found is None
        return
    assert found is not None
    result = BenchReference(case).check(found.run(), found.q_format)
    assert 0 < result.error <= result.budget


def without_the_last_token(case: BenchCase) -> torch.Tensor:
    out = quire.attend(case.q, case.cache, case.batch)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    out[:1] = quire.attend(case.q[:1], case.cache, quire.Batch(case.batch.page_table[:1], case.batch.kv_lens[:1] - 1, starts))
    return out


def with_a_row_copied(case: BenchCase) -> torch.Tensor:
    out = quire.attend(case.q, case.cache, case.batch)
    out[1 + 35] = out[1 + 34]  # in the middle of the second sequence
    return out


def with_nan(case: BenchCase) -> torch.Tensor:
    return quire.attend(case.q, case.cache, case.batch).index_fill_(0, torch.tensor([0]), torch.nan)


def of_another_head(case: BenchCase) -> torch.Tensor:
    out = quire.attend(case.q, case.cache, case.batch)
    out[:, -1] = out[:, 0]
    return out


@pytest.mark.parametrize("fault", [without_the_last_token, with_a_row_copied, with_nan, of_another_head], ids=lambda f: f.__name__)
def test_wrong_results_exceed_the_budget(fault: object) -> None:
    case = build(SMALL)
    assert callable(fault)
    assert not BenchReference(case).check(fault(case), "bf16").right


@pytest.mark.parametrize("window", [12, 14])
def test_a_window_off_by_one_is_seen(window: int) -> None:
    case = build(WINDOWED)
    out = quire.attend(case.q, case.cache, case.batch, quire.Options(window=window))
    assert not BenchReference(case).check(out, "bf16").right


def test_a_lost_scale_is_seen() -> None:
    case = build(QUANTISED)
    lost = quire.KVCache.wrap(case.cache.k, case.cache.v, layout="nhd")
    assert not BenchReference(case).check(quire.attend(case.q, lost, case.batch), "bf16").right


def test_quantised_queries_have_a_reference_of_their_own() -> None:
    case = build(QUANTISED)
    reference = BenchReference(case)
    out = bound("quire fp8 q", case).run()
    assert reference.check(out, "e4m3fn").right and not reference.check(out, "bf16").right
    # Not a budget for anything: a doubled scale of the queries is over it.
    doubled = quire.attend(case.query("e4m3fn"), case.cache, case.batch, quire.Options(q_scale=1.0))
    assert not reference.check(doubled, "e4m3fn").right


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_budget_is_that_of_the_conformance_kit(dtype: str) -> None:
    """A sequence that is compared whole has, element by element, the budget that `quire conform` gives the same call."""
    case = build(Workload("whole", ((QUERIES, 30),), dtype, q_heads=4, kv_heads=2, head_dim=16))
    (part,) = samples(case, case.q)
    (ours,) = expected([part], case.q.dtype)
    call = KernelCall(
        q=case.q,
        k_pages=case.cache.k,
        v_pages=case.cache.v,
        page_table=case.batch.page_table,
        kv_lens=case.batch.kv_lens,
        q_starts=case.batch.q_starts,
        out=case.out(),
        scale=case.q.shape[2] ** -0.5,
        format=dtype,
    )
    kit = truth(call)
    assert torch.equal(ours.out, kit.outcome.out) and torch.equal(ours.budget, kit.budget)
    # The element that is reported is the one that is farthest beyond its own budget, not the one with the largest error.
    out = kit.outcome.out.clone()
    at, other = int(kit.budget.argmin()), int(kit.budget.argmax())
    out.view(-1)[at] += 3 * kit.budget.view(-1)[at]
    out.view(-1)[other] += 2 * kit.budget.view(-1)[other]
    found = BenchReference(case).check(out, dtype)
    assert found.share == pytest.approx(3.0, rel=1e-6) and found.budget == float(kit.budget.min())


@pytest.mark.parametrize("format", ["", "e4m3fn"])
def test_writes_and_copies_are_compared_bit_for_bit(format: str) -> None:
    case = build(Workload("w", ((64, 0),), q_heads=4, kv_heads=2, head_dim=16, format=format, operation="write"))
    for implementation in (own, device_copy):
        found = implementation(case)
        assert found is not None and found.difference is not None
        assert found.difference() > 0
        moved = found.run()
        assert found.difference() == 0
    assert 2 * moved.nbytes == case.workload.bytes
    written = own(case)
    case.cache.v.view(torch.uint8)[0, 3, 1, 5] ^= 1
    assert written.difference is not None and written.difference() > 0
