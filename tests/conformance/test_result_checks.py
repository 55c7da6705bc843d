"""`quire.checked(results=True)`: a wrong result raises where it is made, with the fault's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire.conformance.recording.record import load
from quire.conformance.recording.replay import here, then
from quire.conformance.recording.result_checks import Judge, WrongResult
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


def test_a_correct_result_passes(call: dict[str, Any]) -> None:
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


def test_it_works_inside_a_recording(call: dict[str, Any], tmp_path: Path) -> None:
    with quire.record(tmp_path / "call"), quire.checked(results=True):
        quire.attend(**call)
    assert len(load(tmp_path / "call")) == 1


def test_without_it_nothing_is_computed_twice(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "around", lambda *_: pytest.fail("asked"))
    with quire.checked():
        quire.attend(**call)
    with pytest.raises(quire.ArgumentError, match=r"^results: "), quire.checked(results=1):
        pass


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in every second element of another tensor, from the second on."""
    wide = torch.zeros(2 * tensor.numel() + 1, dtype=tensor.dtype)
    view = wide[1::2][: tensor.numel()].view(tensor.shape) if tensor.dim() == 1 else wide[1::2].reshape(tensor.shape)
    return view.copy_(tensor)


LEGAL: dict[str, Any] = {
    "strided index tensors": lambda b: {"batch": quire.Batch(b.page_table, strided(b.kv_lens), strided(b.q_starts))},
    "index tensors within a larger one": lambda b: {
        "batch": quire.Batch(b.page_table, torch.cat((b.kv_lens[:1], b.kv_lens))[1:], torch.cat((b.q_starts[:1], b.q_starts))[1:])
    },
    "strided sinks": lambda b: {"options": quire.Options(sinks=strided(torch.randn(4)))},
    "strided slopes of 16 bits": lambda b: {"options": quire.Options(alibi=strided(torch.rand(4).half()))},
    "an fp8 output": lambda b: {"options": quire.Options(out_scale=0.01)},
    "an fp8 output whose scale is a tensor": lambda b: {"options": quire.Options(out_scale=torch.tensor(0.25))},
    "an fp8 output that saturates": lambda b: {"options": quire.Options(out_scale=1e-4)},
    "an fp8 output in a given buffer": lambda b: {
        "options": quire.Options(out_scale=0.5), "out": torch.zeros(12, 4, 16).to(torch.float8_e5m2)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_call_passes(call: dict[str, Any], name: str) -> None:
    with quire.checked(results=True):
        quire.attend(**call | LEGAL[name](call["batch"]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_of_one_strided_sequence_passes(dtype: torch.dtype) -> None:
    cache = quire.KVCache.wrap(torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8), layout="nhd")
    lens = torch.tensor([3, 99], dtype=dtype)[::2]  # one element, and a stride of two
    batch = quire.Batch(torch.tensor([[1]]), lens, torch.tensor([0, 1]))
    with quire.checked(results=True):
        quire.attend(torch.randn(1, 1, 8), cache, batch, quire.Options(sinks=torch.randn(2)[::2]))


def test_a_table_without_columns_passes() -> None:
    """In context form with nothing cached, or nothing cached in sight."""
    cache = quire.KVCache.wrap(torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8), layout="nhd")
    q, k, v = torch.randn(3, 3, 1, 8)
    for kv_len, options in ((3, quire.Options()), (9, quire.Options(window=1))):
        batch = quire.Batch(torch.zeros(1, 0, dtype=torch.int32), torch.tensor([kv_len]), torch.tensor([0, 3]))
        with quire.checked(results=True):
            quire.attend(q, cache, batch, options, new=(k, v))


@pytest.mark.parametrize("out_scale", [0.02, torch.tensor(0.004)])
def test_a_wrong_result_under_out_scale_is_named(call: dict[str, Any], out_scale: Any) -> None:
    q, cache, batch = call["q"], call["cache"], call["batch"]
    asked, taken = (quire.Options(window=window, out_scale=out_scale) for window in (4, 3))
    honest = launcher_for("attend", Call(cache, batch, q, taken))
    judge = Judge()
    run = judge.around("attend", lambda made: honest(replace(made, options=taken)), quire.explain(q, cache, batch, asked))
    with pytest.raises(WrongResult, match="window-left-off"), recorded_by(judge):
        run(Call(cache, batch, q, asked, None, torch.zeros(12, 4, 16).to(torch.float8_e4m3fn)))


def test_a_recorded_call_with_out_scale_is_correct(call: dict[str, Any], tmp_path: Path) -> None:
    with quire.record(tmp_path / "call"):
        quire.attend(**call, options=quire.Options(out_scale=0.01))
    (recorded,) = load(tmp_path / "call")
    assert (then(recorded).status, here(recorded).status) == ("correct", "correct")
    assert recorded.out is not None
    recorded.out.view(torch.uint8)[3] ^= 0x40  # another exponent
    assert then(recorded).status == "wrong"
