"""Which tiles the attention kernels of a problem use, and which of them a batch gets: a few, whatever the batch."""

from __future__ import annotations

from typing import NamedTuple

from quire.cache.format import FORMATS
from quire.kernels.triton.arguments import Tile
from quire.kernels.triton.constants import BYTES, dot_type, widths_of
from quire.kernels.triton.tuning import Tuning, tuning_for
from quire.platform import Platform
from quire.problem import Extent, Problem, power_of_two

QUERIES = 64 * 1024
"""Bytes that the queries of a short tile may take: the shared memory of the smallest card."""
FEW = 16
"""New tokens of a row, at most, that the tiles of short rows are made for."""
PROCESSORS = 100
"""Multiprocessors of a platform of which only the name is known."""


class Schedule(NamedTuple):
    """How the short rows of one batch are split over programs."""

    tile: Tile
    programs: int
    extras: int
    mains: int
    combined_rows: int
    """Rows of a tile, at most, that hold queries."""


class Tiles:
    """The tiles of a problem on a platform, by a row of tuning."""

    def __init__(self, kernel: str, problem: Problem, platform: Platform, tuning: Tuning | None = None):
        self.every_row_is_short = kernel == "decode"
        dot, _ = dot_type(problem)
        width, element = max(widths_of(problem)), BYTES[dot]
        self.row = row = tuning or tuning_for(kernel, platform.arch, width, element, FORMATS[problem.format].itemsize)
        self.problem, self.most = problem, min(64, QUERIES // (width * element))
        self.programs = max(1, int((platform.multiprocessors or PROCESSORS) * row.per_multiprocessor))
        # Plain decodes only: those were measured.
        alone = problem.batch_invariant or problem.mask or problem.form == "context" or problem.memory == "generic"
        self.together = 1 if alone else row.together
        self.long = None
        if not self.every_row_is_short:
            self.long = Tile.of(row.long_rows, row.long_keys, row.long_stages, False, problem.group, problem.kv_heads)
        self.short: dict[tuple[int, int], Tile] = {}
        """The tile of rows with up to so many new tokens, a power of two, with so many key heads in it: all that a batch can get."""
        for few in (1, 2, 4, 8, FEW) if self.every_row_is_short else (1,):
            rows = self.most if problem.batch_invariant else max(row.rows, min(self.most, power_of_two(few * problem.group)))
            heads = 1
            while heads <= max(1, min(self.together, rows // (few * problem.group))) and problem.kv_heads % heads == 0:
                self.short[few, heads] = Tile.of(rows, row.keys, row.stages, True, problem.group, problem.kv_heads, heads)
                heads *= 2

    def schedule(self, extent: Extent) -> Schedule:
        """The tile of a batch's short rows, and the programs that share them out."""
        few = 1 if not self.every_row_is_short else max(1, min(power_of_two(extent.max_q_len), FEW))
        tile = self._short_tile(few, extent)
        units = min(extent.tokens, extent.tokens // tile.TOKENS + extent.seqs) * tile.HEADS
        many, programs = self.row.many, self.programs
        dynamic = many is not None and self.long is None and units >= many * programs and programs >= tile.HEADS
        extras = programs if dynamic else 0
        combined = min(tile.ROWS, few * self.problem.group * tile.TOGETHER)
        return Schedule(tile, programs + extras, extras, max(1, programs // tile.HEADS), combined)

    def _short_tile(self, few: int, extent: Extent) -> Tile:
        """More than one key head in a tile only if units are more than programs: a unit that is split must be added up, and more of
        them would be split."""
        units = min(extent.tokens, extent.seqs) * self.problem.kv_heads
        heads = 1
        while (few, 2 * heads) in self.short and units > self.programs * heads:
            heads *= 2
        return self.short[few, heads]

    def most_work(self, extent: Extent, room: int) -> int:
        """More key tiles than a batch can have in its short rows; `room` is the number of keys that its table has place for."""
        tile = self.schedule(extent).tile
        units = extent.seqs + (extent.tokens // tile.TOKENS if self.every_row_is_short else 0)
        return units * tile.HEADS * ((room + extent.tokens) // tile.STEP + 3 + self.row.opening)
