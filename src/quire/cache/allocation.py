"""Allocates pages for the new tokens of a step. All sequences are planned at once; the transaction makes the writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy

from quire.cache.page_rows import ColumnRuns, gather, groups, width_for
from quire.cache.prefix_cache import forget_overwritten, plan_evictions
from quire.cache.sequence_record import LAST, LENGTH, LONGEST, PAGES, ROW, WIDTH
from quire.cache.shard import keys_of
from quire.cache.transaction import Transaction
from quire.errors import ArgumentError, OutOfPages

if TYPE_CHECKING:
    from quire.cache.pool import PagePool


class Allocation(NamedTuple):
    """The pages that a step allocates to its sequences."""

    before: numpy.ndarray
    """The records of the sequences before the step, [seqs, FIELDS]."""
    after: numpy.ndarray
    """The records after the step."""
    longest: int
    """The length of the longest sequence after the step."""
    grown: numpy.ndarray | slice
    """Indices of the sequences that get new pages; a slice if all of them get the same number."""
    fresh: numpy.ndarray
    """Number of new pages of each of those."""
    pages: numpy.ndarray
    """The new pages, sequence by sequence."""
    runs: ColumnRuns | None
    """The columns of the new pages; None if there are none."""
    copied: numpy.ndarray
    """Indices of the sequences whose last page is copied (copy-on-write)."""
    sources: numpy.ndarray
    targets: numpy.ndarray
    """Those last pages, and the pages they are copied to."""


NOTHING = numpy.empty(0, dtype=numpy.int64)


def plan_allocation(pool: PagePool, slots: numpy.ndarray | slice, counts: numpy.ndarray, transaction: Transaction) -> Allocation:
    """Plans a step: `counts[i]` new tokens for the sequence with record `slots[i]`. Raises `OutOfPages` if there are too few
    pages."""
    before = pool._records[slots].copy() if isinstance(slots, slice) else pool._records.take(slots, 0)
    end = before[:, LENGTH] + counts
    longest = int(end.max(initial=0))
    if longest > LONGEST:
        at = int(end.argmax())
        raise ArgumentError("new_tokens", f"{counts[at]} after {end[at] - counts[at]} tokens", f"at most {LONGEST} in a sequence")
    need = (keys_of(pool.shard, end) + (pool.page_size - 1)) // pool.page_size
    fresh = need - before[:, PAGES]
    copied = _copied(pool, before, end) if pool._shared else NOTHING
    wanted = int(fresh.sum()) + len(copied)
    if wanted > pool.free_pages:
        raise OutOfPages(wanted, pool.free_pages, pool.pages)
    after = before.copy()
    after[:, LENGTH] = end
    given = Allocation(before, after, longest, NOTHING, NOTHING, NOTHING, None, NOTHING, NOTHING, NOTHING)
    if wanted:
        after[:, PAGES] = need
        given = _take(pool, given, fresh, copied, wanted, transaction)
        _update_tables(pool, given, transaction)
    if pool._prefixes is not None:
        forget_overwritten(pool, pool._prefixes.cached(_written_in_place(pool, before, end, copied)), transaction)
    transaction.set_cells(pool, "_records", slots, after, old=before)
    return given


def _copied(pool: PagePool, before: numpy.ndarray, end: numpy.ndarray) -> numpy.ndarray:
    """Indices of the sequences that would write into a shared page. If all holders of a page extend in one step, the last of
    the longest keeps the page, so that it overwrites no token that another holder has again after a rollback."""
    first, last = keys_of(pool.shard, before[:, LENGTH]), keys_of(pool.shard, end)
    at = numpy.flatnonzero((first < last) & (first % pool.page_size != 0))
    at = at[pool._holders[before[at, LAST]] > 1]
    if not len(at):
        return NOTHING
    at = at[numpy.argsort(first[at], kind="stable")]
    pages = before[at, LAST]
    return numpy.sort(at[occurrences(pages) < pool._holders[pages] - 1])


def _written_in_place(pool: PagePool, before: numpy.ndarray, end: numpy.ndarray, copied: numpy.ndarray) -> numpy.ndarray:
    """The partly filled pages that the new tokens are written to without a copy."""
    is_written = (before[:, LENGTH] < end) & (before[:, LENGTH] % pool.page_size != 0)
    is_written[copied] = False
    return before[is_written, LAST]


def occurrences(values: numpy.ndarray) -> numpy.ndarray:
    """For each value, how often it occurred before in the array, `[n]`."""
    order = numpy.argsort(values, kind="stable")
    ordered = values[order]
    begins = numpy.flatnonzero(numpy.concatenate([[True], ordered[1:] != ordered[:-1]]))
    lengths = numpy.diff(numpy.concatenate([begins, [len(values)]]))
    out = numpy.empty(len(values), dtype=numpy.int64)
    out[order] = numpy.arange(len(values)) - numpy.repeat(begins, lengths)
    return out


def _take(
    pool: PagePool, given: Allocation, fresh: numpy.ndarray, copied: numpy.ndarray, wanted: int, transaction: Transaction
) -> Allocation:
    """Allocates pages: for each sequence first the copy of its last page, then its new pages."""
    before, after = given.before, given.after
    taken = take_free(pool, wanted, transaction)
    transaction.set_cells(pool, "_holders", taken, 1, old=0)
    pages, sources, targets = taken, NOTHING, NOTHING
    if len(copied):
        takes = fresh.copy()
        takes[copied] += 1
        first = (numpy.cumsum(takes) - takes)[copied]
        is_new = numpy.ones(wanted, dtype=bool)
        is_new[first] = False
        pages, targets, sources = taken[is_new], taken[first], before[copied, LAST]
        after[copied, LAST] = targets
        shared, times = numpy.unique(sources, return_counts=True)
        left = pool._holders[shared] - times
        transaction.set_cells(pool, "_holders", shared, left)
        transaction.set_attribute(pool, "_shared", pool._shared - int((left == 1).sum()))
    grown: numpy.ndarray | slice = slice(None)
    runs = None
    each = int(fresh[0])
    if each and (fresh == each).all():
        after[:, LAST] = pages[each - 1 :: each]
        runs = ColumnRuns.of(before[:, PAGES], fresh, same_counts=True)
    elif len(pages):
        grown = numpy.flatnonzero(fresh)
        fresh = fresh[grown]
        after[grown, LAST] = pages[numpy.cumsum(fresh) - 1]
        runs = ColumnRuns.of(before[grown, PAGES], fresh)
    return given._replace(grown=grown, fresh=fresh, pages=pages, runs=runs, copied=copied, sources=sources, targets=targets)


def take_free(pool: PagePool, wanted: int, transaction: Transaction) -> numpy.ndarray:
    """Free pages: first those that are not cached."""
    plain = wanted if pool._prefixes is None else min(wanted, pool.free_pages - pool._prefixes.unheld.count)
    taken = pool._free.next(plain)
    pool._free.exchange(transaction, plain)
    return taken if plain == wanted else numpy.concatenate([taken, plan_evictions(pool, wanted - plain, transaction)])


def _update_tables(pool: PagePool, given: Allocation, transaction: Transaction) -> None:
    """Writes the new pages into the rows of their sequences. A sequence that outgrows its row gets a wider one."""
    before, after, grown = given.before, given.after, given.grown
    for width, where in groups(before[given.copied, WIDTH]) if len(given.copied) else ():
        at = given.copied[where]
        cells = (before[at, ROW], before[at, PAGES] - 1)
        transaction.set_cells(pool._tables[width], "cells", cells, given.targets[where], old=given.sources[where])
    if given.runs is None:
        return
    widths = before[grown, WIDTH]
    narrow = after[grown, PAGES] > widths
    if narrow.any():
        _widen(pool, given, narrow, transaction)
        widths = numpy.where(narrow, -1, widths)
    for width, where in groups(widths):
        if width >= 0:
            part, runs, pages = _part(given, where)
            transaction.set_cells(pool._tables[width], "cells", runs.cells_in(before[part, ROW]), pages.reshape(runs.shape), old=-1)


def _part(given: Allocation, where: numpy.ndarray | slice) -> tuple[numpy.ndarray | slice, ColumnRuns, numpy.ndarray]:
    """A subset of the sequences that get new pages, with their columns and pages."""
    assert given.runs is not None
    if isinstance(where, slice):
        return given.grown, given.runs, given.pages
    chosen = numpy.zeros(len(given.fresh), dtype=bool)
    chosen[where] = True
    at = where if isinstance(given.grown, slice) else given.grown[where]
    return at, ColumnRuns.of(given.before[at, PAGES], given.fresh[where]), given.pages[numpy.repeat(chosen, given.fresh)]


def _widen(pool: PagePool, given: Allocation, narrow: numpy.ndarray, transaction: Transaction) -> None:
    """Moves sequences to wider rows, with all their pages."""
    before, after, grown = given.before, given.after, given.grown
    lengths, inverse = numpy.unique(after[grown, PAGES], return_inverse=True)
    widths = numpy.where(narrow, numpy.array([width_for(count) for count in lengths.tolist()])[inverse], -1)
    taken: dict[int, int] = {}
    for width, where in groups(widths):
        if width < 0:
            continue
        part, runs, pages = _part(given, where)
        at = numpy.arange(len(before))[part]
        rows = pool.table(width).next_rows(len(at))
        content = gather(pool._tables, before[at, WIDTH], before[at, ROW], width)
        replaced = numpy.isin(at, given.copied) if len(given.copied) else NOTHING
        if replaced.any():
            copies = given.targets[numpy.searchsorted(given.copied, at[replaced])]
            content[replaced, before[at[replaced], PAGES] - 1] = copies
        content[runs.cells_in(slice(None))] = pages.reshape(runs.shape)
        transaction.set_cells(pool._tables[width], "cells", rows, content)
        after[at, WIDTH], after[at, ROW] = width, rows
        taken[width] = len(at)
    left = before[grown][narrow]
    returned = {width: left[where, ROW] for width, where in groups(left[:, WIDTH]) if width}
    for width in taken.keys() | returned.keys():
        pool._tables[width].rows.exchange(transaction, taken.get(width, 0), returned.get(width))
