"""The prefix cache of a pool: full pages are found by the token ids of their sequence, also after its sequence was freed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy

from quire.cache.eviction_queue import EvictionQueue
from quire.cache.issue_numbers import FREE
from quire.cache.page_rows import width_for
from quire.cache.sequence import Runs, Sequence
from quire.cache.sequence_record import DROPPED, FIELDS, LAST, LENGTH, PAGES, ROW, WIDTH
from quire.cache.token_ids import KEY_BYTES, KeyChain, TokenIds
from quire.cache.transaction import Transaction
from quire.errors import ArgumentError, describe

if TYPE_CHECKING:
    from quire.cache.pool import PagePool

UNKNOWN = -1
"""The writer of a page that several sequences wrote."""
NOT_CACHED = -2
"""The writer of a page that is not in the cache."""


class PrefixUsage(NamedTuple):
    """The state of a pool's prefix cache in numbers of pages."""

    cached: int
    """Pages in the cache. `match` finds a page if all pages before it that the next token sees are in the cache, too."""
    unheld: int
    """Of these, pages that no sequence holds: they count as free."""
    hits: int
    """Pages that `match` found so far."""
    misses: int
    """Full pages that `match` looked for and did not find."""
    evictions: int
    """Cached pages that were allocated for other tokens."""

    def __str__(self) -> str:
        counts = f"{self.hits} hits, {self.misses} misses, {self.evictions} evictions"
        return f"{self.cached} pages cached ({self.unheld} free), {counts}"


class PrefixCache:
    """The cached pages of a pool. A page has at most one key, and a key at most one page."""

    def __init__(self, pages: int) -> None:
        self.page_of: dict[bytes, int] = {}
        """The page of each key."""
        self.writers = numpy.full(pages, NOT_CACHED, dtype=numpy.int64)
        """For each page the id of the sequence that wrote it, or UNKNOWN, or NOT_CACHED."""
        self.keys = numpy.zeros((pages, KEY_BYTES), dtype=numpy.uint8)
        """The key of each cached page."""
        self.unheld = EvictionQueue(pages)
        """Free pages that are cached, or were until a step was rolled back that allocated them."""
        self.hits = self.misses = self.evictions = 0

    def usage(self) -> PrefixUsage:
        unheld = len(self.cached(self.unheld.listed()))
        return PrefixUsage(len(self.page_of), unheld, self.hits, self.misses, self.evictions)

    def cached(self, pages: numpy.ndarray) -> numpy.ndarray:
        """Those of `pages` that are cached."""
        return pages[self.is_cached(pages)]

    def is_cached(self, pages: numpy.ndarray) -> numpy.ndarray:
        return self.writers[pages] != NOT_CACHED

    def key_of(self, page: int) -> bytes:
        return self.keys[page].tobytes()

    def forget(self, pages: numpy.ndarray, transaction: Transaction) -> None:
        """Plans that cached pages are cached no more."""
        entries = {self.key_of(page): page for page in pages.tolist()}
        transaction.remove_entries(self, "page_of", entries)
        transaction.set_cells(self, "writers", pages, NOT_CACHED)

    @property
    def nbytes(self) -> int:
        each = sys.getsizeof(bytes(KEY_BYTES)) + sys.getsizeof(2**30)
        entries = sys.getsizeof(self.page_of) + each * len(self.page_of)
        return entries + self.writers.nbytes + self.keys.nbytes + self.unheld.nbytes


def plan_evictions(pool: PagePool, count: int, transaction: Transaction) -> numpy.ndarray:
    """Plans to take the `count` free pages of the queue whose last holders released them first."""
    cache = pool._prefixes
    assert cache is not None
    pages = cache.unheld.pop(count, transaction)
    cached = cache.cached(pages)
    forget_overwritten(pool, cached, transaction)
    if pool._issue is not None:
        transaction.lasting.set_cells(pool, "_issue", cached, FREE)
    transaction.lasting.set_attribute(cache, "evictions", cache.evictions + len(cached))
    return pages


def forget_overwritten(pool: PagePool, pages: numpy.ndarray, transaction: Transaction) -> None:
    """Plans that cached pages are cached no more because a step writes to them, even if the step is rolled back."""
    if pool._prefixes is not None and len(pages):
        pool._prefixes.forget(pages, transaction.lasting)


def plan_match(pool: PagePool, token_ids: object, salt: object, window: object, transaction: Transaction) -> Sequence:
    """Plans a sequence that holds the cached pages of the first of these tokens, without the last token; with a window, those of
    them that the next token sees."""
    _check_whole(pool)
    ids, chain, reach = TokenIds(token_ids), KeyChain.begin(salt), _reach_of(window)
    cache, size = pool._prefix_cache(), pool.page_size
    most = max(len(ids) - 1, 0) // size
    found, keys = [], []
    for key in ids.keys(size, 0, most, chain.key):
        page = cache.page_of.get(key, -1)
        if page < 0 and reach is None:
            break
        found.append(page)
        keys.append(key)
    first, end = (0, len(found)) if reach is None else _pages_in_reach(found, size, reach)
    transaction.set_attribute(cache, "hits", cache.hits + end - first)
    transaction.set_attribute(cache, "misses", cache.misses + most - end)
    chain = KeyChain(chain.root, tuple(keys[:end]))
    if not end:
        return pool._new_sequence(transaction, chain=chain)
    pages = numpy.array(found[first:end], dtype=numpy.int64)
    row = numpy.zeros(FIELDS, dtype=numpy.int64)
    row[LENGTH], row[PAGES], row[DROPPED], row[LAST] = end * size, end, first, found[end - 1] if first < end else -1
    row[WIDTH] = width_for(-(-len(ids) // size))
    table = pool.table(int(row[WIDTH]))
    (row[ROW],) = table.next_rows(1)
    table.rows.exchange(transaction, 1)
    cells = numpy.full(table.width, -1, dtype=numpy.int32)
    cells[first:end] = pages
    transaction.set_cells(table, "cells", int(row[ROW]), cells)
    holders = pool._holders[pages]
    transaction.set_cells(pool, "_holders", pages, holders + 1, old=holders)
    transaction.set_attribute(pool, "_shared", pool._shared + int((holders == 1).sum()))
    transaction.set_attribute(pool, "_tokens", pool._tokens + int(row[LENGTH]))
    cache.unheld.remove(pages, transaction)
    return pool._new_sequence(transaction, row, _runs_of(cache.writers[pages], first, size), chain)


def _reach_of(window: object) -> int | None:
    """How many keys before its own a query sees; None without a window."""
    if window is None:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ArgumentError("window", describe(window), "an int of 1 or more, as in Options, or None")
    return window - 1


def _pages_in_reach(found: list[int], size: int, reach: int) -> tuple[int, int]:
    """The longest beginning of which all pages are there that the token after it sees: the first of these pages, and the one after
    the last. `found` has -1 for pages that are not there."""
    best, first_of_run = (0, 0), 0
    for end, page in enumerate(found, start=1):
        first_of_run = end if page < 0 else first_of_run
        first = max(end * size - reach, 0) // size
        if first_of_run <= first:
            best = first, end
    return best


def plan_registration(pool: PagePool, sequence: Sequence, token_ids: object, transaction: Transaction) -> None:
    """Plans that `match` finds the full pages of a sequence, whose first tokens have these ids."""
    _check_whole(pool)
    row, ids, chain, size = pool._row(sequence), TokenIds(token_ids), sequence._chain, pool.page_size
    if len(ids) > row[LENGTH]:
        raise ArgumentError("token_ids", f"{len(ids)} ids", f"at most {row[LENGTH]}, the length of the sequence")
    end = len(ids) // size
    if not row[WIDTH] or not end:
        return
    pages = pool._tables[int(row[WIDTH])].cells[row[ROW], :end].astype(numpy.int64)
    differs = chain.first_difference(ids, size)
    if differs is not None:
        raise _other_ids(int(pages[differs]))
    keys = [*chain.keys[:end], *ids.keys(size, chain.pages, end, chain.key)]
    cache = pool._prefix_cache()
    missing = [i for i, key in enumerate(keys) if key not in cache.page_of]
    _check_keys(cache, pages, keys, [*(i for i in missing if i < chain.pages), *range(chain.pages, end)])
    indices = [i for i in missing if pages[i] >= 0]
    new = {keys[i]: int(pages[i]) for i in indices}
    at = pages[indices]
    transaction.add_entries(cache, "page_of", new)
    transaction.set_cells(cache, "keys", at, numpy.frombuffer(b"".join(new), dtype=numpy.uint8).reshape(-1, KEY_BYTES))
    transaction.set_cells(cache, "writers", at, _writers_of(sequence._runs, numpy.array(indices, dtype=int) * size, size))
    if end >= chain.pages:
        transaction.set_attribute(sequence, "_chain", KeyChain(chain.root, tuple(keys), ids.digest(size, end)))


def _check_keys(cache: PrefixCache, pages: numpy.ndarray, keys: list[bytes], columns: list[int]) -> None:
    """Raises ArgumentError if the page of one of these columns is cached and has another key."""
    some = pages[columns]
    for i in numpy.flatnonzero((some >= 0) & cache.is_cached(some)).tolist():
        if cache.key_of(int(some[i])) != keys[columns[i]]:
            raise _other_ids(int(some[i]))


def _other_ids(page: int) -> ArgumentError:
    of = f"page {page} was" if page >= 0 else "a page that was dropped had been"
    return ArgumentError(
        "token_ids", f"ids that differ from those that {of} registered with", "the ids of the tokens that the sequence holds"
    )


def _check_whole(pool: PagePool) -> None:
    """Raises ArgumentError for a pool whose pages hold the keys of one rank."""
    if pool.shard is not None:
        raise ArgumentError("shard", tuple(pool.shard), "a pool without a shard: prefixes are found in whole pages of a sequence")


def _writers_of(runs: Runs, starts: numpy.ndarray, size: int) -> numpy.ndarray:
    """The sequence that wrote each of the pages that start at these positions; UNKNOWN if there were several."""
    begins = numpy.array([begin for begin, _ in runs], dtype=numpy.int64)
    ids = numpy.array([id for _, id in runs], dtype=numpy.int64)
    first, last = (numpy.searchsorted(begins, at, side="right") - 1 for at in (starts, starts + (size - 1)))
    return numpy.where(first == last, ids[first], UNKNOWN)


def _runs_of(writers: numpy.ndarray, first: int, size: int) -> Runs:
    """The runs of a sequence whose pages, from number `first` on, these sequences wrote. It has no pages before."""
    if not len(writers):
        return [(0, UNKNOWN)]
    begins = numpy.flatnonzero(numpy.concatenate([[False], writers[1:] != writers[:-1]]))
    return [(0, int(writers[0])), *zip(((first + begins) * size).tolist(), writers[begins].tolist())]
