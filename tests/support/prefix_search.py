"""The prefixes of a page table, searched group by group: what `quire.cache.prefix_search` has to find."""

from __future__ import annotations

import numpy

from quire.cache import prefix_search
from quire.cache.prefixes import Prefix


def plainly_found(table: numpy.ndarray, limits: numpy.ndarray, page_size: int) -> list[Prefix]:
    """The prefixes of a page table, of which the first `limits[i]` columns of row i may be shared."""
    found: list[tuple[list[int], int, int]] = []
    open_: list[tuple[list[int], int, int]] = [(list(range(len(table))), 0, 0)]
    while open_:
        rows, column, level = open_.pop()
        members: dict[int, list[int]] = {}
        for row in rows:
            if limits[row] > column and table[row, column] >= 0:
                members.setdefault(int(table[row, column]), []).append(row)
        for some in members.values():
            if len(some) > 1:
                stop = _end_of_run(table[some], column, int(limits[some].min()))
                found.append((some, column, stop))
                if level + 1 < prefix_search.MOST_LEVELS:
                    open_.append((some, stop, level + 1))
    kept: list[Prefix] = []
    needed: set[tuple[int, int]] = set()
    for rows, begin, end in sorted(found, key=lambda one: -one[1]):
        if (end - begin) * page_size >= prefix_search.LEAST_KEYS or any((row, end) in needed for row in rows):
            needed.update((row, begin) for row in rows)
            kept.append(Prefix(tuple(rows), begin, end))
    return sorted(kept, key=lambda prefix: (prefix.begin, prefix.sequences))


def _end_of_run(table: numpy.ndarray, column: int, limit: int) -> int:
    """Up to which column, from `column` on, all rows have the same pages."""
    while column < limit and table[0, column] >= 0 and (table[:, column] == table[0, column]).all():
        column += 1
    return column
