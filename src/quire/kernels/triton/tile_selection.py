"""Which tiles the attention kernels of a problem use, and which of them a batch gets: a few, whatever the batch."""

from __future__ import annotations

from quire.cache.format import FORMATS
from quire.kernels.triton.arguments import Tile
from quire.kernels.triton.constants import BYTES, dot_type, widths_of
from quire.kernels.triton.tuning import Tuning, tuning_for
from quire.platform import Platform
from quire.problem import Problem, power_of_two

QUERIES = 64 * 1024
"""Bytes that the queries of a short tile may take: the shared memory of the smallest card."""
IN_REGISTERS = 8 * 1024
"""The same for products in fp32, which no matrix unit computes: each thread holds whole rows of its queries in registers. With 64
rows of 128 NVIDIA's assembler kept 3 to 7 KB of a thread's numbers on the stack."""
FEW = 16
"""New tokens of a row, at most, that the tiles of short rows are made for."""
PROCESSORS = 100
"""Multiprocessors of a platform of which only the name is known."""


class Tiles:
    """The tiles of a problem on a platform, by a row of tuning."""

    def __init__(self, kernel: str, problem: Problem, platform: Platform, tuning: Tuning | None = None):
        self.every_row_is_short = kernel == "decode"
        dot, _ = dot_type(problem)
        width, element = max(widths_of(problem, platform)), BYTES[dot]
        self.row = row = tuning or tuning_for(kernel, platform.arch, width, element, FORMATS[problem.format].itemsize)
        self.problem = problem
        self.most = max(16, min(64, (IN_REGISTERS if dot == "fp32" else QUERIES) // (width * element)))
        self.programs = max(1, int((platform.multiprocessors or PROCESSORS) * row.per_multiprocessor))
        # Plain decodes only: those were measured.
        alone = problem.batch_invariant or problem.mask or problem.form == "context" or problem.memory == "generic"
        self.together = 1 if alone else row.together
        self.long = None
        if not self.every_row_is_short:
            self.long = Tile.of(row.long_rows, row.long_keys, row.long_stages, False, problem.group, problem.kv_heads)
        self.short: dict[tuple[int, int], Tile] = {}
        """The tile of rows with up to so many new tokens, a power of two, with so many key heads in it: all that there are."""
        for few in (1, 2, 4, 8, FEW) if self.every_row_is_short else (1,):
            rows = self.most if problem.batch_invariant else max(row.rows, min(self.most, power_of_two(few * problem.group)))
            heads = 1
            while heads <= max(1, min(self.together, rows // (few * problem.group))) and problem.kv_heads % heads == 0:
                self.short[few, heads] = Tile.of(rows, row.keys, row.stages, True, problem.group, problem.kv_heads, heads)
                heads *= 2
