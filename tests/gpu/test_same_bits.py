"""Clause 11: same inputs, same bits; and, if asked for, bits that do not depend on neighbours, batch size, hints or chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from gpu.calls import DEVICE, attend, bits, check, every
from support.scenario import TYPES, build

REPEATED: dict[str, dict[str, Any]] = {
    "shared-out": {"q_lens": [1, 1, 2], "kv_lens": [3000, 700, 17], "head_dim": 64},
    "mixed": {"q_lens": [1, 9, 70, 1, 0], "kv_lens": [300, 40, 200, 17, 3], "alibi": True, "window": 150, "head_dim": 64},
    "quantised": {"q_lens": [1, 30, 1], "kv_lens": [900, 60, 17], "format": "e4m3fn", "sinks": True, "head_dim": 64},
}


@every
@pytest.mark.parametrize("name", REPEATED)
def test_same_inputs_same_bits(name: str, kernel: str) -> None:
    s = build(70, **{"format": "bf16", "q_dtype": "bf16"} | REPEATED[name], device=DEVICE)
    out, lse = attend(s, kernel)
    check(s, out, lse)
    for _ in range(2 if DEVICE == "cpu" else 20):
        again, lse_again = attend(s, kernel)
        assert torch.equal(bits(out), bits(again)) and torch.equal(bits(lse), bits(lse_again))


PROMPT = 100 if DEVICE == "cpu" else 700
HEADS, KV_HEADS, DIM = 8, 2, 64


@pytest.mark.parametrize("format", ["bf16", "e4m3fn", "fp32"])
def test_batch_invariant_bits(format: str) -> None:
    """A prompt in one piece, in chunks, token by token, alone, beside few and beside many: the same bits."""
    g = torch.Generator().manual_seed(0)
    storage = TYPES[format]
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    alibi, sinks = torch.rand(HEADS, generator=g) * 0.1, torch.randn(HEADS, generator=g)
    options = quire.Options(batch_invariant=True, window=(600, 0), alibi=alibi.to(DEVICE), sinks=sinks.to(DEVICE))
    q, k, v = (torch.randn(PROMPT, heads, DIM, generator=g).to(dtype).to(DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def run(cuts: list[int], neighbours: int, hints: bool) -> torch.Tensor:
        pool = quire.PagePool(800, 16, device=DEVICE)
        cache = quire.KVCache.allocate(pool, kv_heads=KV_HEADS, head_dim=DIM, dtype=storage)
        others = [pool.sequence() for _ in range(neighbours)]
        me, outs, at = pool.sequence(), [], 0
        for n in cuts:
            new = {other: 1 + 3 * (i % 7) for i, other in enumerate(others)}
            # Neighbours on both sides.
            order = list(new.items())
            batch = pool.step(dict([*order[::2], (me, n), *order[1::2]]))
            if not hints:
                batch.max_q_len = batch.max_kv_len = None
            before, after = sum(n for _, n in order[::2]), sum(n for _, n in order[1::2])
            fill = torch.randn(before + after, HEADS + 2 * KV_HEADS, DIM, generator=g).to(dtype).to(DEVICE)
            theirs = fill.split([HEADS, KV_HEADS, KV_HEADS], 1)
            tensors = [torch.cat((x[:before], mine[at : at + n], x[before:])) for x, mine in zip(theirs, (q, k, v))]
            outs.append(quire.step(*tensors, cache, batch, options)[before : before + n])
            at += n
        return torch.cat(outs)

    whole = run([PROMPT], 0, True)
    third = PROMPT // 3
    assert torch.equal(bits(whole), bits(run([third, 1, 1, PROMPT - 2 * third - 2, third], 3, False)))
    assert torch.equal(bits(whole[:20]), bits(run([1] * 20, 2, True)))
    assert torch.equal(bits(whole[:third]), bits(run([third], 40, False)))
    seen = [x.float().to(storage).double() for x in (k, v)]
    sides: dict[str, Any] = {"window": (600, None), "alibi": options.alibi, "sinks": options.sinks}
    expected, _ = quire.reference.attention(q, *seen, **sides)
    weighted, _ = quire.reference.attention(q, seen[0], seen[1].abs(), **sides)
    eps = torch.finfo(dtype).eps
    assert ((whole.double() - expected).abs() <= eps * (weighted + expected.abs()) + 1e-5).all()


@pytest.mark.parametrize("form", ["full", "context"])
def test_a_row_alone_has_the_same_bits(form: str) -> None:
    """Through either kernel's name, with any hint."""
    case: dict[str, Any] = {"format": "bf16", "q_dtype": "bf16", "batch_invariant": True, "form": form, "device": DEVICE}
    s = build(71, [1, 30, 5, 0, 60], [40, 90, 5, 8, 200], **case)
    results = []
    for kernel, hints in (("triton-mixed", None), ("triton-decode", 1), ("triton-decode", 16), (None, 4), (None, 10**6)):
        s.batch = quire.Batch(s.batch.page_table, s.batch.kv_lens, s.batch.q_starts, max_q_len=hints, max_kv_len=hints)
        new = s.new
        results.append(quire.attend(s.q, s.cache, s.batch, s.options, new=new, kernel=kernel))
    s.check(results[0], factors=torch.bfloat16)
    for other in results[1:]:
        assert torch.equal(bits(results[0]), bits(other))
    starts = s.batch.q_starts.tolist()
    for row in (0, 1, 2, 4):
        rows = slice(starts[row], starts[row + 1])
        one = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=DEVICE)
        batch = quire.Batch(s.batch.page_table[row : row + 1], s.batch.kv_lens[row : row + 1], one)
        new = None if s.new is None else (s.new[0][rows], s.new[1][rows])
        assert torch.equal(bits(quire.attend(s.q[rows], s.cache, batch, s.options, new=new)), bits(results[0][rows]))


CHUNKS = (1, 16, 40) if DEVICE == "cpu" else (1, 16, 2048)


@pytest.mark.parametrize("format", ["bf16", "e4m3fn"])
def test_chunks_of_any_size_have_the_same_bits(format: str) -> None:
    """The last tokens of a long prompt at once, and in chunks: the first ones, some of the middle and the last ones."""
    longest = CHUNKS[-1]
    kv_len = 250 + longest if DEVICE == "cpu" else 3000 + longest
    case: dict[str, Any] = {"group": 4, "head_dim": 64, "format": format, "q_dtype": "bf16", "batch_invariant": True}
    s = build(73, [longest], [kv_len], **case, device=DEVICE)
    whole, whole_lse = quire.attend(s.q, s.cache, s.batch, s.options, lse=True)
    s.check(whole, whole_lse, factors=torch.bfloat16)
    for size in CHUNKS:
        last = longest // size - 1
        for begin in (chunk * size for chunk in {0, last // 3, last}):
            starts = torch.tensor([0, size], dtype=torch.int32, device=DEVICE)
            rows = slice(begin, begin + size)
            batch = quire.Batch(s.batch.page_table, s.batch.kv_lens - (longest - rows.stop), starts, max_q_len=size)
            out, lse = quire.attend(s.q[rows], s.cache, batch, s.options, lse=True)
            assert torch.equal(bits(out), bits(whole[rows])) and torch.equal(bits(lse), bits(whole_lse[rows])), (size, begin)
