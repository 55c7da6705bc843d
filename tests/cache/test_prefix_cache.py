"""The prefix cache of a pool: what it finds, what it gives up, and what it refuses. `test_pool_machine.py` mixes it with all other
operations."""

import copy
import pickle

import numpy
import pytest
import torch

import quire
from quire.cache.pool import PagePool
from quire.errors import ArgumentError, ContractError, OutOfPages


def serve(pool, prompt, salt=""):
    """A sequence with all tokens of a prompt, registered."""
    sequence = pool.match(prompt, salt)
    pool.step({sequence: len(prompt) - sequence.length})
    pool.register(sequence, prompt)
    return sequence


def ids(*ranges):
    return [id for begin, end in ranges for id in range(begin, end)]


def test_full_pages_with_the_same_ids_are_found():
    pool = PagePool(pages=16, page_size=4)
    a = serve(pool, ids((0, 14)))
    b = pool.match(ids((0, 10), (50, 60)))
    assert (b.length, b.pages, b.runs) == (8, a.pages[:2], [(0, a.id)])
    assert pool.holders.tolist()[:4] == [2, 2, 1, 1] and pool.usage()[2:] == (2, 2, 22)
    batch = pool.step({b: 12})
    assert batch.copies == () and batch.page_table.tolist() == [[0, 1, 4, 5, 6]] and b.runs == [(0, a.id), (8, b.id)]
    pool.free(a, b)
    assert pool.free_pages == 16 and pool.prefix_usage() == (3, 3, 2, 5, 0)
    assert str(pool.prefix_usage()) == "3 pages cached (3 free), 2 hits, 5 misses, 0 evictions"
    c = pool.match(ids((0, 100)))
    assert (c.pages, pool.free_pages) == ([0, 1, 2], 13)


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 9])
def test_the_last_token_is_left_to_be_computed(length):
    pool = PagePool(pages=16, page_size=4)
    serve(pool, ids((0, 12)))
    assert pool.match(ids((0, length))).length == max(length - 1, 0) // 4 * 4


def test_a_page_is_found_only_after_the_same_tokens():
    pool = PagePool(pages=16, page_size=4)
    serve(pool, ids((0, 12)))
    serve(pool, ids((90, 94), (4, 8)))
    assert pool.match(ids((90, 94), (4, 12), (0, 1))).length == 8, "(8, 12) was computed after other tokens"
    assert pool.match(ids((4, 12))).length == 0


def test_salts_do_not_share():
    pool = PagePool(pages=16, page_size=4)
    serve(pool, ids((0, 12)), "a")
    assert [pool.match(ids((0, 12)), salt).length for salt in ("", "a", "b")] == [0, 8, 0]
    plain = pool.sequence()
    pool.step({plain: 12})
    pool.register(plain, ids((0, 12)))
    assert pool.match(ids((0, 12))).pages == plain.pages[:2], "a sequence that match did not make has no salt"


def test_ids_of_every_type_are_the_same():
    pool = PagePool(pages=16, page_size=4)
    prompt = [2**31, -(2**63), 2**63 - 1, 0, 5, 6, 7, 8, 9]
    serve(pool, prompt)
    strided = numpy.array([prompt, prompt]).T[:, 0]
    for given in (tuple(prompt), numpy.array(prompt), strided, torch.tensor(prompt)):
        assert pool.match(given).length == 8
    small = serve(pool, list(range(9)))
    for given in (numpy.arange(9, dtype=numpy.uint8), torch.arange(9, dtype=torch.int32)):
        assert pool.match(given).pages == small.pages[:2]


def test_registering_goes_on_where_it_stopped():
    pool = PagePool(pages=16, page_size=4)
    a = pool.sequence()
    pool.step({a: 10})
    pool.register(a, ids((0, 3)))
    assert pool.prefix_usage().cached == 0
    pool.register(a, ids((0, 7)))
    assert pool.match(ids((0, 99))).length == 4
    pool.register(a, numpy.arange(10))
    pool.register(a, ids((0, 4)))
    assert pool.match(ids((0, 99))).length == 8
    pool.trim(a, 6)
    pool.step({a: 6})
    pool.register(a, ids((0, 6), (70, 76)))
    assert pool.match(ids((0, 6), (70, 80))).pages == a.pages, "trimmed tokens have new ids"
    assert pool.match(ids((0, 99))).length == 8, "which other sequences do not share"


def test_a_page_that_is_written_again_is_not_found():
    pool = PagePool(pages=16, page_size=4)
    a = serve(pool, ids((0, 8)))
    pool.trim(a, 6)
    assert pool.match(ids((0, 9))).length == 4
    b = serve(pool, ids((20, 28)))
    c = pool.fork(b)
    pool.trim(c, 6)
    pool.free(b)
    assert pool.match(ids((20, 29))).length == 8, "the tokens after those of c are still there"
    pool.free(pool.sequences[-1])
    assert pool.step({c: 1}).copies == () and pool.match(ids((20, 29))).length == 4


def test_fork_and_drop():
    pool = PagePool(pages=16, page_size=4)
    a = serve(pool, ids((0, 9)))
    b = pool.fork(a)
    pool.step({b: 3})
    pool.register(b, ids((0, 9), (60, 63)))
    assert pool.match(ids((0, 9), (60, 64))).pages == b.pages
    pool.drop(b, 8)
    pool.step({b: 4})
    pool.register(b, ids((0, 9), (60, 67)))
    assert pool.match(ids((0, 9), (60, 68))).length == 16, "dropped pages stay cached"


def test_the_same_tokens_in_two_pages_are_cached_once():
    pool = PagePool(pages=16, page_size=4)
    a, b = pool.match(ids((0, 9))), pool.match(ids((0, 9)))
    pool.step({a: 9, b: 9})
    pool.register(a, ids((0, 9)))
    pool.register(b, ids((0, 9)))
    assert pool.prefix_usage().cached == 2 and pool.match(ids((0, 9))).pages == a.pages[:2]
    pool.free(b)
    assert pool.prefix_usage()[:2] == (2, 0)


def test_registering_again_adds_pages_in_place_of_evicted_ones():
    pool = PagePool(pages=6, page_size=4)
    prompt = ids((0, 16))
    a, b = pool.match(prompt), pool.match(prompt)
    pool.step({a: 8, b: 12})
    pool.register(a, prompt[:8])
    pool.register(b, prompt[:12])
    assert pool.match(prompt).pages == [*a.pages, b.pages[2]]
    pool.free(a, pool.sequences[-1])
    pool.step({pool.sequence(): 12})
    assert pool.prefix_usage()[:2] == (1, 0) and pool.match(prompt).length == 0
    pool.register(b, prompt[:12])
    assert pool.prefix_usage().cached == 3 and pool.match(prompt).pages == b.pages


def test_pages_after_one_that_was_evicted_are_found_when_that_one_is_computed_again():
    """The surviving pages are adopted; the copies of the sequence that computed all of them stay its own."""
    pool = PagePool(pages=8, page_size=4)
    prompt = ids((0, 16))
    a = serve(pool, prompt[:12])
    pool.drop(a, 8)
    pool.step({pool.sequence(): 28})
    assert pool.prefix_usage()[:2] == (1, 0) and pool.match(prompt).length == 0, "pages 0 and 1 are evicted, page 2 is held"
    pool.free(*pool.sequences[1:])
    b = serve(pool, prompt)
    assert pool.match(prompt).pages == [*b.pages[:2], a.pages[2]] and a.pages[2] != b.pages[2]
    assert pool.prefix_usage().cached == 4
    pool.free(b)
    assert pool.match(prompt).pages == [*pool.match(prompt).pages[:2], a.pages[2]]


def test_pages_after_one_that_is_missing_are_added():
    pool = PagePool(pages=6, page_size=4)
    prompt = ids((0, 16))
    a = serve(pool, prompt[:8])
    pool.drop(a, 8)
    other = pool.sequence()
    pool.step({other: 20})
    pool.step({a: 4})
    pool.register(a, prompt[:12])
    assert pool.prefix_usage().cached == 1 and pool.match(prompt).length == 0
    assert pool.match(prompt, window=5).pages == [-1, -1, a.pages[2]]
    pool.free(other)
    b = pool.match(prompt)
    pool.step({b: 8})
    pool.register(b, prompt[:8])
    assert pool.match(prompt).pages == [*b.pages, a.pages[2]], "the first two are there again"


def test_dropped_pages_are_evicted_last_ones_first():
    pool = PagePool(pages=6, page_size=4)
    a = serve(pool, ids((0, 17)))
    pool.drop(a, 16)
    pool.step({pool.sequence(): 8})
    assert pool.match(ids((0, 17))).length == 12 and pool.prefix_usage().evictions == 1


def longest_in_window(prompt, there, window, size=4):
    """The most tokens, in whole pages, of which all that the next token sees are in pages that are there."""
    ends = range(max(len(prompt) - 1, 0) // size + 1)
    return max(end for end in ends if all(at // size in there for at in range(max(end * size - window + 1, 0), end * size))) * size


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 13, 100])
def test_with_a_window_only_the_pages_that_the_next_token_sees_are_needed(window):
    """For every set of pages that were evicted."""
    prompt = ids((0, 18))
    for evicted in range(16):
        pool = PagePool(pages=16, page_size=4)
        a = serve(pool, prompt)
        gone = [page for page in range(4) if evicted >> page & 1]
        for page in gone:
            del pool._prefixes.page_of[pool._prefixes.key_of(a.pages[page])]
            pool._prefixes.writers[a.pages[page]] = -2
        before = pool.prefix_usage()
        b = pool.match(prompt, window=window)
        there = set(range(4)) - set(gone)
        assert b.length == longest_in_window(prompt, there, window)
        first, end = max(b.length - window + 1, 0) // 4, b.length // 4
        assert b.pages == [-1] * first + a.pages[first:end]
        usage = pool.prefix_usage()
        assert (usage.hits - before.hits, usage.misses - before.misses) == (end - first, 4 - end)
        assert pool.holders[a.pages[:4]].tolist() == [1 + (first <= page < end) for page in range(4)]
        pool.step({b: len(prompt) - b.length})
        pool.register(b, prompt)
        assert pool.match(prompt, window=window).length == 16, "the pages that were missing are computed and added"
        pool.free(*pool.sequences)
        assert pool.free_pages == 16 and not pool.holders.any()


def test_attention_with_a_window_over_found_pages_is_the_same():
    torch.manual_seed(5)
    pool = PagePool(pages=12, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32, ledger=True)
    options, prompt = quire.Options(window=6), ids((0, 22))
    q, k, v = torch.randn(22, 8, 16).split((4, 2, 2), dim=1)
    a = pool.match(prompt, window=6)
    whole = quire.step(q, k, v, cache, pool.step({a: 22}), options)
    pool.register(a, prompt)
    pool.drop(a, 12)
    filler = pool.sequence()
    pool.step({filler: 9 * 4})
    pool.free(filler)
    assert pool.prefix_usage().evictions == 3 and pool.match(prompt).length == 0
    with quire.checked():
        b = pool.match(prompt, window=6)
        out = quire.step(q[20:], k[20:], v[20:], cache, pool.step({b: 2}), options)
    assert b.pages[:5] == a.pages[:5]
    torch.testing.assert_close(out, whole[20:])


@pytest.mark.parametrize("window", [0, -1, True, 2.0, (4, 0)])
def test_windows_that_are_refused(window):
    with pytest.raises(ArgumentError, match="window"):
        PagePool(pages=4, page_size=4).match([1, 2], window=window)


def test_other_ids_than_before_are_refused():
    pool = PagePool(pages=16, page_size=4)
    a = pool.match([1] * 20)
    pool.step({a: 16})
    pool.register(a, [1] * 8)
    found = pool.match([1] * 20)
    pool.step({found: 4})
    for sequence in (a, found, pool.fork(a)):
        for other in ([2] * 8, [1] * 7 + [2], [2] + [1] * 7, [2] * 12, [2] * 4, [1] * 3 + [2] + [1] * 8):
            with pytest.raises(ArgumentError, match=r"ids that differ from those that page [01] was registered with"):
                pool.register(sequence, other)
    assert pool.prefix_usage().cached == 2
    pool.register(a, [1] * 3)
    pool.register(a, [1] * 12)
    pool.drop(a, 12)
    with pytest.raises(ArgumentError, match="ids that differ from those that a page that was dropped had been registered with"):
        pool.register(a, [1] * 11 + [2] * 5)
    assert pool.match([1] * 20).length == 12


def test_a_page_has_one_key_if_forks_are_given_different_ids():
    pool = PagePool(pages=8, page_size=4)
    first = serve(pool, [1] * 4)
    a = pool.sequence()
    pool.step({a: 4})
    b = pool.fork(a)
    pool.register(a, [1] * 4)
    pool.register(b, [2] * 4)  # of the page of a: `first` has the one that was added
    pool.free(first)
    pool.step({pool.sequence(): 28 - 4})
    pool.step({pool.sequences[-1]: 1})
    with pytest.raises(ArgumentError, match="ids that differ from those that page 1 was registered with"):
        pool.register(a, [1] * 4)
    assert pool.prefix_usage().cached == 1


def test_pages_are_evicted_in_the_order_of_their_release_and_prefixes_last():
    pool = PagePool(pages=6, page_size=4)
    old, new = serve(pool, ids((0, 12))), serve(pool, ids((20, 32)))
    pool.free(old)
    pool.free(new)
    pool.free(pool.match(ids((0, 6))))
    taker = pool.sequence()
    found = []
    for _ in range(6):
        lengths = []
        for first in (0, 20):
            probe = copy.deepcopy(pool).match(ids((first, first + 13)))
            lengths.append(probe.length)
        found.append(tuple(lengths))
        pool.step({taker: 4})
    assert found == [(12, 12), (8, 12), (4, 12), (4, 8), (4, 4), (4, 0)], "the page matched last is the last"
    assert pool.prefix_usage() == (0, 0, 1, 4, 6)
    with pytest.raises(OutOfPages):
        pool.step({taker: 1})


def test_pages_that_are_not_cached_are_used_first():
    pool = PagePool(pages=6, page_size=4)
    pool.free(serve(pool, ids((0, 10))))
    pool.step({pool.sequence(): 16})
    assert pool.prefix_usage() == (2, 2, 0, 2, 0) and pool.free_pages == 2


def test_a_rollback_does_not_restore_pages_that_the_step_may_have_overwritten():
    pool = PagePool(pages=4, page_size=4)
    pool.free(serve(pool, ids((0, 16))))
    a = pool.sequence()
    batch = pool.step({a: 5})
    wanted = batch.page_table.tolist()
    pool.rollback(batch)
    assert pool.prefix_usage() == (2, 2, 0, 3, 2) and pool.free_pages == 4
    assert pool.match(ids((0, 16))).length == 8
    pool.free(pool.sequences[-1])
    assert pool.step({a: 5}).page_table.tolist() == wanted
    assert pool.prefix_usage().evictions == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))], ids=["deepcopy", "pickle"])
def test_a_copied_pool_has_its_own_cache(copied):
    pool = PagePool(pages=4, page_size=4)
    pool.free(serve(pool, ids((0, 16))))
    other = copied(pool)
    other.step({other.sequence(): 16})
    assert pool.match(ids((0, 16))).length == 12 and other.match(ids((0, 16))).length == 0


def test_memory():
    pool = PagePool(pages=10_000, page_size=16)
    pool.step({pool.sequence(): 1})
    before = pool.nbytes
    pool.prefix_usage()
    assert pool.nbytes == before, "a pool that does not use it pays nothing"
    a = pool.match([])
    assert pool.nbytes - before <= 34 * 10_000
    pool.step({a: 16 * 5000})
    before = pool.nbytes
    pool.register(a, range_ids := numpy.arange(16 * 5000))
    assert 0 < pool.nbytes - before <= 180 * 5000 and len(range_ids)


def step_of(pool, cache, sequence, tokens):
    """Keys, values and attention of the next tokens of a sequence, which follow from their ids."""
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(3, 200, 2, 16, generator=chance)
    q, k, v = table[:, tokens]
    return quire.step(q, k, v, cache, pool.step({sequence: len(tokens)}))


def test_attention_over_found_pages_is_the_same_and_they_satisfy_the_ledger():
    pool = PagePool(pages=8, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32, ledger=True)
    prompt = ids((0, 11))
    a = pool.match(prompt)
    wanted = step_of(pool, cache, a, prompt)[8:]
    pool.register(a, prompt)
    pool.free(a)
    step_of(pool, cache, pool.sequence(), ids((100, 110)))
    b = pool.match(prompt)
    assert b.length == 8
    torch.testing.assert_close(step_of(pool, cache, b, prompt[8:]), wanted, rtol=0, atol=1e-6)
    assert b.runs == [(0, a.id), (8, b.id)]


def test_the_ledger_reports_a_page_that_was_registered_and_never_written():
    pool = PagePool(pages=8, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32, ledger=True)
    serve(pool, ids((0, 11)))
    b = pool.match(ids((0, 11)))
    with pytest.raises(ContractError, match=r"slot 0 \(page 0, offset 0\): never written"):
        step_of(pool, cache, b, ids((8, 11)))


def test_issue_numbers_that_are_kept_from_a_later_time_on():
    pool = PagePool(pages=4, page_size=4)
    pool.free(serve(pool, ids((0, 10))))
    assert pool.issue.tolist() == [1] * 8 + [-1] * 8
    pool.step({pool.sequence(): 12})
    assert pool.issue.tolist() == [1] * 4 + [2] * 12


@pytest.mark.parametrize(
    ("token_ids", "given"),
    [
        ("text", "'text'"),
        (None, "nothing"),
        ([1, 2.5, 3], "2.5 at index 1"),
        ([0] * 5 + [2**63, 0], "at index 5"),
        ([1, "2", 3], "'2' at index 1"),
        (numpy.zeros(9), "float64"),
        (numpy.zeros((3, 3), dtype=int), "3, 3"),
        (numpy.zeros(9, dtype=numpy.uint64), "uint64"),
        (torch.zeros(9, dtype=torch.bool), "bool"),
        (torch.zeros(9, dtype=torch.int32, device="meta"), "meta"),
        ([1.5], "1.5 at index 0"),
        (["a"], "'a' at index 0"),
        ((2**63,), "9223372036854775808 at index 0"),
        ([7, True], "True at index 1"),
        ([5] * 9 + [False], "False at index 9"),
        ([numpy.int64(5), None], "None at index 1"),
        (torch.zeros(9, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(9, dtype=torch.complex64).conj(), "complex64"),
        (torch.zeros(9, dtype=torch.int64)._neg_view(), "a view with the negative bit, int64"),
    ],
    ids=lambda value: None,
)
def test_token_ids_that_are_refused(token_ids, given):
    pool = PagePool(pages=8, page_size=2)
    a = pool.sequence()
    pool.step({a: 9})
    for act in (lambda: pool.match(token_ids), lambda: pool.register(a, token_ids)):
        with pytest.raises(ArgumentError, match=f"token_ids: given .*{given}.*; allowed: ints of 64 bits"):
            act()
    assert pool.sequences == (a,) and pool.prefix_usage()[:4] == (0, 0, 0, 0)


def test_other_arguments_that_are_refused():
    pool = PagePool(pages=8, page_size=2)
    a = pool.sequence()
    pool.step({a: 5})
    with pytest.raises(ArgumentError, match="salt: given 7; allowed: a str"):
        pool.match([1, 2], 7)
    with pytest.raises(ArgumentError, match=r"salt: given '\\ud800'; allowed: a str without lone surrogates"):
        pool.match([1, 2], "\ud800")
    with pytest.raises(ArgumentError, match="token_ids: given 6 ids; allowed: at most 5, the length of the sequence"):
        pool.register(a, ids((0, 6)))
    pool.register(a, ids((0, 5)))
    b = pool.fork(a)
    pool.trim(b, 2)
    with pytest.raises(ArgumentError, match="ids that differ from those that page 0 was registered with"):
        pool.register(b, [0, 2])
    pool.register(b, [0, 1])
    pool.free(b)
    with pytest.raises(ArgumentError, match="which was freed"):
        pool.register(b, [0, 1])
    with pytest.raises(ArgumentError, match=r"shard: given \(0, 2, 2\); allowed: a pool without a shard"):
        PagePool(pages=8, page_size=2, shard=(0, 2, 2)).match([1, 2])


def test_the_runs_of_found_pages_name_their_writers():
    pool = PagePool(pages=8, page_size=4)
    a = pool.sequence()
    pool.step({a: 6})
    b = pool.fork(a)
    pool.step({b: 11})
    pool.register(b, ids((0, 17)))
    assert pool.match(ids((0, 17))).runs == [(0, a.id), (4, -1), (8, b.id)], "both wrote the second page"


def test_evicted_pages_have_no_numbers_after_a_rollback():
    pool = PagePool(pages=4, page_size=4)
    assert pool.issue.max() == -1
    pool.free(serve(pool, ids((0, 8))))
    a = pool.sequence()
    pool.step({a: 7})
    b = pool.fork(a)
    batch = pool.step({a: 1, b: 5})
    assert len(batch.copies) == 1 and pool.prefix_usage().evictions == 2
    pool.rollback(batch)
    held = pool.issue.view(4, 4)[a.pages].flatten().tolist()
    assert held == [2] * 7 + [-1] and pool.issue.tolist().count(-1) == 9
