"""`check` returns everything, `checked` raises at the first bad call, and the ledger tells what a slot really holds."""

from __future__ import annotations

import pytest
import torch

import quire
from quire import Batch, KVCache, Options, PagePool
from quire.contract.rules import CONTRACT
from support.scenario import build


def test_all_violations_are_returned_in_the_order_of_the_contract() -> None:
    s = build(60, [1, 4, 2], [20, 4, 37])
    s.batch.page_table[0, 0] = -1
    s.batch.page_table[2, 0] = 99
    s.batch.page_table[2, 2] = -3
    s.batch.max_kv_len = 5
    found = quire.check(s.q, s.cache, s.batch)
    assert [(v.rule, v.argument, v.seq) for v in found] == [
        ("table", "page_table[0, 0]", 0),
        ("table", "page_table[2, 0]", 2),
        ("table", "page_table[2, 2]", 2),
        ("lengths", "max_kv_len", 2),
    ]
    both = quire.check(s.q[:, :3], s.cache, s.batch, Options(alibi=torch.ones(9)))
    assert [(v.rule, v.argument) for v in both] == [(v.rule, v.argument) for v in found] + [("shapes", "q"), ("shapes", "alibi")]


def test_a_good_call_has_no_violation() -> None:
    s = build(61, [1, 4, 2], [20, 4, 37], window=6)
    assert quire.check(s.q, s.cache, s.batch, s.options) == []


def test_a_violation_is_a_picture_and_data() -> None:
    s = build(62, [1], [60])
    s.batch.page_table[0, 2] = 99
    (v,) = quire.check(s.q, s.cache, s.batch)
    row = s.batch.page_table[0].tolist()
    lines = str(v).splitlines()
    assert lines[:3] == ["[table] page_table[0, 2]", "  given    99", f"  allowed  a page id in [0, {s.cache.pages})"]
    assert lines[3].split() == ["page_table[0]", *(f"[{id}]" if i == 2 else str(id) for i, id in enumerate(row))]
    assert lines[4].index("^") == lines[3].index("[99]")
    assert v.to_dict()["rule"] == "table"


def test_checked_raises_for_a_hint_too_and_ends_with_its_block() -> None:
    s = build(63, [1, 4], [20, 4])
    s.batch.max_q_len = 1
    quire.attend(s.q, s.cache, s.batch)
    with quire.checked(), pytest.raises(quire.ContractError, match="max_q_len"):
        quire.attend(s.q, s.cache, s.batch)
    quire.attend(s.q, s.cache, s.batch)


def test_rule_ids_are_stable() -> None:
    assert [rule.id for rule in CONTRACT] == [
        "dont-care", "residency", "index-types", "table", "lengths", "ownership", "output", "quantisation", "addressing",
        "capture", "repeatable", "shapes", "devices", "numbers", "written-scales", "shards",
        "rotation", "spans", "selection", "prefixes", "latent", "hadamard",
    ]  # fmt: skip


def test_every_violation_names_a_rule_of_the_contract() -> None:
    import ast
    from pathlib import Path

    from quire.contract import static, values

    ids = {rule.id for rule in CONTRACT}
    for module in (static, values):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "Violation"
                and isinstance(node.args[0], ast.Constant)
            ):
                assert node.args[0].value in ids


def engine(ledger: bool = True) -> tuple[PagePool, KVCache]:
    pool = PagePool(40, 16)
    return pool, KVCache.allocate(pool, kv_heads=1, head_dim=4, dtype=torch.float32, ledger=ledger)


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(n, 2, 4), torch.randn(n, 1, 4), torch.randn(n, 1, 4)


def test_forgotten_write() -> None:
    pool, cache = engine()
    sequences = [pool.sequence() for _ in range(10)]
    q, k, v = tokens(10 * 16 * 3 + 10)
    quire.write(k[: 10 * 48], v[: 10 * 48], cache, pool.step(dict.fromkeys(sequences, 48)))
    batch = pool.step(dict.fromkeys(sequences, 1))
    slots = batch.slots_of_tokens(10, 16)
    slots[9] = -1
    quire.write(k[480:], v[480:], cache, batch, slots=slots)
    page = int(batch.page_table[9, 3])
    with pytest.raises(quire.ContractError) as caught:
        quire.attend(q[480:], cache, batch)
    message = str(caught.value)
    assert f"sequence 9 needs slot {page * 16} (page {page}, offset 0): never written" in message
    assert "1 violation of" in message
    assert f"[{page}]" in message
    quire.write(k[480:], v[480:], cache, batch, slots=torch.where(slots < 0, page * 16, -1))
    quire.attend(q[480:], cache, batch)


def test_stale_after_free() -> None:
    pool, cache = engine()
    old = pool.sequence()
    q, k, v = tokens(20)
    quire.write(k, v, cache, pool.step({old: 20}))
    pool.free(old)
    batch = pool.step({pool.sequence(): 20})
    found = quire.check(q, cache, batch)
    assert len(found) == 20
    assert all(x.rule == "residency" and "stale: written at step" in x.given for x in found)


def test_a_step_that_skips_a_slot_it_attends_to() -> None:
    pool, cache = engine()
    q, k, v = tokens(4)
    batch = pool.step({pool.sequence(): 4})
    batch.slots = batch.slots_of_tokens(4, 16)
    batch.slots[2] = -1
    with quire.checked(), pytest.raises(quire.ContractError, match=r"sequence 0 needs slot .* offset 2.: never written"):
        quire.step(q, k, v, cache, batch)
    assert not cache.k.any()


def test_another_sequences_page() -> None:
    pool, cache = engine()
    a, b = pool.sequence(), pool.sequence()
    q, k, v = tokens(40)
    batch = pool.step({a: 20, b: 20})
    quire.write(k, v, cache, batch)
    assert quire.check(q, cache, batch) == []
    batch.page_table[1, 0] = batch.page_table[0, 0]
    found = quire.check(q, cache, batch)
    assert len(found) == 16
    assert f"another sequence's: written by sequence {a.id} at position 0" in found[0].given


def test_written_twice() -> None:
    pool, cache = engine()
    _q, k, v = tokens(3)
    batch = pool.step({pool.sequence(): 3})
    quire.write(k, v, cache, batch)
    with pytest.raises(quire.ContractError, match="written twice"):
        quire.write(k, v, cache, batch)


def test_fork_and_copy_on_write_keep_the_ledger() -> None:
    pool, cache = engine()
    a = pool.sequence()
    q, k, v = tokens(20)
    with quire.checked():
        quire.step(q, k, v, cache, pool.step({a: 20}))
        b = pool.fork(a)
        batch = pool.step({a: 1, b: 1})
        assert len(batch.copies) == 1
        quire.step(q[:2], k[:2], v[:2], cache, batch)
        pool.free(a)
        quire.step(q[:3], k[:3], v[:3], cache, pool.step({b: 3}))


def forked(ledger: bool) -> tuple[KVCache, Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sequence that was forked in the middle of a page, and the fork's next token."""
    pool, cache = engine(ledger)
    a = pool.sequence()
    q, k, v = tokens(20)
    quire.step(q, k, v, cache, pool.step({a: 20}))
    return cache, pool.step({pool.fork(a): 1}), q[:1], k[:1], v[:1]


def test_an_attend_before_the_copies_is_refused_even_without_a_ledger() -> None:
    cache, batch, q, k, v = forked(ledger=False)
    with pytest.raises(quire.ContractError, match=r"\[residency\] copies(.|\n)*cache.copy_pages"):
        quire.attend(q, cache, batch, new=(k, v))
    cache.copy_pages(batch.copies)
    early = quire.attend(q, cache, batch, new=(k, v))
    assert torch.allclose(early, quire.step(q, k, v, cache, batch), atol=1e-6)


def test_a_copy_that_is_not_applied_is_found() -> None:
    cache, batch, q, k, v = forked(ledger=True)
    forgetful = Batch(batch.page_table, batch.kv_lens, batch.q_starts, sequences=batch.sequences)
    quire.write(k, v, cache, forgetful)
    found = quire.check(q, cache, forgetful)
    assert [x.token for x in found] == [16, 17, 18, 19]
    assert all("never written" in x.given for x in found)


def test_an_engine_without_a_pool_keeps_a_ledger_too() -> None:
    cache = KVCache.wrap(torch.zeros(8, 16, 1, 4), torch.zeros(8, 16, 1, 4), layout="nhd", ledger=True)
    q, k, v = tokens(20)
    table = torch.tensor([[5, 2]])
    batch = Batch(table, torch.tensor([20]), torch.tensor([0, 20]))
    with quire.checked():
        quire.step(q, k, v, cache, batch)
    assert cache.ledger is not None
    cache.ledger.release(torch.tensor([2]))
    found = quire.check(q, cache, batch)
    assert [x.token for x in found] == [16, 17, 18, 19]
    assert "stale: freed" in found[0].given
    shifted = Batch(torch.tensor([[2, 5]]), torch.tensor([16]), torch.tensor([0, 1]))
    assert "stale" in quire.check(q[:1], cache, shifted)[0].given
    swapped = Batch(torch.tensor([[5, 5]]), torch.tensor([20]), torch.tensor([0, 1]))
    assert "another position's: written at position 0" in quire.check(q[:1], cache, swapped)[0].given


def test_window_and_context_form_need_less() -> None:
    pool, cache = engine()
    a = pool.sequence()
    q, k, v = tokens(40)
    batch = pool.step({a: 39})
    quire.write(k[:39], v[:39], cache, batch, slots=torch.where(torch.arange(39) < 16, -1, batch.slots_of_tokens(39, 16)))
    batch = pool.step({a: 1})
    assert len(quire.check(q[:1], cache, batch, new=(k[:1], v[:1]))) == 16
    assert quire.check(q[:1], cache, batch, Options(window=20), new=(k[:1], v[:1])) == []
    assert len(quire.check(q[:1], cache, batch, Options(window=20))) == 1


def test_empty_batch_is_legal() -> None:
    pool, cache = engine()
    batch = pool.step({})
    q, k, v = tokens(0)
    with quire.checked():
        assert quire.step(q, k, v, cache, batch).shape == (0, 2, 4)


def test_explain_refuses_what_attend_refuses() -> None:
    s = build(64, [3], [9], format="e4m3fn", form="context", batch_invariant=True)
    for ask in (quire.attend, quire.explain):
        with pytest.raises(quire.ContractError, match=r"batch_invariant(.|\n)*full form"):
            ask(s.q, s.cache, s.batch, s.options, new=s.new)
