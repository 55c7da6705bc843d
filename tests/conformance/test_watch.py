"""`quire.checked(results=True)`: a wrong result raises where it is made, with the fault's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire.conformance.record import load
from quire.conformance.watch import Judge, WrongResult
from quire.contract.call import Call
from quire.contract.check import recorded_by
from quire.launch import launcher_for


@pytest.fixture
def call() -> dict[str, Any]:
    torch.manual_seed(0)
    pool = quire.PagePool(pages=16, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float16)
    q, k, v = torch.randn(12, 8, 16).half().split((4, 2, 2), 1)
    batch = pool.step({pool.sequence(): 7, pool.sequence(): 5})
    quire.write(k, v, cache, batch)
    return {"q": q, "cache": cache, "batch": batch}


def test_a_right_result_passes(call: dict[str, Any]) -> None:
    with quire.checked(results=True):
        out, lse = quire.attend(**call, options=quire.Options(window=4, sinks=torch.randn(4)), lse=True)
    assert out.isfinite().all() and lse.isfinite().all()


def test_a_wrong_result_is_named(call: dict[str, Any]) -> None:
    """A kernel that takes a window of four keys for three."""
    q, cache, batch = call["q"], call["cache"], call["batch"]
    asked, taken = quire.Options(window=4), quire.Options(window=3)
    watched = Call(cache, batch, q, asked, out=torch.zeros_like(q))
    honest = launcher_for("attend", replace(watched, options=taken))

    def narrow(call: Call) -> None:
        honest(replace(call, options=taken))

    judge = Judge()
    run = judge.around("attend", narrow, quire.explain(q, cache, batch))
    with pytest.raises(WrongResult, match="window-left-off") as caught, recorded_by(judge):
        run(watched)
    run(watched)  # nobody watches now
    with recorded_by(judge):
        run(replace(watched, only=(1, 1)))  # a mixture is no call of ours
    assert judge.around("write", narrow, quire.explain(q, cache, batch)) is narrow
    assert caught.value.finding.fault == "window-left-off" and caught.value.verdict.wrong > 0
    assert isinstance(caught.value, quire.QuireError)


def test_it_stands_beside_a_recording(call: dict[str, Any], tmp_path: Path) -> None:
    with quire.record(tmp_path / "call"), quire.checked(results=True):
        quire.attend(**call)
    assert len(load(tmp_path / "call")) == 1


def test_without_it_nothing_is_computed_twice(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "around", lambda *_: pytest.fail("asked"))
    with quire.checked():
        quire.attend(**call)
    with pytest.raises(quire.ArgumentError, match=r"^results: "), quire.checked(results=1):
        pass
