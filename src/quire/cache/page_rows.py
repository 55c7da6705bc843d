"""Storage for the page ids of a pool's sequences: one array of rows for each row width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy

from quire.cache.free_list import FreeList

NARROWEST = 4
"""The minimum number of columns of a row."""


class PageRows:
    """Rows of page ids, all of one width. A row in use holds -1 after its last page; the content of a free row is undefined."""

    def __init__(self, width: int):
        self.width = width
        self.cells = numpy.empty((0, width), dtype=numpy.int32)
        self.rows = FreeList()

    def next_rows(self, count: int) -> numpy.ndarray:
        """The next `count` free rows. They stay free until a transaction allocates them. The memory grows if necessary."""
        rows = self.rows.next(count)
        needed = int(rows.max(initial=-1)) + 1
        if needed > len(self.cells):
            larger = numpy.empty((max(needed, len(self.cells) * 3 // 2), self.width), dtype=numpy.int32)
            larger[: len(self.cells)] = self.cells
            self.cells = larger
        return rows


def width_for(pages: int) -> int:
    """The row width for a number of pages, with space for more."""
    return max(NARROWEST, 1 << (pages + pages // 4).bit_length())


def groups(keys: numpy.ndarray) -> Iterator[tuple[int, numpy.ndarray | slice]]:
    """Each distinct key, and the indices where it occurs."""
    if len(keys) and (keys == keys[0]).all():
        yield int(keys[0]), slice(None)
        return
    for key in numpy.unique(keys).tolist():
        yield key, numpy.flatnonzero(keys == key)


class ColumnRuns(NamedTuple):
    """Runs of consecutive columns, one for each of several rows."""

    counts: numpy.ndarray
    """Number of columns of each run."""
    columns: int | slice | numpy.ndarray
    """The columns: of every run, if all runs have the same; otherwise of all runs, concatenated."""
    shape: tuple[int, ...]
    """The shape of the values of all runs."""

    @classmethod
    def of(cls, first: numpy.ndarray, counts: numpy.ndarray, same_counts: bool = False) -> ColumnRuns:
        """`counts[i]` columns from `first[i]` on."""
        if (same_counts or (counts == counts[0]).all()) and (first == first[0]).all():
            column, count = int(first[0]), int(counts[0])
            return cls(counts, *((column, (-1,)) if count == 1 else (slice(column, column + count), (-1, count))))
        before = numpy.cumsum(counts) - counts
        return cls(counts, numpy.arange(int(counts.sum())) + numpy.repeat(first - before, counts), (-1,))

    def cells_in(self, rows: numpy.ndarray | slice) -> tuple[Any, Any]:
        """The index of the runs' cells in an array, for runs in these rows."""
        if isinstance(self.columns, numpy.ndarray):
            rows = numpy.arange(len(self.counts)) if isinstance(rows, slice) else rows
            return numpy.repeat(rows, self.counts), self.columns
        return rows, self.columns


def gather(tables: dict[int, PageRows], widths: numpy.ndarray, rows: numpy.ndarray, columns: int) -> numpy.ndarray:
    """Gathers rows of any width into one array of `columns` columns, -1 where a row has no page."""
    found = list(groups(widths))
    if len(found) == 1 and found[0][0] >= columns:
        return tables[found[0][0]].cells[rows, :columns]
    out = numpy.full((len(rows), columns), -1, dtype=numpy.int32)
    for width, where in found:
        if width:
            least = min(width, columns)
            out[where, :least] = tables[width].cells[rows[where], :least]
    return out


def runs_of(
    tables: dict[int, PageRows], widths: numpy.ndarray, rows: numpy.ndarray, first: numpy.ndarray, end: numpy.ndarray
) -> numpy.ndarray:
    """The pages of columns `[first[i], end[i])` of each row, the last column first, row by row, in one array of int64."""
    found = list(groups(widths))
    if len(found) == 1:
        return _reversed_runs(tables, found[0][0], rows, first, end)
    counts = end - first
    out = numpy.empty(int(counts.sum()), dtype=numpy.int64)
    of_run = numpy.repeat(widths, counts)
    for width, where in found:
        out[of_run == width] = _reversed_runs(tables, width, rows[where], first[where], end[where])
    return out


def _reversed_runs(
    tables: dict[int, PageRows], width: int, rows: numpy.ndarray, first: numpy.ndarray, end: numpy.ndarray
) -> numpy.ndarray:
    if not width:
        return numpy.empty(0, dtype=numpy.int64)
    low, high = int(first.min()), int(end.max())
    found = tables[width].cells[rows, low:high][:, ::-1]
    if (first == low).all() and (end == high).all():
        out = numpy.empty(found.shape, dtype=numpy.int64)
        out[...] = found
        return out.reshape(-1)
    column = numpy.arange(high - 1, low - 1, -1)
    return found[(column >= first[:, None]) & (column < end[:, None])].astype(numpy.int64)


def bytes_of(tables: Iterable[PageRows]) -> int:
    return sum(table.cells.nbytes + table.rows.nbytes for table in tables)
