"""Sequences that are swapped to host memory and back."""

import copy
import pickle

import pytest
import torch

import quire
from quire.cache.pool import PagePool
from quire.errors import ArgumentError, ContractError, OutOfPages, StaleBatch
from support.pool_state import books

CACHES = {
    "fp32": {"dtype": torch.float32},
    "joint": {"dtype": torch.float16, "layout": "vllm_joint"},
    "split": {"dtype": torch.bfloat16, "layout": "vllm_x"},
    "token scales": {"dtype": torch.int8, "scales": "token"},
    "head scales": {"dtype": torch.float8_e4m3fn, "k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([4.0, 0.25])},
    "nvfp4 and nvfp4_swizzled": {"k_format": "nvfp4", "v_format": "nvfp4_swizzled"},
    "int8 and int4, scales per token": {"k_format": "int8", "v_format": "int4", "scales": "token"},
}


def bits(cache, pages):
    return [t[pages].clone() for t in cache._page_data()]


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
def test_tokens_come_back_in_other_pages(kind, ledger):
    torch.manual_seed(0)
    pool = PagePool(pages=8, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, ledger=ledger, **kind)
    q, k, v = (torch.randn(11, 2, 64) for _ in range(3))
    a, b = pool.sequence(), pool.sequence()
    quire.write(k[:10], v[:10], cache, pool.step({a: 10}))
    before, kept = bits(cache, a.pages), a.pages
    reference = copy.deepcopy((cache, pool))
    host = cache.swap_out(pool.swap_out(a))
    assert (pool.free_pages, a.length, a.pages, host.pages) == (8, 10, [-1] * 3, 3)
    other = torch.randn(20, 2, 64)
    quire.write(other, -other, cache, pool.step({b: 20}))
    assert set(b.pages) & set(kept)
    cache.swap_in(host, pool.swap_in(a))
    assert not set(a.pages) & set(b.pages)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, bits(cache, a.pages)))
    found = quire.step(q[10:], k[10:], v[10:], cache, pool.step({a: 1}))
    cache, pool = reference[0], reference[0].pool
    wanted = quire.step(q[10:], k[10:], v[10:], cache, pool.step({pool.sequences[0]: 1}))
    assert torch.equal(found, wanted)


def test_the_ledger_follows_and_finds_what_was_not_copied():
    pool = PagePool(pages=8, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32, ledger=True)
    k = torch.randn(10, 1, 8)
    a = pool.sequence()
    quire.write(k[:6], k[:6], cache, pool.step({a: 6}))
    b = pool.fork(a)
    for swapped, copied in ((a, True), (b, False)):
        host = cache.swap_out(pool.swap_out(swapped))
        quire.write(k, k, cache, pool.step({pool.sequence(): 10}))
        pages = pool.swap_in(swapped)
        if copied:
            cache.swap_in(host, pages)
            quire.step(k[:1], k[:1], k[:1], cache, pool.step({swapped: 1}))
        else:
            with pytest.raises(ContractError, match="residency"):
                quire.step(k[:1], k[:1], k[:1], cache, pool.step({swapped: 1}))
        pool.free(pool.sequences[-1])


def test_issue_numbers_are_kept_from_before_or_given_later():
    for asked_before in (True, False):
        pool = PagePool(pages=4, page_size=4)
        if asked_before:
            assert pool.issue.max() == -1
        a = pool.sequence()
        pool.step({a: 5})
        pool.step({a: 1})
        pool.swap_out(a)
        b = pool.sequence()
        pool.step({b: 1})
        assert pool.issue.tolist().count(3) == 1
        assert len(pool.swap_in(a)) == 2
        wanted = [1, 1, 1, 1, 1, 2, -1, -1] if asked_before else [3] * 6 + [-1] * 2
        assert [n for page in a.pages for n in pool.issue.view(4, 4)[page].tolist()] == wanted


def test_dropped_shared_and_cached_pages():
    pool = PagePool(pages=8, page_size=2)
    a = pool.match([])
    pool.step({a: 7})
    prompt = list(range(7))
    pool.register(a, prompt)
    pool.drop(a, 2)
    b = pool.fork(a)
    assert pool.swap_out(a) == (1, 2, 3) and pool.free_pages == 5
    assert b.pages == [-1, 1, 2, 3] and pool.usage().shared == 0
    pool.free(b)
    assert pool.match(prompt).pages == [0, 1, 2], "its pages are still cached"
    pages = pool.swap_in(a)
    assert a.pages == [-1, *pages] and a.length == 7 and pool.free_pages == 2
    pool.register(a, prompt)
    assert pool.step({a: 3}).kv_lens.tolist() == [10]


def test_what_a_swapped_sequence_cannot_do():
    pool = PagePool(pages=4, page_size=4)
    a, b = pool.sequence(), pool.sequence()
    batch = pool.step({a: 6})
    pool.swap_out(a)
    with pytest.raises(StaleBatch):
        batch.check_current()
    before = books(pool)
    acts = (
        lambda: pool.step({a: 1}),
        lambda: pool.step({b: 1, a: 0}),
        lambda: pool.extend(a, 1),
        lambda: pool.fork(a),
        lambda: pool.trim(a, 1),
        lambda: pool.drop(a, 4),
        lambda: pool.register(a, [1]),
        lambda: pool.swap_out(a),
    )
    for act in acts:
        with pytest.raises(ArgumentError, match="sequence 0, which is swapped out; allowed: a sequence with its pages: swap it in"):
            act()
    with pytest.raises(ArgumentError, match="sequence 1, which has its pages"):
        pool.swap_in(b)
    assert books(pool) == before
    pool.step({b: 12})
    before = books(pool)
    with pytest.raises(OutOfPages):
        pool.swap_in(a)
    assert books(pool) == before
    copied = pickle.loads(pickle.dumps(pool))
    copied.free(copied.sequences[1])
    assert len(copied.swap_in(copied.sequences[0])) == 2
    pool.free(a)
    assert pool.sequences == (b,) and not pool._swapped
    empty = pool.sequence()
    assert pool.swap_out(empty) == () and pool.swap_in(empty) == ()
    with pytest.raises(ArgumentError, match="which was freed"):
        pool.swap_in(a)


def test_arguments_of_a_cache_that_are_refused():
    pool = PagePool(pages=4, page_size=4)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
    for pages, given in (([4], "4"), ([True], "True"), ("12", "'12'"), ([1, 1], r"\[1, 1\]")):
        with pytest.raises(ArgumentError, match=f"pages: given {given}"):
            cache.swap_out(pages)
    host = cache.swap_out([2, 0])
    assert repr(host) == "HostPages(2 pages, fp32, layout=nhd, 512 bytes)"
    with pytest.raises(ArgumentError, match="pages: given 1 page ids; allowed: 2"):
        cache.swap_in(host, [1])
    others = ({"head_dim": 4}, {"dtype": torch.float16}, {"layout": "hnd"}, {"ledger": True})
    for other in others:
        target = quire.KVCache.allocate(pool, **({"kv_heads": 1, "head_dim": 8, "dtype": torch.float32} | other))
        with pytest.raises(ArgumentError, match="host: given HostPages"):
            target.swap_in(host, [0, 1])


def test_the_first_pages_of_a_swapped_sequence_are_evicted_last():
    pool = PagePool(pages=3, page_size=4)
    a = pool.match([])
    pool.step({a: 12})
    pool.register(a, list(range(12)))
    pool.swap_out(a)
    pool.step({pool.sequence(): 1})
    assert pool.match(list(range(13))).length == 8


def test_a_sequence_that_came_back_is_registered_again():
    pool = PagePool(pages=4, page_size=4)
    a = pool.match([])
    pool.step({a: 8})
    pool.register(a, list(range(8)))
    pool.swap_out(a)
    b = pool.sequence()
    pool.step({b: 16})
    pool.free(b)
    pool.swap_in(a)
    pool.register(a, list(range(8)))
    assert pool.match(list(range(9))).pages == a.pages
