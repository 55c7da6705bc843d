"""An attend over a cache with a ledger is behind the check kernel, wherever there is one; here a recorder stands for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import quire
from quire import launch
from quire.contract.call import Call
from quire.dispatch.choose import choose
from quire.platform import NAMED, Platform
from quire.problem import Extent, Problem

OPERATORS: list[Any] = [import_module(f"quire.{name}") for name in ("attend", "step")]
"""The modules; as attributes of quire these names are the functions."""


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the check kernel is given, and which positions the ledger knew by then."""
    calls: list[Any] = []

    def audit(call: Call) -> None:
        assert call.cache.ledger is not None
        calls.append((call, (call.cache.ledger.position >= 0).sum().item()))

    for operator in OPERATORS:
        monkeypatch.setattr(operator, "audit", audit)
    return calls


def engine(ledger: bool = True) -> tuple[quire.KVCache, quire.Batch, Callable[[int], torch.Tensor]]:
    pool = quire.PagePool(8, 4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32, ledger=ledger)
    return cache, pool.step({pool.sequence(): 6, pool.sequence(): 1}), lambda heads: torch.randn(7, heads, 16)


def test_a_step_is_audited_after_its_write(audits: list[Any]) -> None:
    cache, batch, tokens = engine()
    q = tokens(2)
    quire.step(q, tokens(1), tokens(1), cache, batch)
    ((call, known),) = audits
    assert (call.q is q, call.cache is cache, call.batch is batch, call.new, known) == (True, True, True, None, 7)


def test_an_attend_is_audited_in_its_own_form(audits: list[Any]) -> None:
    cache, batch, tokens = engine()
    q, new, options = tokens(2), (tokens(1), tokens(1)), quire.Options(window=3)
    quire.attend(q, cache, batch, options, new=new)
    ((call, known),) = audits
    assert (call.q is q, call.cache is cache, call.options is options, call.new is new, known) == (True, True, True, True, 0)


def test_without_a_ledger_there_is_no_audit(audits: list[Any]) -> None:
    cache, batch, tokens = engine(ledger=False)
    quire.step(tokens(2), tokens(1), tokens(1), cache, batch)
    assert audits == []


def test_without_a_check_kernel_the_call_runs_alone() -> None:
    cache, batch, tokens = engine()
    quire.step(tokens(2), tokens(1), tokens(1), cache, batch)
    assert cache.ledger is not None and cache.ledger.report() is None


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942", "gfx1100"])
def test_gpus_have_a_check_kernel(arch: str) -> None:
    pytest.importorskip("triton")
    problem = Problem(q_heads=2, kv_heads=1, head_dim=700, page_size=7)
    assert choose(problem, Extent(), Platform.named(arch), operation="audit").chosen is not None


@pytest.mark.parametrize("select", ["positions", "columns"])
def test_batches_that_select_keys_are_audited(select: str) -> None:
    pytest.importorskip("triton")
    problem = Problem(q_heads=2, kv_heads=1, head_dim=64, page_size=16, select=select)
    decision = choose(problem, Extent(), Platform.named("sm90"), operation="audit")
    assert decision.chosen is not None and decision.compiled


def test_a_ledger_that_no_kernel_can_check_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr(Platform, "detect", classmethod(lambda cls, device=None: Platform.named("sm75")))
    cache = quire.KVCache.wrap(nothing(9, 16, 1, 64), nothing(9, 16, 1, 64), layout="nhd")
    cache.ledger = object()  # type: ignore[assignment]  # nothing of it is read
    lists = (nothing(*shape, dtype=torch.int32) for shape in ((1, 8), (1,), (2,)))
    call = Call(cache, quire.Batch(*lists), nothing(1, 2, 64))
    with pytest.warns(RuntimeWarning, match=r"keeps a ledger, and no kernel compares it here .* 2/1 heads x 64"):
        launch.audit(call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.audit(call)


def test_cpus_have_none_and_say_so() -> None:
    decision = choose(Problem(q_heads=2, kv_heads=1, head_dim=64, page_size=16), Extent(), NAMED["cpu"], operation="audit")
    assert decision.chosen is None and "vendor: given cpu, allowed nvidia or amd" in str(decision)
