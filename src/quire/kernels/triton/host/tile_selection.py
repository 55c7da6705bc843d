"""The tiles of the attention kernels of a problem: a few, whatever the batch."""

from __future__ import annotations

from quire.cache.format import FORMATS
from quire.kernels.triton.device.arguments import TritonTile
from quire.kernels.triton.host.constants import BYTES, dot_type, has_one_kernel, parts_of, width_of, widths_of
from quire.kernels.triton.host.tuning import Tuning, tuning_for
from quire.platform import Platform
from quire.problem import ANY, Problem, power_of_two

QUERIES = 64 * 1024
"""The most bytes of the queries of a short tile: the shared memory of the smallest GPU."""
IN_REGISTERS = 8 * 1024
"""The same for products in fp32, which no matrix unit computes: each thread has whole rows of its queries in registers. With 64
rows of 128 NVIDIA's assembler spilled 3 to 7 KB per thread."""
WIDEST = 1024
"""The entries for wide latents, which others have no memory for."""
PIECE = 256
"""Keys of a piece in a batch-invariant call: docs/batch_invariance.md."""
MAX_DECODE_TOKENS = 16
"""The most new tokens of a sequence that the tiles of short sequences are made for."""
TOKEN_COUNTS = (1, 2, 4, 8, MAX_DECODE_TOKENS)
"""The numbers of new tokens of a sequence that the tiles of a decode are made for."""
PROCESSORS = 100
"""The multiprocessors of a platform of which only the name is known."""


def stored_bytes(problem: Problem) -> int:
    """The most bytes of an element of the cache, by which an entry of the tuning table is found."""
    if problem.v_in_k and (problem.form == "context" or problem.memory == "generic"):
        # Keys of two sources, or loaded element by element, take more shared memory: as keys of 4 bytes do.
        return 4
    # One warp, as entries for bytes have, does not hold the two accumulators of a batch-invariant call. Rows of `fp8_ds_mla` take
    # more shared memory than other bytes.
    wide = problem.batch_invariant or any(FORMATS[name].latent for name in problem.formats)
    return max(2 if wide else 1, *(FORMATS[name].itemsize for name in problem.formats))


def tuned_width(problem: Problem, platform: Platform) -> int:
    """The width by which an entry of the tuning table is found: that of the widest tile, or WIDEST."""
    return WIDEST if problem.is_wide_latent else max(*widths_of(problem, platform), width_of(parts_of(problem)[1] or 1))


class Tiles:
    """The tiles of a problem on a platform, from an entry of the tuning table."""

    def __init__(self, kernel: str, problem: Problem, platform: Platform, tuning: Tuning | None = None):
        self.one_kernel, selects = has_one_kernel(problem) and kernel != "gluon", problem.select != "none"
        self.all_decode = (kernel == "decode" or (self.one_kernel and selects)) and not problem.batch_invariant
        """Whether every sequence is short."""
        if self.one_kernel:
            # The entry for what its batches mostly are.
            kernel = "decode" if selects else "mixed"
        dot, _ = dot_type(problem)
        width, element = tuned_width(problem, platform), BYTES[dot]
        self.sizes = width, element, stored_bytes(problem), problem.v_in_k
        """By which the tuning table is read, besides the kernel and the GPU."""
        group = None if problem.batch_invariant else problem.group
        self.row = row = tuning or tuning_for(kernel, platform.arch, *self.sizes, group)
        self.problem = problem
        self.most = max(16, min(row.most_rows, (IN_REGISTERS if dot == "fp32" else QUERIES) // (width * element)))
        self.programs = max(1, int((platform.multiprocessors or PROCESSORS) * row.per_multiprocessor))
        self.heads_per_tile = row.heads_per_tile if _is_plain(problem) else 1
        self.by_query = problem.select == "positions"
        """Whether each query sees keys of its own: then a tile has one token, and every sequence is short."""
        has_long = not selects if self.one_kernel else not (self.all_decode or self.by_query)
        self.long = self._long_tile() if has_long else None
        self.short = self._short_tiles()
        """All tiles of short sequences, by the most new tokens, a power of two, and by key heads per tile."""
        always_first = self.by_query or not self.all_decode
        self.most_of_first = ANY if always_first else self.short[1, 1].TOKENS if self.one_kernel else 1
        """The most new tokens of a sequence for which a decode takes the first tile."""

    def _short_tiles(self) -> dict[tuple[int, int], TritonTile]:
        short, group, kv_heads = dict[tuple[int, int], TritonTile](), self.problem.group, self.problem.kv_heads
        for few in self._token_counts():
            rows, heads = self._rows_for(few), 1
            while heads <= max(1, min(self.heads_per_tile, rows // (few * group))) and kv_heads % heads == 0:
                short[few, heads] = self._tile(rows, heads, True)
                heads *= 2
        return short

    def _rows_for(self, few: int) -> int:
        """The rows of a tile of short sequences with at most so many new tokens."""
        return (
            self.most
            if self.problem.batch_invariant
            else max(self.row.rows, min(self.most, power_of_two(few * self.problem.group)))
        )

    def _token_counts(self) -> tuple[int, ...]:
        """The numbers of new tokens of a sequence for which there are tiles of short sequences."""
        if self.by_query:
            return (1,)
        if self.one_kernel:
            return 1, MAX_DECODE_TOKENS
        return TOKEN_COUNTS if self.all_decode else (1,)

    def _long_tile(self) -> TritonTile:
        row, problem = self.row, self.problem
        if problem.batch_invariant:
            # As the tile of short sequences, so that both have the same products and sums.
            return self._tile(self.most, 1, False)
        return TritonTile.of(row.long_rows, row.long_keys, row.long_stages, False, problem.group, problem.kv_heads)

    def _tile(self, rows: int, heads: int, few: bool) -> TritonTile:
        row, problem = self.row, self.problem
        piece = PIECE if problem.batch_invariant else 0
        tile = TritonTile.of(rows, row.keys, row.stages, few, problem.group, problem.kv_heads, heads, piece)
        return tile._replace(TOKENS=1) if self.by_query else tile


def _is_plain(problem: Problem) -> bool:
    """Whether tiles may have several key heads: these were measured for plain decodes only."""
    special = problem.batch_invariant or problem.mask or problem.spans != "none" or problem.select != "none"
    return not (special or problem.form == "context" or problem.memory == "generic")
