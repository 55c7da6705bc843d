"""Host times of a GPU, measured here over a CPU: which calls are timed, and what becomes of a peer that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import quire
from quire.bench import host_gpu
from quire.bench.figures import Figure, of_cpu_host, table
from quire.bench.host import HostTiming
from quire.bench.host_gpu import HostCall, Shape, calls, measure_gpu_host, seconds_of, shapes
from quire.bench.stream.setup import StreamModel

SMALL = StreamModel(1, 4, 2, 16, 16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    few = [Shape((1,) * n + (n + 3,), (9,) * n + (n + 3,)) for n in range(1, 5)]
    monkeypatch.setattr(host_gpu, "shapes", lambda count: few[:count])
    monkeypatch.setattr(host_gpu, "calls", lambda wanted, device, model: calls([_short(s) for s in wanted], device, model, 400))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _short(shape: Shape) -> Shape:
    """The repeated shape is too long for a test."""
    return shape if max(shape.kv_lens) < 100 else Shape((1,) * 4, (64,) * 4)


def peer() -> Callable[[HostCall], Callable[[], object]]:
    return host_gpu.attend


def test_no_shape_is_repeated() -> None:
    drawn = shapes(300)
    assert len({(len(s.q_lens), sum(s.q_lens)) for s in drawn}) == len(drawn) == 300
    assert drawn == shapes(300) != shapes(300, seed=1)
    for shape in drawn:
        assert all(1 <= q <= kv for q, kv in zip(shape.q_lens, shape.kv_lens))
    assert any(set(s.q_lens) == {1} for s in drawn) and any(max(s.q_lens) > 1000 for s in drawn)


def test_calls_are_right() -> None:
    for call in calls([Shape((1, 5), (40, 5))], "cpu", SMALL, 400):
        host_gpu.attend(call)()
        want = quire.attend(call.q, call.cache, call.batch, kernel="torch")
        torch.testing.assert_close(call.out, want, rtol=2**-6, atol=2**-6)
        host_gpu.step(call)()
        assert call.out.isfinite().all()


def test_the_device_is_idle_before_each_call() -> None:
    order: list[str] = []
    seconds = seconds_of([lambda: order.append("run")] * 3, lambda: order.append("synchronize"))
    assert order == ["synchronize", "run"] * 3 + ["synchronize"] and len(seconds) == 3


def test_figures_and_limits() -> None:
    found = {f.name: f for f in measure_gpu_host("cpu", synchronize=lambda: None, peer=peer, count=4, repeats=3, model=SMALL)}
    mine = found["attend, 4 new shapes, median"]
    assert mine.limit == found["FlashAttention-3, 4 new shapes, median"].value
    assert found["attend, decode 64 x 4096 repeated, median of 3"].limit == 15e-6
    assert found["step, decode 64 x 4096 repeated, median of 3"].limit == 25e-6
    assert all(f.value is not None and f.value > 0 for f in found.values())


def test_a_peer_that_is_not_there() -> None:
    def absent() -> Any:
        raise ImportError("no Hopper here")

    found = {f.name: f for f in measure_gpu_host("cpu", synchronize=lambda: None, peer=absent, count=2, repeats=2, model=SMALL)}
    assert found["FlashAttention-3, 2 new shapes"] == Figure(
        "FlashAttention-3, 2 new shapes", None, None, "ImportError: no Hopper here"
    )
    assert found["attend, 2 new shapes, median"].limit is None


def test_figures_as_a_table() -> None:
    rows = [Figure("attend", 40e-6, 60e-6, "38 x"), Figure("usage", 2e-6), Figure("bytes per page", 65.0, 64)]
    assert [row.passed for row in rows] == [True, None, False]
    head, lines = table(rows)
    assert all(len(line) == len(head) for line in lines)
    assert lines[0] == ("attend", "38 x", "40.0", "60.0", "pass")
    assert lines[2] == ("bytes per page", "", "65.0", "64.0", "FAIL")
    assert table([Figure("peer", None)])[1][0][2] == "not measured"
    assert rows[2].to_dict() == {
        "name": "bytes per page", "value": 65.0, "limit": 64, "note": "", "unit": "bytes", "passed": False,
    }  # fmt: skip


def timing(operation: str, seqs: int, total: float, kernel: float, operator: float) -> HostTiming:
    return HostTiming(operation, seqs, 16, total, kernel, 0.0, 0.0, 0.0, operator)


def test_rows_of_the_cpu_have_the_limits_of_their_size() -> None:
    one, beyond_one, many, beyond_many = of_cpu_host([timing("step", 1, 90.0, 20.0, 1.5), timing("attend", 256, 500.0, 400.0, 2.0)])
    assert (one.value, one.limit, one.passed) == (pytest.approx(90e-6), 100e-6, True)
    assert one.note == "60 x; kernel 20.0 us, one small torch operator 1.50 us"
    assert (beyond_one.value, beyond_one.limit) == (pytest.approx(70e-6), None)
    assert (many.limit, beyond_many.value, beyond_many.passed) == (None, pytest.approx(100e-6), False)
    assert beyond_many.note == "50 x"
