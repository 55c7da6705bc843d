"""Shared prefixes in batch-invariant calls on CPUs: the bits are those of the kernel that reads each sequence by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from quire.contract.call import Call
from quire.kernels.native import library
from quire.kernels.native.attend import launcher, shared_launcher
from quire.launch import described
from quire.platform import Platform
from support import kernels
from support.scenario import Scenario, build

pytestmark = pytest.mark.skipif(not kernels.levels(), reason=kernels.NO_LIBRARY)

FORKS: list[tuple[tuple[int, ...], int, int]] = [((3, 0, 1, 4, 5), 0, 33), ((0, 1), 33, 66), ((4, 3), 33, 64), ((4, 3), 64, 71)]
"""With pages of 8: prefixes that end behind a multiple of 256 keys, at one, and before the next. Sequence 2 shares nothing."""
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"group": 3},
    "bf16": {"format": "bf16", "q_dtype": "bf16", "kv_heads": 1, "group": 5},
    "e4m3fn-softcap": {"format": "e4m3fn", "q_dtype": "bf16", "softcap": 3.0, "alibi": True, "sinks": True},
    "context": {"form": "context", "format": "bf16", "q_dtype": "bf16"},
}


def bits_of(s: Scenario, *, shared: bool, only: int | None = None) -> list[torch.Tensor]:
    """The output and LSE, as bytes."""
    out = torch.full((*s.q.shape[:2], s.cache.v_head_dim), torch.nan, dtype=s.q.dtype)
    lse = torch.full(s.q.shape[:2], torch.nan)
    call = Call(s.cache, s.batch, s.q, s.options, s.new, out, lse=lse)
    problem = described("attend", call)[0]
    (shared_launcher if shared else launcher)(problem, Platform.detect("cpu"))(call)
    s.check(out, lse, factors=s.q.dtype)
    return [tensor[: s.live].contiguous().view(torch.uint8) for tensor in (out, lse)]


@pytest.mark.parametrize("name", CASES)
def test_prefixes_change_no_bit(name: str) -> None:
    """Also in another number of threads, where units are taken in another order."""
    case: dict[str, Any] = {"page_size": 8, "padding": 1, "prefixes": FORKS, "batch_invariant": True}
    s = build(88, [1, 2, 20, 1, 16, 17], [700, 560, 70, 585, 900, 400], **case, **CASES[name])
    forks, other = s.batch.prefixes, quire.Prefixes([((1, 0), 0, 40)], seqs=6)
    threads = torch.get_num_threads()
    for level in kernels.levels():
        with library.forced(level):
            plain = bits_of(s, shared=False)
            try:
                for s.batch.prefixes, count in ((forks, 1), (forks, 2), (other, 2)):
                    torch.set_num_threads(count)
                    assert all(torch.equal(a, b) for a, b in zip(bits_of(s, shared=True), plain)), level
            finally:
                torch.set_num_threads(threads)
                s.batch.prefixes = forks


def test_kernels_for_prefixes_take_batch_invariant_calls() -> None:
    pool = quire.PagePool(pages=128, page_size=16)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    prompt = pool.sequence()
    pool.step({prompt: 640})
    batch = pool.step(dict.fromkeys([pool.fork(prompt) for _ in range(16)], 1), share=True)
    q, options = torch.zeros(16, 8, 64, dtype=torch.bfloat16), quire.Options(batch_invariant=True)
    names = {"native-shared", "triton-shared"}
    for platform in (None, quire.Platform.named("h100"), quire.Platform.named("gfx942")):
        decision = quire.explain(q, cache, batch, options, platform=platform)
        assert decision.chosen is not None and decision.chosen.name in names, decision
