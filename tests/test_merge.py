"""Partial results combine into the whole, whatever the cut; empty parts count nothing."""

from __future__ import annotations

import pytest
import torch

import quire
from quire import ArgumentError, Batch, Options
from support.scenario import build


def test_context_and_new_tokens_merge_to_the_full_result() -> None:
    """The flow of a shared prefix: non-causal attention over the context, causal over the new tokens; the sink in one part."""
    s = build(80, [6, 1, 9], [50, 1, 40], sinks=True)
    q_lens = s.batch.q_starts.diff()
    context = Batch(s.batch.page_table, s.batch.kv_lens - q_lens, s.batch.q_starts)
    first = quire.attend(s.q, s.cache, context, Options(causal=False), lse=True)
    # The new tokens alone: their window ends where the context does, query by query.
    outs, lses = [first[0]], [first[1]]
    part_out, part_lse = torch.zeros_like(first[0]), torch.full_like(first[1], -torch.inf)
    for i in range(3):
        for t in range(int(s.batch.q_starts[i]), int(s.batch.q_starts[i + 1])):
            at = t - int(s.batch.q_starts[i])
            kv_len = int(s.batch.kv_lens[i] - q_lens[i]) + at + 1
            row = Batch(s.batch.page_table[i : i + 1], torch.tensor([kv_len]), torch.tensor([0, 1]))
            part_out[t : t + 1], part_lse[t : t + 1] = quire.attend(
                s.q[t : t + 1], s.cache, row, Options(window=at + 1, sinks=s.options.sinks), lse=True
            )
    out, lse = quire.merge([*outs, part_out], [*lses, part_lse])
    s.check(out, lse)


def test_parts_that_saw_nothing_count_nothing() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    nothing, never = torch.full((2, 3, 4), torch.nan), torch.full((2, 3), -torch.inf)
    merged, merged_lse = quire.merge([nothing, out, nothing], [never, lse, never])
    assert torch.equal(merged, out)
    assert torch.allclose(merged_lse, lse)
    merged, merged_lse = quire.merge([nothing, nothing], [never, never])
    assert (merged == 0).all()
    assert (merged_lse == -torch.inf).all()


def test_two_parts_by_hand() -> None:
    one, two = torch.ones(1, 1, 2), torch.full((1, 1, 2), 5.0)
    out, lse = quire.merge([one, two], [torch.zeros(1, 1), torch.log(torch.full((1, 1), 3.0))])
    assert torch.allclose(out, torch.full((1, 1, 2), 4.0))
    assert torch.allclose(lse, torch.log(torch.tensor(4.0)))


@pytest.mark.parametrize(
    ("outs", "lses", "words"),
    [
        ([], [], "one or more"),
        ([torch.zeros(1, 2, 3)], [], "0 lses for 1"),
        ([torch.zeros(1, 2, 3)], [torch.zeros(2, 1)], r"lses\[0\].*\[1, 2\]"),
        ([torch.zeros(1, 2, 3)], [torch.zeros(1, 2).double()], r"lses\[0\].*float32"),
        ([torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)], [torch.zeros(1, 2)] * 2, r"outs\[1\]"),
    ],
)
def test_bad_parts(outs: list[torch.Tensor], lses: list[torch.Tensor], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        quire.merge(outs, lses)


def test_into_buffers():
    outs, lses = [torch.randn(3, 2, 4) for _ in range(2)], [torch.randn(3, 2) for _ in range(2)]
    want = quire.merge(outs, lses)
    out, lse = torch.empty(3, 2, 4), torch.empty(3, 2)
    got = quire.merge(outs, lses, out=out, lse=lse)
    assert got[0] is out and got[1] is lse and torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("out", lambda outs, lses: torch.empty(3, 2, 5)),
        ("out", lambda outs, lses: torch.empty(3, 2, 4, dtype=torch.float16)),
        ("out", lambda outs, lses: outs[1]),
        ("out", lambda outs, lses: torch.empty(1, 2, 4).expand(3, 2, 4)),
        ("out", lambda outs, lses: torch.empty(3, 2, 4, device="meta")),
        ("lse", lambda outs, lses: torch.empty(3, 2, dtype=torch.float64)),
        ("lse", lambda outs, lses: lses[0]),
        ("lse", lambda outs, lses: 3),
    ],
)
def test_buffers_that_are_refused(name, buffer):
    outs, lses = [torch.randn(3, 2, 4) for _ in range(2)], [torch.randn(3, 2) for _ in range(2)]
    with pytest.raises(quire.ArgumentError, match=f"^{name}: given"):
        quire.merge(outs, lses, **{name: buffer(outs, lses)})


def test_tensors_are_no_lists_of_parts():
    with pytest.raises(quire.ArgumentError, match="outs: given float32"):
        quire.merge(torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2))


def test_a_sink_of_infinity_in_one_part_gives_what_a_single_call_gives() -> None:
    """Its weight is 1, so the output is 0 and the LSE +inf; the other heads are merged as ever."""
    pool = quire.PagePool(pages=4, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
    batch = pool.step({pool.sequence(): 9})
    q, k, v = torch.randn(9, 6, 8, generator=torch.Generator().manual_seed(1)).split((4, 1, 1), dim=1)
    options = Options(sinks=torch.tensor([torch.inf, 0.0, -torch.inf, 1.0]))
    want, want_lse = quire.step(q, k, v, cache, batch, options, lse=True)
    parts = []
    for rank, given in enumerate((options, Options())):
        part = quire.PagePool(pages=4, page_size=4, shard=(rank, 2, 2))
        own = quire.KVCache.allocate(part, kv_heads=1, head_dim=8, dtype=torch.float32)
        parts.append(quire.step(q, k, v, own, part.step({part.sequence(): 9}), given, lse=True))
    for order in (parts, parts[::-1]):
        out, lse = quire.merge(*zip(*order))
        assert (out[:, 0] == 0).all() and (lse[:, 0] == torch.inf).all()
        assert (want[:, 0] == 0).all() and (want_lse[:, 0] == torch.inf).all()
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)


def test_parts_with_an_lse_of_infinity_have_equal_weights() -> None:
    outs = [torch.full((1, 1, 2), value) for value in (1.0, 3.0, 50.0)]
    out, lse = quire.merge(outs, [torch.full((1, 1), value) for value in (torch.inf, torch.inf, 100.0)])
    assert out.tolist() == [[[2.0, 2.0]]] and lse.tolist() == [[torch.inf]]
    assert quire.merge(outs[:2], [torch.full((1, 1), torch.nan), torch.zeros(1, 1)])[1].isnan().all()
