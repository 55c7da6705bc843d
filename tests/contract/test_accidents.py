"""Accidents that are easy to have: each gives a wrong number, or touches what it must not, unless somebody looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import quire
from quire import ArgumentError, Batch, ContractError, KVCache, Options, PagePool
from quire.contract import values
from quire.contract.picture import AROUND, row_picture
from support.scenario import build


def engine(ledger: bool = True) -> tuple[PagePool, KVCache]:
    pool = PagePool(8, 16)
    return pool, KVCache.allocate(pool, kv_heads=2, head_dim=8, dtype=torch.float32, ledger=ledger)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_new_tokens_of_any_strides(dtype: str) -> None:
    s = build(95, [5, 3], [5, 20], q_dtype=dtype, format=dtype, form="context")
    assert s.new is not None
    turned = tuple(x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in s.new)
    assert torch.equal(quire.attend(s.q, s.cache, s.batch, new=turned), quire.attend(s.q, s.cache, s.batch, new=s.new))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_default_type_or_autocast_of_16_bits_changes_nothing(softcap: float | None) -> None:
    s = build(96, [1, 20], [70, 30], softcap=softcap, scales="token", format="e4m3fn")
    wanted = quire.attend(s.q, s.cache, s.batch, s.options, lse=True)
    s.check(*wanted)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = quire.attend(s.q, s.cache, s.batch, s.options, lse=True)
        merged = quire.merge([got[0]], [got[1]])[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))
    assert merged.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        got = quire.attend(s.q, s.cache, s.batch, s.options, lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


def test_a_step_whose_k_is_shorter_than_its_q() -> None:
    pool, cache = engine()
    batch = pool.step({pool.sequence(): 3})
    q, k = torch.ones(3, 4, 8), torch.ones(1, 2, 8)
    with pytest.raises(ContractError, match=r"\[shapes\] k(.|\n)*\[3, 2, 8\]"):
        quire.step(q, k, k, cache, batch)
    assert not cache.k.any()


def test_a_step_whose_slots_are_not_those_it_reads() -> None:
    pool, cache = engine()
    batch = pool.step({pool.sequence(): 3})
    batch.slots = i(32, 33, 34)
    k = torch.ones(3, 2, 8)
    with pytest.raises(ContractError, match="never written"):
        quire.step(torch.ones(3, 4, 8), k, k, cache, batch)


def test_fill_keeps_bad_values_bad() -> None:
    batch = Batch.allocate(1, 2, 4)
    _, cache = engine(ledger=False)
    q = torch.ones(3, 4, 8)
    batch.fill(i(2**32 + 1, -1)[None], i(3), i(0, 3))
    assert "page_table[0, 0]" in {v.argument for v in quire.check(q, cache, batch)}
    batch.fill(i(1, -1)[None], i(-(2**32) + 3), i(0, 3))
    assert "kv_lens[0]" in {v.argument for v in quire.check(q, cache, batch)}
    batch.fill(i(1, -1)[None], i(3), i(0, 3))
    batch.fill(batch.page_table, batch.kv_lens, batch.q_starts)
    assert batch.page_table.tolist() == [[1, -1]]
    assert (batch.kv_lens.tolist(), batch.q_starts.tolist()) == ([3], [0, 3])


def test_padding_rows_are_not_written_even_if_their_slots_say_so() -> None:
    _, cache = engine(ledger=False)
    for slots in (i(0, 1, 40, 41), i(0, 1, 1, 99999)):
        cache.k.zero_()
        batch = Batch.from_vllm(block_table=i(0)[None], seq_lens=i(2), query_start_loc=i(0, 2), slot_mapping=slots)
        quire.write(torch.ones(4, 2, 8), torch.ones(4, 2, 8), cache, batch)
        assert cache.k.view(128, -1).any(1).nonzero().flatten().tolist() == [0, 1]


def test_fork_then_trim_is_right() -> None:
    pool, cache = engine()
    a = pool.sequence()
    q, k = torch.randn(2, 4, 8), torch.randn(2, 2, 8)
    with quire.checked():
        quire.step(q, k, k, cache, pool.step({a: 2}))
        f = pool.fork(a)
        pool.trim(a, 1)
        quire.step(q, k, k, cache, pool.step({f: 1, a: 1}))


def test_copies_of_interleaved_and_of_equal_steps() -> None:
    pool, cache = engine(ledger=False)
    a, b = pool.sequence(), pool.sequence()
    q, k = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    quire.write(k, k, cache, pool.step({a: 2, b: 2}))
    first, second = pool.step({pool.fork(a): 1}).clone(), pool.step({pool.fork(b): 1})
    for batch in (first, second):
        quire.write(k[:1], k[:1], cache, batch)
    for batch in (first, second):
        quire.attend(q[:1], cache, batch)
    again = Batch(first.page_table, first.kv_lens, first.q_starts, copies=[*first.copies])
    with pytest.raises(ContractError, match="copies"):
        quire.attend(q[:1], cache, again)
    for bad in ((0, 999), (0, 1.5), (0, 1, 2)):
        broken = Batch(first.page_table, first.kv_lens, first.q_starts, copies=[bad])  # type: ignore[list-item]
        assert "copies" in {v.argument for v in quire.check(None, cache, broken, k=k[:1], v=k[:1])}


def test_starts_that_overflow_when_subtracted() -> None:
    _, cache = engine(ledger=False)
    batch = Batch(i(0, 0).view(2, 1), i(4, 4), i(0, 2**63 - 1, -(2**63)))
    out = torch.full((9, 4, 8), 7.0)
    with pytest.raises(ContractError, match=r"q_starts\[1\](.|\n)*at most 9"):
        quire.attend(torch.ones(9, 4, 8), cache, batch, Options(causal=False), out=out)
    assert (out == 7).all()


def test_out_may_not_share_memory_through_another_owner_or_with_itself() -> None:
    memory = numpy.zeros(8 * 16 * 2 * 8 * 2, dtype=numpy.float32)
    k, v = (torch.from_numpy(part).view(8, 16, 2, 8) for part in (memory[:2048], memory[2048:]))
    cache = KVCache.wrap(k, v, layout="nhd")
    batch = Batch(i(0)[None], i(1), i(0, 1))
    q = torch.ones(1, 4, 8)
    with pytest.raises(ContractError, match="memory shared with the cache's K"):
        quire.attend(q, cache, batch, out=torch.from_numpy(memory[64:96]).view(1, 4, 8))
    with pytest.raises(ContractError, match="overlap"):
        quire.attend(
            q.expand(2, 4, 8), cache, Batch(i(0)[None], i(2), i(0, 2)), out=torch.zeros(99).as_strided((2, 4, 8), (4, 8, 1))
        )
    assert not memory.any()


def test_a_cache_may_not_overlap_itself() -> None:
    pages, scale = torch.zeros(8, 16, 2, 8), torch.ones(8, 16, 2)
    eight = pages.to(torch.uint8)
    cases: list[dict[str, Any]] = [
        {"k_pages": pages, "v_pages": pages},
        {"k_pages": torch.zeros(9000).as_strided((8, 16, 2, 8), (100, 16, 8, 1)), "v_pages": pages},
        {"k_pages": eight, "v_pages": eight.clone(), "format": "e4m3fn", "k_scale": scale, "v_scale": scale},
        {
            "k_pages": eight,
            "v_pages": eight.clone(),
            "format": "e4m3fn",
            "k_scale": scale,
            "v_scale": torch.ones(1).expand(8, 16, 2),
        },
    ]
    for case in cases:
        with pytest.raises(ArgumentError, match="memory"):
            KVCache.wrap(**case, layout="nhd")
    joint = torch.zeros(8, 2, 16, 16)
    KVCache.wrap(joint[..., :8], joint[..., 8:], layout="hnd")
    pairs = torch.zeros(8, 2, 16, 2, 8)
    KVCache.wrap(pairs[:, 0], pairs[:, 1], layout="nhd")


def test_one_bad_row_does_not_hide_another() -> None:
    _, cache = engine(ledger=False)
    batch = Batch(torch.tensor([[9, 0], [9, -1], [0, 0]]), i(3, 200, 17), i(0, 1, 2, 3))
    found = {v.argument for v in quire.check(torch.ones(3, 3, 8), cache, batch)}
    assert {"page_table", "page_table[0, 0]", "page_table[1, 0]", "q"} <= found
    k = torch.ones(3, 2, 8)
    slots = quire.check(None, cache, Batch(i(0)[None], i(3), i(0, 3)), k=k, v=k, slots=i(0, 0, 999))
    assert [v.argument for v in slots] == ["slots[2]", "slots[1]"]


def test_a_picture_looks_only_around_the_bad_cell() -> None:
    """As many pictures as there are bad cells: each must cost a few cells, not its whole row."""

    class Row(list):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            assert isinstance(key, slice) and key.stop - key.start <= 2 * AROUND + 1
            return list.__getitem__(self, key)

        def __iter__(self) -> Any:
            raise AssertionError("the whole row was read")

    assert row_picture("page_table[0]", Row(range(1000)), 500).split()[7] == "[500]"
    whole_rows = [
        line for line in Path(str(values.__file__)).read_text().splitlines() if "row_picture(" in line and ".tolist()" in line
    ]
    assert whole_rows == []


def test_a_tree_needs_only_the_pages_it_shows() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:, 0] = True
    narrow = KVCache.wrap(torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2, 8), layout="nhd")
    batch = Batch(i(1)[None], i(4), i(0, 4))
    assert quire.check(torch.ones(4, 4, 8), narrow, batch, Options(mask=mask)) == []
    out = quire.attend(torch.ones(4, 4, 8), narrow, batch, Options(mask=mask))
    assert torch.allclose(out, narrow.v[1, 0].repeat_interleave(2, 0).expand(4, 4, 8))


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"q": [1.0]}, "q"),
        ({"q": torch.ones(1, 4, 8).to_sparse()}, "q"),
        ({"options": {"window": 3}}, "options"),
        ({"batch": None}, "batch"),
        ({"new": (torch.ones(1, 2, 8),)}, "new"),
        ({"out": 3}, "out"),
        ({"check": "fulll"}, "check"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(arguments: dict[str, Any], argument: str) -> None:
    _, cache = engine(ledger=False)
    good = {"q": torch.ones(1, 4, 8), "cache": cache, "batch": Batch(i(0)[None], i(1), i(0, 1))}
    with pytest.raises(ArgumentError, match=f"^{argument}: given"):
        quire.attend(**(good | arguments))


@pytest.mark.parametrize("options", [{"window": 2**70}, {"window": (2**70, 0)}, {"scale": 10**400}])
def test_numbers_beyond_reason(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Options(**options)


def test_a_tree_over_a_length_that_nothing_can_hold() -> None:
    _, cache = engine(ledger=False)
    options = Options(mask=torch.ones(2, 2, dtype=torch.bool))
    for kv_len in (2**31 - 1, 2**40, 2**63 - 1):
        found = quire.check(torch.ones(2, 4, 8), cache, Batch(i(0)[None], i(kv_len), i(0, 2)), options)
        assert [v.argument for v in found] == ["page_table"]


@pytest.mark.parametrize("given", [torch.int32, torch.int64])
@pytest.mark.parametrize("owned", [torch.int32, torch.int64])
def test_fill_takes_either_index_type(owned: torch.dtype, given: torch.dtype) -> None:
    batch = Batch.allocate(1, 2, 4, dtype=owned)
    batch.fill(i(1, -1)[None].to(given), i(3).to(given), i(0, 3).to(given))
    assert batch.page_table.tolist() == [[1, -1]]
    assert batch.page_table.dtype is owned
