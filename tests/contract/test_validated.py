"""A batch is validated once, and again after torch changed it. A change that torch did not see gives NaN, never a crash."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import quire
from quire import Batch, ContractError, KVCache, Options
from quire.contract import validated
from quire.kernels.native.library import FILE
from support.scenario import build

KERNELS = ["torch", *(["native"] if FILE.exists() else [])]
LENS: dict[str, Any] = {"q_lens": [1, 4, 0, 40], "kv_lens": [20, 9, 5, 60]}


@pytest.fixture(params=["native", "rules"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each question that was asked about values, whether it was about the whole batch. With the library and without."""
    if request.param == "rules":
        monkeypatch.setattr(validated, "_loaded", [None])
    elif not FILE.exists():
        pytest.skip("there is no library here")
    found: list[bool] = []
    plain = validated._is_legal

    def noted(call: Any, whole: bool) -> bool:
        found.append(whole)
        return plain(call, whole)

    monkeypatch.setattr(validated, "_is_legal", noted)
    return found


def test_layers_ask_once(asked: list[bool]) -> None:
    s = build(70, **LENS)
    other = KVCache.wrap(s.cache.k.clone(), s.cache.v.clone(), layout="nhd")
    for cache in (s.cache, other, s.cache, other):
        s.check(quire.attend(s.q, cache, s.batch))
    assert asked == [True]
    quire.attend(s.q, s.cache, s.batch, Options(window=3))
    quire.attend(s.q, other, s.batch, Options(window=3))
    quire.attend(s.q, other, s.batch, Options())
    assert asked == [True, True]


def test_a_step_asks_once_and_the_holders_of_pages_every_time(asked: list[bool]) -> None:
    pool = quire.PagePool(8, 4)
    caches = [KVCache.allocate(pool, kv_heads=1, head_dim=4, dtype=torch.float32) for _ in range(3)]
    first = pool.sequence()
    batch = pool.step({first: 3})
    q, k = torch.ones(3, 2, 4), torch.ones(3, 1, 4)
    for cache in caches:
        quire.step(q, k, k, cache, batch)
    assert asked == [True, False, False]
    pool.fork(first)
    with pytest.raises(ContractError, match="which 2 sequences hold"):
        quire.step(q, k, k, caches[0], batch)


def test_scales_are_looked_at_in_every_layer(asked: list[bool]) -> None:
    for kind in ("head", "token"):
        s = build(71, **LENS, format="e4m3fn", scales=kind)
        quire.attend(s.q, s.cache, s.batch)
        assert s.cache.v_scale is not None
        s.cache.v_scale.fill_(0.0)
        with pytest.raises(ContractError, match="v_scale"):
            quire.attend(s.q, s.cache, s.batch)
    assert asked == [True, False] * 2


@pytest.mark.parametrize("change", ["cell", "length", "start", "tensor", "rows of q", "pages", "causal"])
def test_what_changes_is_looked_at_again(change: str, asked: list[bool]) -> None:
    causal = torch.tensor([True, False, True, True])
    s = build(72, [1, 4, 0, 3], [20, 4, 5, 37])
    q, cache, batch, options = s.q, s.cache, s.batch, Options(causal=causal)
    if change == "causal":
        batch.kv_lens[1] = 3
    quire.attend(q, cache, batch, options)
    if change == "cell":
        batch.page_table[3, 1] = -1
    elif change == "length":
        batch.kv_lens[3] = 2
    elif change == "start":
        batch.q_starts[1:3] = 6
    elif change == "tensor":
        batch.page_table = batch.page_table.clone().fill_(99)
    elif change == "rows of q":
        q = q[:7]
    elif change == "pages":
        cache = KVCache.wrap(cache.k[:1], cache.v[:1], layout="nhd")
    else:
        causal[1] = True
    with pytest.raises(ContractError):
        quire.attend(q, cache, batch, options)
    assert asked == [True, True]


def test_inference_tensors_are_looked_at_in_every_call(asked: list[bool]) -> None:
    s = build(73, **LENS)
    with torch.inference_mode():
        batch = Batch(s.batch.page_table.clone(), s.batch.kv_lens.clone(), s.batch.q_starts.clone())
        for _ in range(2):
            s.check(quire.attend(s.q, s.cache, batch))
        assert asked == [True, True]
        batch.page_table[3, 0] = -1
        with pytest.raises(ContractError, match=r"page_table\[3, 0\]"):
            quire.attend(s.q, s.cache, batch)


def test_spans_are_looked_at_once_and_again_when_they_change(asked: list[bool]) -> None:
    s = build(74, **LENS, spans="chunks")
    assert s.batch.spans is not None
    for _ in range(2):
        s.check(quire.attend(s.q, s.cache, s.batch))
    other = s.batch.with_spans(None).with_spans(s.batch.spans)
    s.check(quire.attend(s.q, s.cache, other))
    assert asked == [True], "the other batch shares what is known"
    s.batch.spans[3, 1] = 10
    for batch in (s.batch, other):
        with pytest.raises(ContractError, match=r"spans\[3\]"):
            quire.attend(s.q, s.cache, batch)
    assert asked == [True] * 3


def test_a_tree_is_looked_at_again_when_its_mask_changes(asked: list[bool]) -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:, 0] = True
    cache = KVCache.wrap(torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2, 8), layout="nhd")
    batch = Batch(torch.tensor([[1]]), torch.tensor([4]), torch.tensor([0, 4]))
    options = Options(mask=mask)
    for _ in range(2):
        quire.attend(torch.ones(4, 4, 8), cache, batch, options)
    assert asked == [True]
    mask[0, 3] = True
    with pytest.raises(ContractError, match="page_table"):
        quire.attend(torch.ones(4, 4, 8), cache, batch, options)


# What torch did not see.

UNSEEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 12},
    "context": {"form": "context"},
    "non-causal": {"causal": False},
    "bf16": {"q_dtype": "bf16", "format": "bf16"},
    "head-scales": {"format": "e4m3fn", "scales": "head"},
    "tree": {"mask": True},
    "tree-window": {"mask": True, "window": 5},
    "out-fp8": {"out_scale": 0.5},
    "int64": {"index": (torch.int64,) * 3},
}


def changed(s: Any, options: Options, kernel: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """After a legal call, for each change through numpy: its name, the rows that must be NaN, the results before and after."""
    arguments: dict[str, Any] = {"new": s.new, "lse": True, "kernel": kernel}
    before = quire.attend(s.q, s.cache, s.batch, options, **arguments)
    batch = s.batch
    starts = batch.q_starts.tolist()
    table, lens, at = batch.page_table.numpy(), batch.kv_lens.numpy(), batch.q_starts.numpy()
    everything = slice(0, len(s.q))
    last = slice(starts[3], starts[4])
    column = (int(batch.kv_lens[3]) - 41) // s.cache.page_size
    places = [
        *(("cell", table, (3, column), value, last) for value in (-5, s.cache.pages, 2**31 - 1)),
        *(("length", lens, 3, value, last) for value in (-7, 2**31 - 1)),
        *(("length", lens, 0, value, slice(0, 1)) for value in (-1, 2**31 - 1)),
        *(("start", at, 1, value, everything) for value in (-3, 10**6, starts[3] + 1)),
        ("start", at, 4, 10**6, everything),
        ("start", at, 0, 1, everything),
    ]
    versions = [t._version for t in (batch.page_table, batch.kv_lens, batch.q_starts)]
    for name, memory, where, value, rows in places:
        kept = memory[where]
        memory[where] = value
        after = quire.attend(s.q, s.cache, batch, options, **arguments)
        memory[where] = kept
        nan = torch.zeros(len(s.q), dtype=torch.bool)
        nan[rows] = True
        yield f"{name} {value}", nan, before[0].float(), after[0].float(), after[1]
    assert versions == [t._version for t in (batch.page_table, batch.kv_lens, batch.q_starts)]


CASES = [
    (name, kernel) for name in UNSEEN for kernel in KERNELS if kernel == "native" or name in ("plain", "context", "tree-window")
]


@pytest.mark.parametrize("name, kernel", CASES)
def test_what_torch_did_not_see_becomes_nan(name: str, kernel: str) -> None:
    s = build(74, **LENS, **UNSEEN[name])
    for change, nan, before, after, lse in changed(s, s.options, kernel):
        assert after[nan].isnan().all() and lse[nan].isnan().all(), change
        assert torch.equal(after[~nan], before[~nan]), change
    with pytest.raises(ContractError):
        s.batch.page_table.numpy()[3, 0 if s.options.window is None else 2] = -1
        quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, check="full")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_slot_that_torch_did_not_see_is_skipped(kernel: str) -> None:
    cache = KVCache.wrap(torch.zeros(4, 4, 1, 8), torch.zeros(4, 4, 1, 8), layout="nhd")
    batch = Batch(torch.tensor([[0], [1], [2]]), torch.tensor([2, 2, 2]), torch.tensor([0, 2, 4, 6]))
    k = torch.ones(6, 1, 8)
    quire.write(k, k, cache, batch, kernel=kernel)
    table, lens, starts = (t.numpy() for t in (batch.page_table, batch.kv_lens, batch.q_starts))
    for memory, where, value in (
        (table, (1, 0), 4),
        (table, (1, 0), -2),
        (table, (1, 0), 2**60),
        (lens, 1, -5),
        (lens, 1, 2**62),
        (starts, 3, 10**6),
        (starts, 1, -4),
    ):
        kept = memory[where]
        memory[where] = value
        cache.k.zero_()
        quire.write(k, k, cache, batch, kernel=kernel)
        memory[where] = kept
        written = cache.k.view(16, 8).any(1)
        assert written.sum() <= 6 and not written[12:].any()
        if memory is not starts:
            assert written[[0, 1, 8, 9]].all() and not written[[4, 5]].any()


# Threads.


def test_threads_share_a_batch() -> None:
    """More kinds of calls than a batch remembers, from many threads: each result is that of a thread alone."""
    s = build(75, **LENS)
    windows = [None, *range(1, 24)]
    alone = [quire.attend(s.q, s.cache, s.batch, Options(window=w)) for w in windows]
    fresh = Batch(s.batch.page_table, s.batch.kv_lens, s.batch.q_starts)
    start = threading.Barrier(4)

    def work(first: int) -> bool:
        start.wait()
        order = windows[first:] + windows[:first]
        return all(torch.equal(quire.attend(s.q, s.cache, fresh, Options(window=w)), alone[windows.index(w)]) for w in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, (0, 6, 12, 18)))
    assert len(fresh.validated.calls) <= validated._MOST


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_thread_that_changes_a_batch_while_others_use_it(kernel: str) -> None:
    """A call then is refused, or right, or NaN where the change is; nothing else, and no crash."""
    s = build(76, [1, 4], [20, 30])
    good = quire.attend(s.q, s.cache, s.batch, kernel=kernel)
    held = int(s.batch.page_table[1, 0])
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            s.batch.page_table[1, 0] = -1
            s.batch.page_table[1, 0] = held

    other = threading.Thread(target=disturb)
    other.start()
    seen = set()
    try:
        for _ in range(200 if kernel == "native" else 25):
            try:
                out = quire.attend(s.q, s.cache, s.batch, kernel=kernel)
            except ContractError:
                seen.add("refused")
                continue
            assert torch.equal(out[:1], good[:1])
            assert torch.equal(out[1:], good[1:]) or out[1:].isnan().any()
            seen.add("computed")
    finally:
        stop.set()
        other.join()
    assert seen <= {"refused", "computed"}
    assert torch.equal(quire.attend(s.q, s.cache, s.batch, kernel=kernel), good)
