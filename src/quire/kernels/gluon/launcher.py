"""Launches for Hopper: long rows by Gluon's kernel, short rows by Triton's, side by side on the card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from quire.kernels.gluon.prefill import FIRST, SECOND, prefill_kernel
from quire.kernels.gluon.units import FIELDS, HEADER, units_kernel
from quire.kernels.triton.arguments import Cache, Features, New, Out, Query, Rows
from quire.kernels.triton.constants import constants_of
from quire.kernels.triton.launcher import LARGE, At, AttendLauncher, Launch, arguments_of, balanced, finish_empty
from quire.kernels.triton.program import Program
from quire.kernels.triton.tile_selection import PROCESSORS
from quire.kernels.triton.tuning import Tuning
from quire.platform import Platform
from quire.problem import Extent, Problem

REGISTERS = 504
"""What three groups of warps have together, a thread of each: a multiprocessor's, in steps of eight."""


UNITS = (None, Rows, Cache, Features)
PREFILL = (Out, None, Query, Cache, Rows, New, Features, None, None)
"""What the kernels are given."""


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
        # Their tiles and those of a decode are the same, and so is the kernel.
        self.tiles.short, self.programs = {(1, 1): self.decode.tiles.short[1, 1]}, {}
        constants = constants_of(problem, platform, self.row, self.tiles.short[1, 1], self.long)
        tile = HopperTile(*self.long, *self._registers(), COPIES=self._copies())
        self.cut = Program(units_kernel, UNITS, (tile, constants), self.units, self.warps)
        self.prefill = Program(prefill_kernel, PREFILL, (tile, constants), self.units, 4)

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
        q = call.q
        if not extent.tokens or not extent.seqs:
            finish_empty(call)
            return
        schedule = self.schedule(call, extent)
        if not schedule.fits:
            yield from self.generic.launches(call, extent, at)
            return
        given: tuple[Any, ...] = (at(q), *q.stride(), None)
        ready = given
        if self.balance is not None:
            halves, exponents = balanced(q)
            yield self.balancing(given, extent, at(halves), at(exponents))
            ready = (at(halves), *halves.stride(), at(exponents))
        tile, programs = schedule.tile, schedule.programs
        assert self.long is not None
        out, cache, rows, new, features = arguments_of(call, at, extent, tile.TOKENS)
        listed = torch.empty(HEADER.value + FIELDS.value * schedule.long_tiles, dtype=torch.int32, device=q.device)
        units, workers = at(listed), max(1, min(self.processors, schedule.long_tiles * self.long.HEADS))
        yield self.cut, (extent.seqs, 1, 1), (units, rows, cache, features), False
        long = (out, units, ready, cache, rows, new, features)
        yield self.prefill, (workers, 1, 1), (*long, FIRST.value, workers // 2), False
        workspace = torch.empty(schedule.workspace, dtype=torch.float32, device=q.device)
        room = (at(workspace), programs, 0, 1, self.decode.row.many or 0, 1)
        yield self.decode.programs[tile], (programs, 1, 1), (out, room, given, cache, rows, new, features), True
        yield self.prefill, (workers, 1, 1), (*long, SECOND.value, workers // 2), True
        geometry = (tile.ROWS, tile.TOGETHER, tile.TOKENS, tile.HEADS)
        yield self.combine, (programs, schedule.combined_rows, 1), (out, room, cache, features, geometry), self.constants.EARLY


def launcher(problem: Problem, platform: Platform) -> HopperLauncher:
    """Launches short rows and long ones side by side."""
    return HopperLauncher(problem, platform)
