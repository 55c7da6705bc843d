"""Launches go to the current stream of the tensors' own device, and streams do not share a hidden buffer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import quire
from gpu.calls import attend, check, every, fresh_out, hint, needs_gpu
from quire.compat.vllm import reshape_and_cache_flash
from support.scenario import build

pytestmark = needs_gpu

BF16: dict[str, Any] = {"format": "bf16", "q_dtype": "bf16", "head_dim": 64}
SLEEP = 100_000_000
"""Cycles: some 50 ms, longer than the host takes to launch what follows."""


@every
def test_two_streams_at_once(kernel: str) -> None:
    """Different calls whose work is shared out, on two streams, again and again: every result is right."""
    scenarios = [
        build(80, [1, 1, 40], [2500, 60, 50], **BF16, device="cuda"),
        build(81, [1, 2, 1, 20], [900, 1800, 17, 90], **BF16, device="cuda"),
    ]
    for s in scenarios:
        check(s, *attend(s, kernel))
    streams = [torch.cuda.Stream() for _ in scenarios]
    outs: list[list[torch.Tensor]] = [[fresh_out(s) for _ in range(30)] for s in scenarios]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP // 10)
    for turn in range(30):
        for s, stream, mine in zip(scenarios, streams, outs):
            with torch.cuda.stream(stream):
                attend(s, kernel, out=mine[turn])
    torch.cuda.synchronize()
    for s, mine in zip(scenarios, outs):
        for out in mine:
            check(s, out)


@every
def test_launches_follow_the_current_stream(kernel: str) -> None:
    """The queries arrive late, on the stream: whoever does not wait there reads NaN."""
    s = build(82, [1, 1, 40], [500, 60, 50], **BF16, device="cuda")
    hint(s, kernel)
    check(s, *attend(s, kernel))
    real, late = s.q, torch.full_like(s.q, torch.nan)
    out = fresh_out(s)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        late.copy_(real)
        quire.attend(late, s.cache, s.batch, s.options, out=out, kernel=kernel)
    stream.synchronize()
    check(s, out)


def test_writes_follow_the_current_stream() -> None:
    pool = quire.PagePool(8, 16, device="cuda")
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    batch = pool.step({pool.sequence(): 40})
    real = torch.randn(40, 2, 64, device="cuda").bfloat16()
    quire.write(real, real, cache, batch, kernel="triton")
    wanted = cache.k.clone()
    cache.k.zero_()
    late, stream = torch.full_like(real, torch.nan), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        late.copy_(real)
        quire.write(late, late, cache, batch, kernel="triton")
    stream.synchronize()
    assert torch.equal(cache.k, wanted)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU")
@every
def test_tensors_on_a_device_that_is_not_current(kernel: str) -> None:
    s = build(83, [1, 1, 40], [500, 60, 50], **BF16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        check(s, *attend(s, kernel))
        assert torch.cuda.current_device() == 0
    pool = quire.PagePool(8, 16, device="cuda:1")
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    batch = pool.step({pool.sequence(): 40})
    k = torch.randn(40, 2, 64, device="cuda:1").bfloat16()
    quire.write(k, k, cache, batch, kernel="triton")
    assert torch.equal(cache.k.flatten(0, 1)[batch.slots_of_tokens(40, 16)], k)


def test_writes_by_slots_on_two_streams() -> None:
    """As many tokens on a stream that is busy, then on one that is not: the second needs nothing that the first has yet to make."""
    tokens = 333
    k = torch.randn(tokens, 2, 64, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(tokens, device="cuda")
    one = torch.ones(1, device="cuda")
    caches = [torch.zeros(2, 64, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    # Compiled, and with another number of tokens.
    reshape_and_cache_flash(k[:7], k[:7], *caches[2], slots[:7], "auto", one, one)
    torch.cuda.synchronize()
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(4 * SLEEP)
        reshape_and_cache_flash(k, k, *caches[0], slots, "auto", one, one)
    with torch.cuda.stream(free):
        reshape_and_cache_flash(k, k, *caches[1], slots, "auto", one, one)
    free.synchronize()
    assert not busy.query(), "the busy stream was not busy long enough for this test to mean anything"
    torch.cuda.synchronize()
    for cache in caches[:2]:
        assert all(torch.equal(part.reshape(-1, 2, 64)[:tokens], k) for part in cache)


def attended_by_threads(devices: list[str], kernel: str) -> None:
    """A thread for each device, on a stream of its own, makes calls of several kinds, the first of each kind included."""

    def attend_often(at: int) -> None:
        with torch.cuda.device(devices[at]), torch.cuda.stream(torch.cuda.Stream(devices[at])):
            for turn in range(6):
                seqs = 1 + (turn + at) % 3
                s = build(90 + turn, [1] * seqs, [700 + 100 * at] * seqs, **BF16, device=devices[at])
                torch.cuda.current_stream().synchronize()
                for _ in range(3):
                    check(s, *attend(s, kernel))

    with ThreadPoolExecutor(len(devices)) as threads:
        for done in [threads.submit(attend_often, at) for at in range(len(devices))]:
            done.result()


@every
def test_threads_with_a_stream_each(kernel: str) -> None:
    attended_by_threads(["cuda:0"] * 4, kernel)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU")
@every
def test_threads_with_a_device_each(kernel: str) -> None:
    attended_by_threads([f"cuda:{at}" for at in range(torch.cuda.device_count())] * 2, kernel)
