"""Right results are within their budget; each kind of wrong one is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quire
from quire.bench.case import Q_SCALE, Case, build
from quire.bench.contestants import CPU_CONTESTANTS, OWN_ON_CUDA, Bound, device_copy, own
from quire.bench.truth import Truth, plain, samples
from quire.bench.workloads import Workload
from quire.cache.format import FORMATS

SMALL = Workload("small", ((1, 40), (70, 10), (1, 0)), "bf16", q_heads=4, kv_heads=2, head_dim=16)
QUANTISED = replace(SMALL, format="e4m3fn")
WINDOWED = replace(SMALL, window=13)


def bound(name: str, case: Case) -> Bound:
    found = (CPU_CONTESTANTS | OWN_ON_CUDA)[name](case)
    assert found is not None
    return found


# Not bf16: torch's own products of it can end the process on a CPU, which is why the peer has one of its own.
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["quire", "quire torch", "gather + SDPA"])
def test_contestants_are_right(name: str, dtype: str) -> None:
    case = build(replace(SMALL, dtype=dtype))
    truth = Truth(case)
    assert 0 < truth.error(bound(name, case).run()) <= truth.budget(dtype)


@pytest.mark.parametrize("workload", [WINDOWED, replace(WINDOWED, form="context"), QUANTISED], ids=lambda w: w.label)
@pytest.mark.parametrize("name", OWN_ON_CUDA)
def test_own_contestants_are_right(name: str, workload: Workload) -> None:
    case = build(workload)
    found = OWN_ON_CUDA[name](case)
    if name == "quire fp8 q" and not workload.format:
        assert found is None
        return
    assert found is not None
    truth = Truth(case)
    assert 0 < truth.error(found.run()) <= truth.budget(found.q_format)


def without_the_last_token(case: Case) -> torch.Tensor:
    out = quire.attend(case.q, case.cache, case.batch)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    out[:1] = quire.attend(case.q[:1], case.cache, quire.Batch(case.batch.page_table[:1], case.batch.kv_lens[:1] - 1, starts))
    return out


def with_a_row_copied(case: Case) -> torch.Tensor:
    out = quire.attend(case.q, case.cache, case.batch)
    out[1 + 35] = out[1 + 34]  # in the middle of the second sequence
    return out


def with_nan(case: Case) -> torch.Tensor:
    return quire.attend(case.q, case.cache, case.batch).index_fill_(0, torch.tensor([0]), torch.nan)


def of_another_head(case: Case) -> torch.Tensor:
    out = quire.attend(case.q, case.cache, case.batch)
    out[:, -1] = out[:, 0]
    return out


@pytest.mark.parametrize("fault", [without_the_last_token, with_a_row_copied, with_nan, of_another_head], ids=lambda f: f.__name__)
def test_wrong_results_exceed_the_budget(fault: object) -> None:
    case = build(SMALL)
    truth = Truth(case)
    assert callable(fault)
    assert not truth.error(fault(case)) <= truth.budget("bf16")


@pytest.mark.parametrize("window", [12, 14])
def test_a_window_off_by_one_is_seen(window: int) -> None:
    case = build(WINDOWED)
    truth = Truth(case)
    assert truth.error(quire.attend(case.q, case.cache, case.batch, quire.Options(window=window))) > truth.budget("bf16")


def test_a_lost_scale_is_seen() -> None:
    case = build(QUANTISED)
    lost = quire.KVCache.wrap(case.cache.k, case.cache.v, layout="nhd")
    truth = Truth(case)
    assert truth.error(quire.attend(case.q, lost, case.batch)) > truth.budget("bf16")


def test_quantised_queries_have_a_budget_of_their_own() -> None:
    case = build(QUANTISED)
    truth = Truth(case)
    error = truth.error(bound("quire fp8 q", case).run())
    assert truth.budget("bf16") < error <= truth.budget("e4m3fn")
    # Not a budget for anything: a doubled scale of the queries is over it.
    doubled = quire.attend(case.query("e4m3fn"), case.cache, case.batch, quire.Options(q_scale=1.0))
    assert truth.error(doubled) > truth.budget("e4m3fn")


def test_the_plain_kernel_quantises_queries() -> None:
    """So quantising them beforehand changes nothing, and not quantising them does."""
    sample = list(samples(build(QUANTISED)))[1]
    quantised = FORMATS["e4m3fn"].encode(sample.q.float() / Q_SCALE).float() * Q_SCALE
    given, before = (plain(sample._replace(q=q), "e4m3fn", torch.float32, None) for q in (sample.q, quantised))
    assert torch.equal(given, before)
    assert not torch.equal(*(plain(sample._replace(q=q), "bf16", torch.float32, None) for q in (sample.q, quantised)))


@pytest.mark.parametrize("format", ["", "e4m3fn"])
def test_writes_and_copies_are_compared_bit_for_bit(format: str) -> None:
    case = build(Workload("w", ((64, 0),), q_heads=4, kv_heads=2, head_dim=16, format=format, operation="write"))
    for contestant in (own, device_copy):
        found = contestant(case)
        assert found is not None and found.difference is not None
        assert found.difference() > 0
        moved = found.run()
        assert found.difference() == 0
    assert 2 * moved.nbytes == case.workload.bytes
    written = own(case)
    case.cache.v.view(torch.uint8)[0, 3, 1, 5] ^= 1
    assert written.difference is not None and written.difference() > 0
