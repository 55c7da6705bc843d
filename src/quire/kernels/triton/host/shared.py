"""The launcher of attention with shared prefixes. One launch reads the pages of prefixes, once for all of their sequences; a second
one, of the same kernel, all other pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from quire.kernels.triton.device.arguments import AttendConstants, TritonTile
from quire.kernels.triton.device.attend import attend_kernel
from quire.kernels.triton.host.constants import constants_of
from quire.kernels.triton.host.launcher import (
    ANY_BATCH,
    ATTEND,
    At,
    AttendLauncher,
    Launch,
    arguments_of,
    finish_empty,
    platform_of,
)
from quire.kernels.triton.host.program import Program
from quire.kernels.triton.host.tuning import Tuning
from quire.platform import Platform
from quire.problem import ANY, Extent, Problem

LEAST_PART, MOST_PARTS = 256, 64
"""The fewest keys of a part of a prefix, and the most parts of a sequence: parts cost memory and are added to every row."""
MOST_SHARED = 256 * 2**20
"""The most bytes of parts of a batch-invariant call, where each piece is one. If a batch has more, nothing is read once: the bits
are the same."""


class Division(NamedTuple):
    """How the keys of prefixes are divided."""

    part_keys: int
    parts: int
    """The most of one sequence."""


class SharedLauncher(AttendLauncher):
    """Launches attention whose shared prefixes are read once. Sequences with more new tokens than `max_q_len` says are read by
    themselves."""

    def __init__(self, problem: Problem, platform: Platform, tuning: Tuning | None = None):
        super().__init__("mixed", problem, platform, tuning)
        # The tiles of long queries are those of prefixes; no sequence is long.
        self.long = None
        (self.tile,) = self.programs

    def constants_for(self, tile: TritonTile) -> AttendConstants:
        return constants_of(self.problem, self.platform, self.row, tile, None)._replace(SHARED=True)

    def _attend(self, tile: TritonTile, constants: AttendConstants) -> Program:
        row = self.row
        stages = max(row.stages, row.long_stages)
        return Program(attend_kernel, ATTEND, (tile, self.tiles.long, constants), self.units, row.warps, stages, row.registers)

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        q, tile, shared = call.q, self.tile, call.batch.prefixes
        if not extent.tokens or not extent.seqs:
            finish_empty(call)
            return
        schedule = self.schedule(call, extent)
        if not schedule.fits:
            yield from self.generic.launches(call, extent, at)
            return
        division, shared_tokens = self.divide(shared, extent), max(1, extent.max_q_len)
        rows = extent.tokens * self.problem.q_heads
        if self.problem.batch_invariant and 4 * division.parts * rows * (self.constants.V_WIDTH + 2) > MOST_SHARED:
            division, shared_tokens = division._replace(parts=0), 0
        parts = torch.empty(division.parts * rows * (self.constants.V_WIDTH + 2), dtype=torch.float32, device=q.device)
        partials = torch.empty(schedule.workspace, dtype=torch.float32, device=q.device)
        workspace = (at(partials), schedule.programs, 0, schedule.main_programs, 0, 0, schedule.rows)
        groups, members, chains, query = shared.groups, shared.members, shared.chains, (at(q), *q.stride(), None)
        prefixes = (
            *(at(groups), groups.shape[0], at(members), at(chains), chains.shape[1] - 1),
            *(shared_tokens, *division, at(parts)),
        )
        for reads_prefixes, programs in ((1, self.tiles.programs), (0, schedule.programs))[shared_tokens == 0 :]:
            out, cache, sequences, new, features = arguments_of(call, at, extent, ANY, (*prefixes, reads_prefixes))
            yield self.programs[tile], (programs, 1, 1), (out, workspace, query, cache, sequences, new, features), False
        numbers = (tile.ROWS, tile.HEADS_PER_TILE, tile.TOKENS, tile.HEADS)
        grid = (schedule.programs, schedule.combined_rows, 1)
        yield self.combine, grid, (out, workspace, cache, features, numbers), self.constants.PDL

    def divide(self, prefixes: Any, extent: Extent) -> Division:
        """Parts such that each program has about one part of one tile of rows; in a batch-invariant call, its pieces."""
        tile, page_size = self.tiles.long, self.problem.page_size
        assert tile is not None
        if self.problem.batch_invariant:
            return Division(tile.PIECE, -(-prefixes.most_pages * page_size // tile.PIECE) + prefixes.levels)
        work = sum(-(-members * extent.max_q_len // tile.TOKENS) * pages for members, pages in prefixes.sizes)
        longest = prefixes.most_pages * page_size
        keys = max(LEAST_PART, -(-work * page_size * tile.HEADS // self.tiles.programs), -(-longest // MOST_PARTS))
        keys += -keys % max(LEAST_PART, tile.KEYS)
        return Division(keys, -(-longest // keys) + prefixes.levels)

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        return self.launches(call, ANY_BATCH, at)


def launcher(problem: Problem, platform: Platform) -> SharedLauncher:
    """Shared prefixes are read once."""
    return SharedLauncher(problem, platform_of(problem, platform))
