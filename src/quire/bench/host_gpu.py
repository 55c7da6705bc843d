"""The host time of a call on a GPU: for new shapes, and for one that is repeated.

Before each call the device is synchronized, outside of the timed region: its queue is empty, so a call waits for nothing."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

import quire
from quire.batch import Batch
from quire.bench.figures import Figure
from quire.bench.stream.replay import frozen_heap
from quire.bench.stream.setup import StreamModel
from quire.cache.kv_cache import KVCache

MODEL = StreamModel(layers=1, q_heads=32, kv_heads=8, head_dim=128, page_size=16)
PAGES = 40_000
SHAPES = 400
"""Batches of different numbers of sequences and tokens."""
REPEATS = 1000
LIMITS = {"attend": 15e-6, "step": 25e-6}
"""For a repeated shape."""

Synchronize = Callable[[], None]
Function = Callable[["HostCall"], Callable[[], object]]


class Shape(NamedTuple):
    """The lengths of a batch."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


class HostCall(NamedTuple):
    """A batch with its tensors, ready to be called."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache
    batch: Batch
    out: torch.Tensor


def shapes(count: int = SHAPES, seed: int = 0, most_keys: int = 30_000) -> list[Shape]:
    """Batches of which no two have the same numbers of sequences and tokens: decode, verification, a prefill among decodes."""
    draw = random.Random(seed)
    found: dict[tuple[int, int], Shape] = {}
    while len(found) < count:
        seqs, kind = draw.randint(1, 256), draw.random()
        q_lens = [1] * seqs
        if kind < 0.5:
            q_lens[-1] = draw.randint(2, 2048)
        elif kind < 0.7:
            q_lens = [draw.randint(1, 8) for _ in range(seqs)]
        contexts = [draw.choice((0, 15, 16, 100, 1000, draw.randint(0, most_keys))) for _ in range(seqs)]
        shape = Shape(tuple(q_lens), tuple(q + context for q, context in zip(q_lens, contexts)))
        found.setdefault((seqs, sum(q_lens)), shape)
    return list(found.values())


def calls(
    wanted: Sequence[Shape], device: torch.device | str, model: StreamModel = MODEL, pages: int = PAGES
) -> Iterator[HostCall]:
    """The tensors of each shape, over one cache. q, k and v are views of one projection."""
    g = torch.Generator(device).manual_seed(0)
    shape = (pages, model.page_size, model.kv_heads, model.head_dim)
    k_pages, v_pages = (torch.randn(shape, generator=g, device=device).bfloat16() for _ in "kv")
    cache = KVCache.wrap(k_pages, v_pages, layout="nhd")
    heads = (model.q_heads, model.kv_heads, model.kv_heads)
    for q_lens, kv_lens in wanted:
        width = max(-(-n // model.page_size) for n in kv_lens)
        # Different pages for all sequences of a batch, so that no two tokens are written to one slot.
        needed = len(kv_lens) * width
        ids = torch.arange(needed, dtype=torch.int32, device=device) % pages
        lens = torch.tensor(kv_lens, dtype=torch.int32, device="cpu")
        starts = torch.tensor([0, *q_lens], device="cpu").cumsum(0).int()
        batch = Batch(
            ids.view(len(kv_lens), width), lens.to(device), starts.to(device), max_q_len=max(q_lens), max_kv_len=max(kv_lens)
        )
        fused = torch.randn(sum(q_lens), sum(heads), model.head_dim, generator=g, device=device).bfloat16()
        q, k, v = fused.split(heads, 1)
        yield HostCall(q, k, v, cache, batch, torch.empty(sum(q_lens), model.q_heads, model.head_dim, dtype=q.dtype, device=device))


def attend(call: HostCall) -> Callable[[], object]:
    return lambda: quire.attend(call.q, call.cache, call.batch, out=call.out)


def step(call: HostCall) -> Callable[[], object]:
    return lambda: quire.step(call.q, call.k, call.v, call.cache, call.batch, out=call.out)


def flash_attention() -> Function:
    """FlashAttention-3's Python function, without a precomputed schedule, as for a shape that was not seen before."""
    from vllm.vllm_flash_attn import flash_attn_interface as flash_attn

    from quire.bench.peers.fa3 import VERSION

    if not flash_attn.is_fa_version_supported(VERSION):
        raise ImportError(flash_attn.fa_version_unsupported_reason(VERSION))

    def bind(call: HostCall) -> Callable[[], object]:
        batch, cache = call.batch, call.cache
        return lambda: flash_attn.flash_attn_varlen_func(
            q=call.q,
            k=cache.k,
            v=cache.v,
            max_seqlen_q=batch.max_q_len,
            cu_seqlens_q=batch.q_starts,
            max_seqlen_k=batch.max_kv_len,
            seqused_k=batch.kv_lens,
            softmax_scale=call.q.shape[2] ** -0.5,
            causal=True,
            block_table=batch.page_table,
            out=call.out,
            fa_version=VERSION,
        )

    return bind


def seconds_of(runs: Sequence[Callable[[], object]], synchronize: Synchronize) -> list[float]:
    """The host's time of each run, the device idle before it."""
    seconds = []
    with frozen_heap():
        for run in runs:
            synchronize()
            start = perf_counter()
            run()
            seconds.append(perf_counter() - start)
    synchronize()
    return seconds


def measure_gpu_host(
    device: torch.device | str = "cuda",
    *,
    synchronize: Synchronize = torch.cuda.synchronize,
    peer: Callable[[], Function] = flash_attention,
    count: int = SHAPES,
    repeats: int = REPEATS,
    model: StreamModel = MODEL,
) -> Iterator[Figure]:
    """All figures. A peer that cannot be imported is a figure without a value, with the reason as its note."""
    new = list(calls(shapes(count), device, model)) if count else []
    repeated = next(calls([Shape((1,) * 64, (4096,) * 64)], device, model))
    if torch.device(device).type == "cuda":
        quire.prepare(repeated.cache, q_heads=model.q_heads, q_dtype=repeated.q.dtype)
    # One call of another shape first: what is imported or loaded once is not part of a measurement.
    first = next(calls([Shape((1, 3), (40, 3))], device, model))
    seconds_of([attend(first), step(first)], synchronize)
    mine = seconds_of([attend(call) for call in new], synchronize)
    limit, theirs = _peer_figures(peer, first, new, synchronize)
    yield from (*_spread(f"attend, {count} new shapes", mine, limit), *theirs)
    for name, function in (("attend", attend), ("step", step)):
        run = function(repeated)
        seconds = seconds_of([run] * (repeats + 10), synchronize)[10:]
        yield Figure(f"{name}, decode 64 x 4096 repeated, median of {repeats}", statistics.median(seconds), LIMITS[name])


def _peer_figures(
    peer: Callable[[], Function], first: HostCall, new: Sequence[HostCall], synchronize: Synchronize
) -> tuple[float | None, list[Figure]]:
    """The median of the peer, which is the limit of ours, and its figures."""
    name = f"FlashAttention-3, {len(new)} new shapes"
    try:
        function = peer()
        seconds_of([function(first)], synchronize)
        seconds = seconds_of([function(call) for call in new], synchronize)
    # An installed but broken package may raise any exception.
    except Exception as error:
        return None, [Figure(name, None, note=f"{type(error).__name__}: {error}")]
    return statistics.median(seconds), _spread(name, seconds, None)


def _spread(name: str, seconds: Sequence[float], limit: float | None) -> list[Figure]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return [
        Figure(f"{name}, median", statistics.median(ordered), limit),
        Figure(f"{name}, p99", p99),
        Figure(f"{name}, max", ordered[-1]),
    ]
