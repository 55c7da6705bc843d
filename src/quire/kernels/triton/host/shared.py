"""The launcher of attention with shared prefixes: one kernel reads the pages of prefixes once for all of their sequences, one the other
pages of each sequence, and one combines what is split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from quire.kernels.triton.device.arguments import (
    AttendConstants,
    BatchTensors,
    Cache,
    New,
    Out,
    Query,
    TileNumbers,
    TritonTile,
    Workspace,
)
from quire.kernels.triton.device.features import Features
from quire.kernels.triton.device.shared import combine_shared_kernel, shared_kernel
from quire.kernels.triton.host.launcher import ANY_BATCH, NO_NEW, At, AttendLauncher, Launch, arguments_of, finish_empty, platform_of
from quire.kernels.triton.host.program import Program
from quire.kernels.triton.host.tuning import tuning_for
from quire.platform import Platform
from quire.problem import ANY, Extent, Problem

SHARED = (Query, Cache, BatchTensors, New, Features)
COMBINE = (Out, Workspace, Cache, Features, BatchTensors, TileNumbers)
"""The records of the kernels' arguments."""
LEAST_PART, MOST_PARTS = 256, 64
"""The fewest keys of a part of a prefix, and the most parts of a sequence: parts cost memory and are added to every row."""


class Division(NamedTuple):
    """How the keys of prefixes are divided."""

    part_keys: int
    parts: int
    """The most of one sequence."""


class SharedLauncher(AttendLauncher):
    """Launches attention whose shared prefixes are read once. Sequences with more new tokens than `max_q_len` says are read by
    themselves."""

    def __init__(self, problem: Problem, platform: Platform):
        super().__init__("decode", problem, platform)
        tile = self.tiles.short[1, 1]
        # One tile for the keys that are not shared: they are the smaller part of the work.
        self.tiles.short, self.tiles.all_decode = {(1, 1): tile}, False
        self.programs = {tile: self._attend(tile)}
        wide = tuning_for("mixed", platform.arch, *self.tiles.sizes)
        self.shared_tile = TritonTile.of(wide.long_rows, wide.long_keys, wide.long_stages, False, problem.group, problem.kv_heads)
        constants = self.constants_for(tile)._replace(NEW=False)
        self.shared = Program(
            shared_kernel, SHARED, (self.shared_tile, constants), self.units, wide.warps, wide.long_stages, wide.registers
        )
        registers = self.combine.registers
        self.combine = Program(combine_shared_kernel, COMBINE, (self.constants,), self.units, 1, registers=registers)

    def constants_for(self, tile: TritonTile) -> AttendConstants:
        return super().constants_for(tile)._replace(SHARED=True)

    def _workspace(self, tile: TritonTile, programs: int) -> int:
        return super()._workspace(tile, programs) + 2 * programs

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        q, tile = call.q, self.tiles.short[1, 1]
        if not extent.tokens or not extent.seqs:
            finish_empty(call)
            return
        schedule = self.schedule(call, extent)
        if not schedule.fits:
            yield from self.generic.launches(call, extent, at)
            return
        programs, division = schedule.programs, self.divide(call.batch.prefixes, extent)
        partials = torch.empty(schedule.workspace + 2 * programs, dtype=torch.float32, device=q.device)
        rows = extent.tokens * self.problem.q_heads
        parts = torch.empty(division.parts * rows * (self.constants.V_WIDTH + 2), dtype=torch.float32, device=q.device)
        workspace = (at(partials), programs, schedule.tail_programs, schedule.main_programs, self.row.many or 0, 0)
        prefixes = _prefixes(call.batch.prefixes, extent, division, parts, at)
        out, cache, sequences, new, features = arguments_of(call, at, extent, ANY, prefixes)
        query = (at(q), *q.stride(), None)
        yield self.shared, (self.tiles.programs, 1, 1), (query, cache, sequences, NO_NEW, features), False
        yield self.programs[tile], (programs, 1, 1), (out, workspace, query, cache, sequences, new, features), False
        numbers = (tile.ROWS, tile.HEADS_PER_TILE, tile.TOKENS, tile.HEADS)
        grid = (programs, schedule.combined_rows, 1)
        yield self.combine, grid, (out, workspace, cache, features, sequences, numbers), self.constants.PDL

    def divide(self, prefixes: Any, extent: Extent) -> Division:
        """Parts such that each program has one part of one tile of rows."""
        tile, page_size = self.shared_tile, self.problem.page_size
        work = sum(-(-members * extent.max_q_len // tile.TOKENS) * pages for members, pages in prefixes.sizes)
        longest = prefixes.most_pages * page_size
        keys = max(LEAST_PART, -(-work * page_size * tile.HEADS // self.tiles.programs), -(-longest // MOST_PARTS))
        keys += -keys % max(LEAST_PART, tile.KEYS)
        return Division(keys, -(-longest // keys) + prefixes.levels)

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        return self.launches(call, ANY_BATCH, at)


def _prefixes(prefixes: Any, extent: Extent, division: Division, parts: torch.Tensor, at: At) -> tuple[Any, ...]:
    """The members of `BatchTensors` about prefixes."""
    groups, members, chains = prefixes.groups, prefixes.members, prefixes.chains
    return (
        *(at(groups), groups.shape[0], at(members), at(chains), chains.shape[1] - 1),
        *(max(1, extent.max_q_len), division.part_keys, division.parts, at(parts)),
    )


def launcher(problem: Problem, platform: Platform) -> SharedLauncher:
    """Shared prefixes are read once."""
    return SharedLauncher(problem, platform_of(problem, platform))
