"""Launches for Hopper: long rows by Gluon's kernel, short rows by Triton's, side by side on the card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from quire.kernels.gluon.prefill import FIRST, SECOND, prefill_kernel
from quire.kernels.gluon.units import FIELDS, HEADER, units_kernel
from quire.kernels.triton.arguments import Query
from quire.kernels.triton.constants import constants_of
from quire.kernels.triton.launcher import LARGE, At, AttendLauncher, Launch, arguments_of, finish_empty
from quire.kernels.triton.program import Program
from quire.kernels.triton.tile_selection import PROCESSORS
from quire.kernels.triton.tuning import Tuning
from quire.platform import Platform
from quire.problem import Extent, Problem

REGISTERS = 504
"""What three groups of warps have together, a thread of each: a multiprocessor's, in steps of eight."""


class HopperTile(NamedTuple):
    """How much one program computes at a time, as `Tile` says, and how its warps divide the work."""

    ROWS: int
    KEYS: int
    STAGES: int
    TOGETHER: int
    STEP: int
    TOKENS: int
    HEADS: int
    FEW: bool
    COMPUTER: int
    """Registers of a thread that computes."""
    LOADER: int
    """Registers of a thread that loads."""
    COPIES: bool
    """Whether keys and values can be copied as they are, sixteen bytes at a time."""


class HopperLauncher(AttendLauncher):
    """Five launches: cut long rows into units; take units; meanwhile short rows, on a part of the card; take units there, too, when
    these have ended; and combine what was split of them. The short rows' kernel is that of `triton-decode`."""

    def __init__(self, problem: Problem, platform: Platform, tuning: Tuning | None = None, decode: Tuning | None = None):
        super().__init__("gluon", problem, platform, tuning)
        self.decode = AttendLauncher("decode", problem, platform, decode)
        self.processors = platform.multiprocessors or PROCESSORS
        assert self.long is not None
        self.short_tile = self.decode.tiles.short[1, 1]
        constants = constants_of(problem, platform, self.row, self.short_tile, self.long)
        tile = HopperTile(*self.long, *self._registers(), COPIES=self._copies())
        self.cut = Program(units_kernel, (tile, constants), self.units, self.warps)
        self.prefill = Program(prefill_kernel, (tile, constants), self.units, 4)

    def _registers(self) -> tuple[int, int]:
        assert self.row.registers is not None
        return self.row.registers, REGISTERS - 2 * self.row.registers

    def _copies(self) -> bool:
        problem, constants = self.problem, self.constants
        assert self.units is not None
        # Of a stride that is given at run time the compiler knows only what it is a multiple of.
        strides = (self.units[0],) if problem.form == "full" else self.units
        paged = all(steps[5] == 1 and not any(step % 8 for step in steps[:4]) for steps in (constants.K_STEPS, constants.V_STEPS))
        return not constants.BYTES and paged and all(unit == 16 for unit in strides)

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        return self.launches(call, LARGE, at)

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        q, batch = call.q, call.batch
        if not extent.tokens or not extent.seqs:
            finish_empty(call)
            return
        if self.tiles.most_work(extent, batch.page_table.shape[1] * call.cache.page_size) >= 2**31:
            yield from self.generic.launches(call, extent, at)
            return
        given = ready = Query(at(q), *q.stride(), None)
        if self.balance is not None:
            halves = torch.empty(q.shape, dtype=torch.float16, device=q.device)
            exponents = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            yield self.balanced(given, extent, at(halves), at(exponents))
            ready = Query(at(halves), *halves.stride(), at(exponents))
        out, cache, rows, new, features = arguments_of(call, at, extent)
        rows = rows._replace(short=self.short_tile.TOKENS)
        assert self.long is not None
        most = self.long_programs(self.short_tile, extent) // self.long.HEADS
        listed = torch.empty(HEADER.value + FIELDS.value * most, dtype=torch.int32, device=q.device)
        units = at(listed)
        yield self.cut, (extent.seqs, 1, 1), (units, rows, cache, features), False
        workers = max(1, min(self.processors, most * self.long.HEADS))
        long = (out, units, ready, cache, rows, new, features)
        yield self.prefill, (workers, 1, 1), (*long, FIRST.value, workers // 2), False
        schedule = self.tiles.schedule(extent)._replace(tile=self.short_tile)
        workspace = torch.empty(self.workspace(schedule), dtype=torch.float32, device=q.device)
        room = self.split_over(schedule, at(workspace), beside=True)
        beside = self.decode.programs[self.short_tile]
        yield beside, (schedule.programs, 1, 1), (out, room, given, cache, rows, new, features), True
        yield self.prefill, (workers, 1, 1), (*long, SECOND.value, workers // 2), True
        yield from self.combined(schedule, out, room, cache, features)


def launcher(problem: Problem, platform: Platform) -> HopperLauncher:
    """Launches short rows and long ones side by side."""
    return HopperLauncher(problem, platform)
