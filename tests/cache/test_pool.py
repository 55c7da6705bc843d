"""The page pool, operation by operation; `test_pool_machine.py` mixes them at random."""

import copy
import pickle

import pytest
import torch

from quire.cache.pool import PagePool
from quire.errors import ArgumentError, OutOfPages, StaleBatch
from support.pool_state import books


def test_a_step_gives_pages_and_a_batch():
    pool = PagePool(pages=8, page_size=4)
    a, b = pool.sequence(), pool.sequence()
    batch = pool.step({a: 6, b: 1})
    assert batch.page_table.tolist() == [[0, 1], [2, -1]]
    assert batch.kv_lens.tolist() == [6, 1]
    assert batch.q_starts.tolist() == [0, 6, 7]
    assert {batch.page_table.dtype, batch.kv_lens.dtype, batch.q_starts.dtype} == {torch.int32}
    assert (batch.max_q_len, batch.max_kv_len, batch.copies, batch.sequences) == (6, 6, (), (a, b))

    batch = pool.step({b: 9, a: 1})
    assert batch.page_table.tolist() == [[2, 3, 4], [0, 1, -1]]
    assert batch.kv_lens.tolist() == [10, 7]
    assert batch.q_starts.tolist() == [0, 9, 10]
    assert (batch.max_q_len, batch.max_kv_len, batch.sequences) == (9, 10, (b, a))
    assert pool.free_pages == 3


def test_a_row_may_have_no_new_tokens():
    pool = PagePool(pages=4, page_size=2)
    a, b = pool.sequence(), pool.sequence()
    pool.step({a: 3})
    batch = pool.step({a: 0, b: 0})
    assert batch.kv_lens.tolist() == [3, 0]
    assert batch.q_starts.tolist() == [0, 0, 0]
    assert batch.page_table.tolist() == [[0, 1], [-1, -1]]
    assert (batch.max_q_len, batch.max_kv_len) == (0, 3)


def test_a_step_of_nothing_is_an_empty_batch():
    batch = PagePool(pages=1, page_size=1).step({})
    assert (tuple(batch.page_table.shape), tuple(batch.kv_lens.shape), batch.q_starts.tolist()) == ((0, 1), (0,), [0])
    assert (batch.max_q_len, batch.max_kv_len, batch.sequences) == (0, 0, ())


CHANGES = {
    "step": lambda pool, a: pool.step({a: 1}),
    "extend": lambda pool, a: pool.extend(a, 1),
    "trim": lambda pool, a: pool.trim(a, 1),
    "drop": lambda pool, a: pool.drop(a, 2),
    "free": lambda pool, a: pool.free(a),
}


@pytest.mark.parametrize("act", CHANGES.values(), ids=CHANGES)
def test_a_batch_is_stale_once_tokens_or_pages_change(act):
    pool = PagePool(pages=8, page_size=2)
    a = pool.sequence()
    batch = pool.step({a: 2})
    kept = batch.clone()
    batch.check_current()
    act(pool, a)
    for use in (batch.check_current, batch.clone, lambda: pickle.dumps(batch), lambda: batch.slots, lambda: batch.to("meta")):
        with pytest.raises(StaleBatch, match="batch: given the batch of state 1 of its pool, which is in state 2 by now"):
            use()
    kept.check_current()
    assert (kept.page_table.tolist(), kept.kv_lens.tolist(), kept.q_starts.tolist()) == ([[0]], [2], [0, 2])
    assert (kept.slots.tolist(), kept.positions.tolist()) == ([0, 1], [0, 1])


def test_a_batch_outlives_what_changes_no_table():
    pool = PagePool(pages=8, page_size=2)
    a = pool.sequence()
    batch = pool.step({a: 2})
    pool.fork(a)
    pool.sequence()
    with pytest.raises(OutOfPages):
        pool.step({a: 99})
    with pytest.raises(ArgumentError):
        pool.step({a: -1})
    batch.check_current()


def test_the_same_sequences_again_share_one_table():
    pool = PagePool(pages=64, page_size=2)
    a, b = pool.sequence(), pool.sequence()
    first = pool.step({a: 3, b: 1})
    memory = first.page_table.data_ptr()
    for length in range(4, 12):
        batch = pool.step({a: 1, b: 1})
        assert batch.page_table.data_ptr() == memory
        assert batch.kv_lens.tolist() == [length, length - 2]
        width = -(-length // 2)
        assert batch.page_table.tolist() == [s.pages + [-1] * (width - len(s.pages)) for s in (a, b)]
    other = pool.step({b: 1, a: 1})
    assert other.page_table.data_ptr() != memory
    assert other.page_table.tolist() == [b.pages + [-1] * (len(a.pages) - len(b.pages)), a.pages]


def test_a_table_grows_with_its_longest_sequence():
    pool = PagePool(pages=600, page_size=1)
    a, b = pool.sequence(), pool.sequence()
    for count in (1, 2, 3, 5, 60, 1, 1, 200, 1, 1):
        batch = pool.step({a: count, b: 1})
        assert batch.page_table.tolist() == [a.pages, b.pages + [-1] * (len(a.pages) - len(b.pages))]
    assert sorted(a.pages + b.pages) == list(range(a.length + b.length))


def test_free_takes_many_at_once_and_all_or_none():
    pool = PagePool(pages=64, page_size=2)
    a, b, c, d = (pool.sequence() for _ in range(4))
    pool.step({a: 3, b: 40, c: 1})
    e = pool.fork(b)
    one_by_one = copy.deepcopy(pool)
    before = books(pool)
    with pytest.raises(ArgumentError, match="sequences: given sequence 1 twice; allowed: each sequence once"):
        pool.free(a, b, b)
    with pytest.raises(ArgumentError, match="belongs to another pool"):
        pool.free(a, PagePool(1, 1).sequence())
    assert books(pool) == before
    pool.free()
    pool.free(b, d, a, e)
    for id in (b.id, d.id, a.id, e.id):
        one_by_one.free(next(s for s in one_by_one.sequences if s.id == id))
    assert books(pool) == books(one_by_one)
    assert pool.sequences == (c,) and repr(a) == "Sequence(0: freed)" and (a.length, a.pages, a.runs) == (0, [], [])
    with pytest.raises(ArgumentError, match="which was freed"):
        pool.free(a)
    pool.sequence()
    with pytest.raises(ArgumentError, match="which was freed"):
        pool.step({a: 1})


def test_rollback_undoes_the_latest_step():
    pool = PagePool(pages=16, page_size=4)
    a = pool.sequence()
    pool.step({a: 6})
    b = pool.fork(a)
    c = pool.sequence()
    before = books(pool)
    batch = pool.step({a: 1, b: 9, c: 2})
    assert batch.copies == ((1, 2),)
    wanted = batch.page_table.tolist()
    pool.rollback(batch)
    assert books(pool) == before
    with pytest.raises(StaleBatch):
        batch.check_current()
    again = pool.step({a: 1, b: 9, c: 2})
    assert again.page_table.tolist() == wanted and again.copies == batch.copies
    assert again.copies.id != batch.copies.id and again.step_id != batch.step_id
    assert pool.issue.max() > batch.step_id[1], "numbers are not used again: a ledger may know them"


def test_rollback_of_a_step_in_place():
    pool = PagePool(pages=16, page_size=2)
    a, b = pool.sequence(), pool.sequence()
    pool.step({a: 3, b: 2})
    pool.step({a: 1, b: 1})
    before = books(pool)
    pool.rollback(pool.step({a: 1, b: 1}))
    assert books(pool) == before
    batch = pool.step({a: 1, b: 0})
    assert batch.page_table.tolist() == [a.pages, [*b.pages, -1]]


def test_rollback_of_two_steps():
    pool = PagePool(pages=16, page_size=2)
    a, b = pool.sequence(), pool.sequence()
    first = pool.step({a: 3, b: 2})
    before = books(pool)
    second = pool.step({a: 1, b: 1})
    c = pool.sequence()
    pool.rollback(pool.step({a: 5, b: 1, c: 9}))
    second.check_current()
    assert second.page_table.tolist() == [a.pages, b.pages], "the table of the step before is as it was"
    pool.rollback(second)
    pool.free(c)
    assert books(pool)[1:] == before[1:] and (a.length, b.length) == (3, 2)
    with pytest.raises(ArgumentError, match="after which the pool was changed again"):
        pool.rollback(first)


@pytest.mark.parametrize("act", [*CHANGES.values(), lambda pool, a: pool.fork(a)], ids=[*CHANGES, "fork"])
def test_a_change_ends_what_rollback_can_undo(act):
    pool = PagePool(pages=16, page_size=2)
    a = pool.sequence()
    pool.step({a: 4})
    first = pool.step({a: 1}).clone()
    act(pool, a)
    b = pool.sequence()
    pool.rollback(pool.step({b: 1}))
    with pytest.raises(ArgumentError, match=r"batch: given .*; allowed: the batch of this pool's latest step"):
        pool.rollback(first)


@pytest.mark.parametrize("act", [*CHANGES.values(), lambda pool, a: pool.fork(a)], ids=[*CHANGES, "fork"])
def test_rollback_refuses_any_other_batch(act):
    pool = PagePool(pages=16, page_size=2)
    a = pool.sequence()
    batch = pool.step({a: 4})
    copied = batch.clone()
    act(pool, a)
    with pytest.raises(
        ArgumentError, match=r"batch: given .*; allowed: the batch of this pool's latest step, before any other change"
    ):
        pool.rollback(batch)
    with pytest.raises(ArgumentError, match="batch: given nothing"):
        pool.rollback(None)
    other = PagePool(pages=16, page_size=2)
    with pytest.raises(ArgumentError, match="the batch of another step or pool"):
        other.rollback(copied)


def test_rollback_takes_a_clone_and_happens_once():
    pool = PagePool(pages=16, page_size=2)
    a = pool.sequence()
    batch = pickle.loads(pickle.dumps(pool.step({a: 4})))
    pool.sequence()
    pool.rollback(batch)
    assert (a.length, pool.free_pages) == (0, 16)
    with pytest.raises(ArgumentError, match="after which the pool was changed again"):
        pool.rollback(batch)


def test_a_failed_step_leaves_the_one_before_it_to_be_rolled_back():
    pool = PagePool(pages=4, page_size=2)
    a = pool.sequence()
    batch = pool.step({a: 4})
    with pytest.raises(OutOfPages):
        pool.step({a: 9})
    pool.rollback(batch)
    assert a.length == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))], ids=["deepcopy", "pickle"])
def test_a_copied_pool_goes_on_alone(copied):
    pool = PagePool(pages=16, page_size=4)
    a = pool.sequence()
    pool.step({a: 6})
    b = pool.fork(a)
    pool.step({a: 1, b: 2})
    other = copied(pool)
    assert books(other) == books(pool)
    mine, theirs = pool.step({b: 4, a: 1}), other.step(dict(zip(other.sequences[::-1], (4, 1))))
    assert theirs.page_table.tolist() == mine.page_table.tolist() and books(other) == books(pool)
    before = books(pool)
    other.free(*other.sequences)
    assert books(pool) == before and mine.step_id[0] != theirs.step_id[0]
    with pytest.raises(ArgumentError, match="belongs to another pool"):
        other.step({a: 1})


def test_issue_numbers_are_allocated_on_first_use():
    pool = PagePool(pages=8, page_size=4)
    a, b = pool.sequence(), pool.sequence()
    pool.step({a: 6, b: 1})
    pool.step({a: 3})
    pool.drop(a, 4)
    assert pool._issue is None, "nobody asked"
    assert pool.issue.tolist() == [-1] * 4 + [2] * 4 + [2, -1, -1, -1] + [2, -1, -1, -1] + [-1] * 16
    pool.step({b: 1})
    assert pool.issue.tolist()[8:12] == [2, 3, -1, -1]


def test_lengths_that_no_batch_can_hold_are_refused():
    pool = PagePool(pages=4, page_size=2**30)
    a = pool.sequence()
    for count in (2**31, 2**70):
        with pytest.raises(ArgumentError, match="at most 2147483647 tokens in a sequence"):
            pool.step({a: count})
    pool.step({a: 2**31 - 1})
    with pytest.raises(ArgumentError, match="new_tokens: given 1 after 2147483647 tokens"):
        pool.step({a: 1})
    b = pool.sequence()
    with pytest.raises(ArgumentError, match="at most 2147483647 tokens in a step"):
        pool.step({a: 0, b: 2**31 - 1, pool.sequence(): 1})


def test_trim_gives_back_whole_pages_and_keeps_the_rest():
    pool = PagePool(pages=4, page_size=4)
    a = pool.sequence()
    pool.step({a: 13})
    pool.trim(a, 5)
    assert (a.length, a.pages, pool.free_pages) == (5, [0, 1], 2)
    pool.trim(a, 4)
    assert (a.length, a.pages, pool.free_pages) == (4, [0], 3)
    pool.trim(a, 0)
    assert (a.length, a.pages, pool.free_pages) == (0, [], 4)


def test_freed_pages_come_back_in_the_order_they_had():
    pool = PagePool(pages=6, page_size=1)
    a, b = pool.sequence(), pool.sequence()
    pool.step({a: 3})
    pool.free(a)
    pool.step({b: 4})
    assert b.pages == [0, 1, 2, 3]


def test_a_fork_shares_pages_until_it_writes():
    pool = PagePool(pages=4, page_size=4)
    a = pool.sequence()
    pool.step({a: 6})
    b = pool.fork(a)
    assert b.id != a.id
    assert (b.length, b.pages, pool.holders.tolist(), pool.free_pages) == (6, [0, 1], [2, 2, 0, 0], 2)
    batch = pool.step({b: 1})
    assert (batch.copies, b.pages, a.pages) == (((1, 2),), [0, 2], [0, 1])
    assert pool.holders.tolist() == [2, 1, 1, 0]
    assert pool.step({a: 1}).copies == (), "a is the only holder that page 1 has left"


def test_no_copy_where_a_new_page_begins():
    pool = PagePool(pages=4, page_size=4)
    a = pool.sequence()
    pool.step({a: 4})
    b = pool.fork(a)
    batch = pool.step({a: 1, b: 1})
    assert (batch.copies, a.pages, b.pages) == ((), [0, 1], [0, 2])


def test_of_forks_that_extend_together_the_last_keeps_the_page():
    pool = PagePool(pages=3, page_size=4)
    a = pool.sequence()
    pool.step({a: 2})
    b, c = pool.fork(a), pool.fork(a)
    batch = pool.step({a: 1, b: 1, c: 1})
    assert batch.copies == ((0, 1), (0, 2))
    assert (a.pages, b.pages, c.pages, pool.free_pages) == ([1], [2], [0], 0), "three pages suffice exactly"


def test_a_sequence_with_no_new_token_needs_no_copy():
    pool = PagePool(pages=1, page_size=4)
    a = pool.sequence()
    pool.step({a: 2})
    b = pool.fork(a)
    assert pool.step({a: 0, b: 0}).copies == ()


def test_extend_is_a_step_for_one():
    pool = PagePool(pages=4, page_size=4)
    a = pool.sequence()
    assert pool.extend(a, 5) == ()
    b = pool.fork(a)
    assert pool.extend(b, 1) == ((1, 2),)
    assert (b.length, b.pages) == (6, [0, 2])


def test_a_page_goes_back_when_its_last_holder_leaves():
    pool = PagePool(pages=2, page_size=4)
    a = pool.sequence()
    pool.step({a: 8})
    b = pool.fork(a)
    pool.free(a)
    assert (pool.free_pages, b.pages) == (0, [0, 1])
    pool.trim(b, 4)
    assert pool.free_pages == 1
    pool.free(b)
    assert pool.free_pages == 2


def test_drop_frees_pages_wholly_left_of_a_position():
    pool = PagePool(pages=4, page_size=4)
    a = pool.sequence()
    pool.step({a: 10})
    pool.drop(a, 7)
    assert (a.pages, a.length, pool.free_pages) == ([-1, 1, 2], 10, 2)
    pool.drop(a, 3)
    pool.drop(a, 7)
    assert a.pages == [-1, 1, 2], "nothing is dropped twice"
    batch = pool.step({a: 3})
    assert batch.page_table.tolist() == [[-1, 1, 2, 0]]
    assert batch.kv_lens.tolist() == [13]
    b = pool.fork(a)
    assert b.pages == a.pages
    pool.free(a)
    pool.free(b)
    assert pool.free_pages == 4


def test_drop_up_to_the_end_lets_a_sequence_go_on():
    pool = PagePool(pages=1, page_size=4)
    a = pool.sequence()
    for _ in range(5):
        pool.step({a: 4})
        pool.drop(a, a.length)
    assert (a.pages, a.length, pool.free_pages) == ([-1] * 5, 20, 1)
    pool.trim(a, 20)
    assert a.length == 20


@pytest.mark.parametrize("act", ["step", "extend"])
def test_out_of_pages_changes_nothing(act):
    pool = PagePool(pages=3, page_size=4)
    a = pool.sequence()
    pool.step({a: 5})
    b = pool.fork(a)
    before = books(pool)
    with pytest.raises(OutOfPages) as caught:
        pool.step({a: 1, b: 4}) if act == "step" else pool.extend(b, 4)
    assert books(pool) == before
    assert (caught.value.needed, caught.value.free, caught.value.pages) == (2, 1, 3)
    assert str(caught.value).startswith("pages: the request needs 2 more, 1 of 3 are free; nothing was changed.")
    assert pool.step({a: 1, b: 2}).copies == ((1, 2),), "what fits still goes through"


def test_usage():
    pool = PagePool(pages=8, page_size=4)
    a = pool.sequence()
    pool.step({a: 6})
    pool.fork(a)
    assert pool.usage() == (8, 6, 2, 2, 12)
    assert str(pool.usage()) == "2 of 8 pages held (2 shared) by 2 sequences of 12 tokens"
    assert repr(pool) == "PagePool(8 pages x 4 slots, 6 free, cpu)"
    assert repr(a) == "Sequence(0: 6 tokens)"


def test_runs_say_who_wrote_which_position():
    pool = PagePool(pages=9, page_size=4)
    a = pool.sequence()
    pool.step({a: 3})
    pool.step({a: 2})
    b = pool.fork(a)
    assert (a.runs, b.runs) == ([(0, a.id)], [(0, a.id)])
    pool.step({a: 1, b: 1})
    c = pool.fork(b)
    pool.step({c: 1})
    assert c.runs == [(0, a.id), (5, b.id), (6, c.id)]
    pool.trim(c, 6)
    assert c.runs == [(0, a.id), (5, b.id)]
    pool.trim(c, 2)
    pool.step({c: 4})
    assert c.runs == [(0, a.id), (2, c.id)]
    assert a.runs == [(0, a.id)]


def test_issue_numbers_follow_tokens():
    pool = PagePool(pages=3, page_size=4)
    a = pool.sequence()
    assert pool.issue.tolist() == [-1] * 12
    pool.step({a: 2})
    pool.step({a: 1})
    assert pool.issue.tolist() == [1, 1, 2, -1] + [-1] * 8
    b = pool.fork(a)
    pool.step({b: 1})
    assert pool.issue.tolist() == [1, 1, 2, -1, 1, 1, 2, 3] + [-1] * 4, "a copy takes its numbers along"
    pool.trim(b, 2)
    assert pool.issue.tolist() == [1, 1, 2, -1, 1, 1, -1, -1] + [-1] * 4, "trimmed slots have no token"
    pool.free(a)
    assert pool.issue.tolist() == [-1, -1, -1, -1, 1, 1, -1, -1] + [-1] * 4, "freed slots have none either"
    pool.extend(b, 1)
    assert pool.issue.tolist() == [-1, -1, -1, -1, 1, 1, 4, -1] + [-1] * 4, "and what is handed out again is new"


def test_trimming_a_shared_page_leaves_the_other_holders_tokens():
    pool = PagePool(pages=2, page_size=4)
    a = pool.sequence()
    pool.step({a: 4})
    assert pool.issue.max() == 1
    pool.trim(pool.fork(a), 1)
    assert pool.issue.tolist()[:4] == [1, 1, 1, 1]


def freed():
    pool = PagePool(pages=2, page_size=2)
    sequence = pool.sequence()
    pool.free(sequence)
    return pool, sequence


@pytest.mark.parametrize(
    "act",
    [
        lambda pool, s: pool.step({s: 1}),
        lambda pool, s: pool.extend(s, 1),
        lambda pool, s: pool.trim(s, 0),
        lambda pool, s: pool.free(s),
        lambda pool, s: pool.fork(s),
        lambda pool, s: pool.drop(s, 0),
    ],
    ids=["step", "extend", "trim", "free", "fork", "drop"],
)
def test_every_operation_refuses_a_dead_or_foreign_handle(act):
    pool, sequence = freed()
    with pytest.raises(ArgumentError, match=r"sequence: given sequence 0, which was freed; allowed: a live sequence of this pool"):
        act(pool, sequence)
    with pytest.raises(
        ArgumentError, match=r"sequence: given sequence 0, which belongs to another pool; allowed: a live sequence of this pool"
    ):
        act(pool, PagePool(pages=2, page_size=2).sequence())
    with pytest.raises(ArgumentError, match=r"sequence: given 'a'; allowed: a sequence of this pool"):
        act(pool, "a")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: PagePool(pages=0, page_size=1), "pages: given 0; allowed: an int of 1 or more"),
        (lambda: PagePool(pages=1, page_size=1.5), "page_size: given 1.5; allowed: an int of 1 or more"),
        (lambda: PagePool(pages=True, page_size=1), "pages: given True; allowed: an int of 1 or more"),
    ],
    ids=["pages", "page_size", "bool"],
)
def test_sizes_that_are_refused(act, message):
    with pytest.raises(ArgumentError) as caught:
        act()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda pool, s: pool.step(None),
            "new_tokens: given nothing (None); allowed: a mapping from sequences to counts, such as {sequence: 1}",
        ),
        (lambda pool, s: pool.step({s: True}), "new_tokens: given True; allowed: an int of 0 or more"),
        (lambda pool, s: pool.step({s: -1}), "new_tokens: given -1; allowed: an int of 0 or more"),
        (lambda pool, s: pool.extend(s, 1.0), "new_tokens: given 1.0; allowed: an int of 0 or more"),
        (lambda pool, s: pool.trim(s, 11), "length: given 11; allowed: 4 to 10: positions before 4 were dropped"),
        (lambda pool, s: pool.trim(s, 3), "length: given 3; allowed: 4 to 10: positions before 4 were dropped"),
        (lambda pool, s: pool.trim(s, "3"), "length: given '3'; allowed: 4 to 10: positions before 4 were dropped"),
        (lambda pool, s: pool.drop(s, 11), "before: given 11; allowed: 0 to 10"),
        (lambda pool, s: pool.drop(s, -1), "before: given -1; allowed: 0 to 10"),
    ],
    ids=["none", "bool", "negative", "float", "trim-beyond", "trim-dropped", "trim-type", "drop-beyond", "drop-negative"],
)
def test_numbers_that_are_refused_change_nothing(act, message):
    pool = PagePool(pages=4, page_size=4)
    other, sequence = pool.sequence(), pool.sequence()
    pool.step({other: 1, sequence: 10})
    pool.drop(sequence, 4)
    before = books(pool)
    with pytest.raises(ArgumentError) as caught:
        act(pool, sequence)
    assert str(caught.value) == message
    assert books(pool) == before


def test_one_bad_request_refuses_the_step():
    pool = PagePool(pages=4, page_size=4)
    a, b = pool.sequence(), pool.sequence()
    before = books(pool)
    with pytest.raises(ArgumentError):
        pool.step({a: 3, b: -1})
    assert books(pool) == before


def test_of_forks_that_extend_together_the_longest_keeps_the_page():
    """The other one would overwrite a token of the longest, which a rollback gives back to it."""
    pool = PagePool(pages=3, page_size=4)
    a = pool.sequence()
    pool.step({a: 3})
    b = pool.fork(a)
    pool.trim(b, 1)
    assert pool.step({a: 1, b: 1}).copies == ((0, 1),)
    assert (a.pages, b.pages) == ([0], [1])
