"""Clause 11: same inputs, same bits; and, if asked for, bits that do not depend on neighbours, hints or how a prompt was cut."""

from __future__ import annotations

import pytest
import torch

import quire
from quire import Batch, KVCache, Options, PagePool
from support.kernels import each_kernel  # noqa: F401
from support.scenario import build

pytestmark = pytest.mark.usefixtures("each_kernel")


def test_same_inputs_same_bits() -> None:
    s = build(70, [1, 9, 70, 1], [300, 40, 600, 17], format="bf16", alibi=True, window=400)
    runs = [quire.attend(s.q, s.cache, s.batch, s.options) for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("format", ["bf16", "e4m3fn"])
def test_batch_invariant_bits(format: str) -> None:
    """A prompt of 700 tokens in one piece, in chunks, token by token, alone and beside others: the same bits."""
    torch.manual_seed(0)
    options = Options(batch_invariant=True, window=(600, 0), alibi=torch.rand(4) * 0.1, sinks=torch.randn(4))
    q, k, v = torch.randn(700, 4, 32), torch.randn(700, 2, 32), torch.randn(700, 2, 32)
    storage = {"e4m3fn": torch.float8_e4m3fn, "bf16": torch.bfloat16}[format]

    def run(cuts: list[int], neighbours: int, hints: bool) -> torch.Tensor:
        pool = PagePool(400, 16)
        cache = KVCache.allocate(pool, kv_heads=2, head_dim=32, dtype=storage)
        others = [pool.sequence() for _ in range(neighbours)]
        me, outs, at = pool.sequence(), [], 0
        for n in cuts:
            new = {other: 1 + 3 * i for i, other in enumerate(others)} | {me: n}
            batch = pool.step(new)
            if not hints:
                batch.max_q_len = batch.max_kv_len = None
            before = sum(new.values()) - n
            fill = torch.randn(before, 4, 32)
            outs.append(
                quire.step(
                    torch.cat((fill, q[at : at + n])),
                    torch.cat((fill[:, :2], k[at : at + n])),
                    torch.cat((fill[:, 2:], v[at : at + n])),
                    cache,
                    batch,
                    options,
                )[before:]
            )
            at += n
        return torch.cat(outs)

    whole = run([700], 0, True)
    assert torch.equal(whole, run([300, 1, 1, 98, 300], 3, False))
    assert torch.equal(whole[:40], run([1] * 40, 2, True))
    expected, _ = quire.reference.attention(
        q, _round(k, storage), _round(v, storage), window=(600, None), alibi=options.alibi, sinks=options.sinks
    )
    assert (whole.double() - expected).abs().max() < 1e-5


def _round(x: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    return x.to(storage).float()


def test_the_forms_agree_to_the_bit_over_a_plain_cache() -> None:
    full = build(71, [1, 30, 5], [40, 90, 5], format="bf16", q_dtype="bf16", batch_invariant=True)
    context = build(71, [1, 30, 5], [40, 90, 5], format="bf16", q_dtype="bf16", batch_invariant=True, form="context")
    a = quire.attend(full.q, full.cache, full.batch, full.options)
    b = quire.attend(context.q, context.cache, context.batch, context.options, new=context.new)
    assert torch.equal(a, b)


def test_without_it_bits_may_differ_but_not_the_result() -> None:
    s = build(72, [30], [90])
    alone = Batch(s.batch.page_table, s.batch.kv_lens, torch.tensor([0, 1]))
    s.check(quire.attend(s.q, s.cache, s.batch))
    one = quire.attend(s.q[29:], s.cache, alone)
    assert (one[0].double() - s.expected[29]).abs().max() < 1e-5
