"""Finds the prefixes that the rows of a page table share: all groups of one level are compared together."""

from __future__ import annotations

from typing import NamedTuple

import numpy

MOST_LEVELS = 8
"""The most groups of one sequence that are looked for."""
LEAST_KEYS = 64
"""The fewest keys of the last group of a sequence that is kept: fewer cost as much to merge as to read."""
FIRST, COUNT, BEGIN, END, LEVEL, FIELDS = range(6)
"""The columns of `Prefixes.groups`."""

_FIRST_COLUMNS = 128
"""How many columns are compared first; then four times as many in each pass, as long as this is at most `_MOST_CELLS` cells."""
_MOST_CELLS = 2**19


class PrefixArrays(NamedTuple):
    """The tensors of a `Prefixes`, as int32 arrays."""

    groups: numpy.ndarray
    members: numpy.ndarray
    chains: numpy.ndarray


class _Level(NamedTuple):
    """Groups of two or more rows that have the same pages from `begin` to `end` and in all columns before."""

    rows: numpy.ndarray
    """The rows of the groups, group by group."""
    counts: numpy.ndarray
    """How many rows each group has."""
    parents: numpy.ndarray
    """For each group the group of the level before that it is a part of."""
    begin: numpy.ndarray
    end: numpy.ndarray


def search(table: numpy.ndarray, limits: numpy.ndarray, page_size: int) -> PrefixArrays:
    """The prefixes of a page table, of which the first `limits[i]` columns of row i may be shared."""
    kept: list[_Level] = []
    needed = numpy.zeros(0, dtype=numpy.int64)
    # From the leaves of the trees to their roots: a group is kept if it is long enough, or a kept one continues it.
    for level in reversed(_levels(table, limits)):
        keeps = (level.end - level.begin) * page_size >= LEAST_KEYS
        keeps[needed] = True
        needed = level.parents[keeps]
        kept.append(_part(level, keeps))
    return _arranged(kept[::-1], len(table))


def _levels(table: numpy.ndarray, limits: numpy.ndarray) -> list[_Level]:
    """The groups of every level, from the roots of the trees on."""
    rows = numpy.flatnonzero(limits > 0)
    group, begin = numpy.zeros(len(rows), dtype=numpy.int64), numpy.zeros(1, dtype=numpy.int64)
    levels: list[_Level] = []
    while len(rows) > 1 and len(levels) < MOST_LEVELS:
        pages = table[rows, begin[group]]
        order = numpy.lexsort((pages, group))
        rows, group, pages = rows[order], group[order], pages[order]
        starts = numpy.flatnonzero(numpy.concatenate([[True], (pages[1:] != pages[:-1]) | (group[1:] != group[:-1])]))
        counts = numpy.diff(starts, append=len(rows))
        taken = (counts > 1) & (pages[starts] >= 0)
        if not taken.any():
            break
        rows, parents, counts = rows[numpy.repeat(taken, counts)], group[starts[taken]], counts[taken]
        end = _ends(table, rows, counts, begin[parents], limits)
        levels.append(_Level(rows, counts, parents, begin[parents], end))
        group = numpy.repeat(numpy.arange(len(counts)), counts)
        goes_on = limits[rows] > end[group]
        rows, group, begin = rows[goes_on], group[goes_on], end
    return levels


def _ends(
    table: numpy.ndarray, rows: numpy.ndarray, counts: numpy.ndarray, begin: numpy.ndarray, limits: numpy.ndarray
) -> numpy.ndarray:
    """For each group up to which column, from `begin` on, its rows have the same pages."""
    starts = numpy.cumsum(counts) - counts
    group = numpy.repeat(numpy.arange(len(counts)), counts)
    end = numpy.minimum.reduceat(limits[rows], starts).astype(numpy.int64)
    column, columns, left = int(begin.min()), _FIRST_COLUMNS, numpy.arange(len(rows))
    while len(left):
        stop = min(column + columns, int(end.max()))
        first = table[rows[starts], column:stop]
        _shorten(end, numpy.arange(len(counts)), first < 0, column)
        differs = _cells(table, rows[left], column, stop) != (first if len(counts) == 1 else first[group[left]])
        _shorten(end, group[left], differs, column)
        left = left[end[group[left]] > stop]
        column, columns = stop, max(min(4 * columns, _MOST_CELLS // max(len(left), 1)), _FIRST_COLUMNS)
    return end


def _cells(table: numpy.ndarray, rows: numpy.ndarray, begin: int, end: int) -> numpy.ndarray:
    """Columns `[begin, end)` of some rows, without a copy if they are neighbours."""
    if (numpy.diff(rows) == 1).all():
        return table[rows[0] : rows[-1] + 1, begin:end]
    return table[rows, begin:end]


def _shorten(end: numpy.ndarray, group: numpy.ndarray, differs: numpy.ndarray, column: int) -> None:
    """Ends groups at the first column where one of their rows differs; the first of `differs` is `column`."""
    if not differs.any():
        return
    at = differs.argmax(1)
    found = differs[numpy.arange(len(at)), at]
    numpy.minimum.at(end, group[found], column + at[found])


def _part(level: _Level, taken: numpy.ndarray) -> _Level:
    """Some of the groups of a level."""
    rows = level.rows[numpy.repeat(taken, level.counts)]
    return _Level(rows, *(values[taken] for values in level[1:]))


def _arranged(levels: list[_Level], seqs: int) -> PrefixArrays:
    """Numbers the groups by their first column and makes the arrays."""
    levels = [level for level in levels if len(level.counts)]
    chains = numpy.full((seqs, 1 + len(levels)), -1, dtype=numpy.int32)
    chains[:, 0] = 0
    if not levels:
        return PrefixArrays(numpy.zeros((0, FIELDS), dtype=numpy.int32), numpy.zeros(0, dtype=numpy.int32), chains)
    rows, counts, _, begin, end = (numpy.concatenate(values) for values in zip(*levels))
    depth = numpy.repeat(numpy.arange(len(levels)), [len(level.counts) for level in levels])
    order = numpy.argsort(begin, kind="stable")
    number = numpy.empty_like(order)
    number[order] = numpy.arange(len(order))
    of_row = numpy.repeat(number, counts)
    members = rows[numpy.argsort(of_row, kind="stable")].astype(numpy.int32)
    counts = counts[order]
    groups = numpy.stack([numpy.cumsum(counts) - counts, counts, begin[order], end[order], depth[order]], 1).astype(numpy.int32)
    of_member = numpy.repeat(numpy.arange(len(order)), counts)
    chains[members, 1 + groups[of_member, LEVEL]] = of_member
    numpy.maximum.at(chains[:, 0], members, groups[of_member, END])
    return PrefixArrays(groups, members, chains)
