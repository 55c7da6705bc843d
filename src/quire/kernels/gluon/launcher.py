"""Launches for Hopper: long sequences by Gluon's kernel and short ones by Triton's, concurrently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from triton.runtime import _allocation

from quire.kernels.gluon.prefill import FIRST, SECOND, prefill_kernel
from quire.kernels.gluon.units import FIELDS, HEADER, units_kernel
from quire.kernels.triton.device.arguments import AttendConstants, BatchTensors, Cache, New, Number, Out, OwnedPointer, Query
from quire.kernels.triton.device.features import Features
from quire.kernels.triton.host.constants import constants_of
from quire.kernels.triton.host.launcher import ANY_BATCH, At, AttendLauncher, Launch, arguments_of, balanced, finish_empty
from quire.kernels.triton.host.program import Program
from quire.kernels.triton.host.tile_selection import PROCESSORS
from quire.kernels.triton.host.tuning import Tuning
from quire.platform import Platform
from quire.problem import Extent, Problem

REGISTERS, REGISTERS_OF_FOUR = 504, 512
"""The registers of three warp groups or of four, one thread of each: those of a multiprocessor, in steps of eight."""
WHOLE_TILE = 40
"""With fewer registers a producer loads a tile in chunks of `FEW_KEYS` keys."""
FEW_KEYS = 32
SMALLEST_BOX = 8
"""Rows of a box: those of the pattern in which shared memory is swizzled."""
PARTS = 32
"""Programs that list the units of a sequence with spans."""
LARGEST_STEP = 2**39
"""Elements of 16 bits: strides of a box have 40 bits."""
ONCE_A_ROW = {"lse", "sinks"}
"""Features that are computed once for each row, and not for each score."""
UNITS = (OwnedPointer, BatchTensors, Cache, Features)
PREFILL = (Out, OwnedPointer, Query, Cache, BatchTensors, New, Features, Number, Number)
"""The records of the kernels' arguments, or the types of single values."""


class HopperTile(NamedTuple):
    """How much one program computes at a time, as in `TritonTile`, and the registers of its warps."""

    ROWS: int
    KEYS: int
    STAGES: int
    HEADS_PER_TILE: int
    STEP: int
    TOKENS: int
    HEADS: int
    FEW_ROWS: bool
    CONSUMER_REGISTERS: int
    """Per thread."""
    PRODUCER_REGISTERS: int
    CHUNK: int
    """Keys that the producer loads at a time."""
    QUEUE: int
    """Units whose queries are in shared memory: if two, one is computed while the next is loaded."""
    ASYNC_COPIES: bool
    """Whether keys and values are copied asynchronously, sixteen bytes at a time."""
    BOX: int
    """Keys of a page that are copied by one instruction, 0 if keys are copied one by one."""


class HopperLauncher(AttendLauncher):
    """Five launches: list the units of long sequences; compute them; compute short sequences concurrently, on a part of the GPU;
    compute long sequences there, too, when those have ended; and combine partial results. The kernel of the short sequences is
    that of `triton-decode`."""

    def __init__(self, problem: Problem, platform: Platform, tuning: Tuning | None = None, decode: Tuning | None = None):
        super().__init__("gluon", problem, platform, tuning)
        self.decode = AttendLauncher("decode", problem, platform, decode)
        self.processors = platform.multiprocessors or PROCESSORS
        assert self.long is not None
        # Short sequences have the tiles of a decode, and the same kernel.
        self.tiles.short, self.programs = {(1, 1): self.decode.tiles.short[1, 1]}, {}
        self.partials = self.decode.partials
        constants = constants_of(problem, platform, self.row, self.tiles.short[1, 1], self.long)
        queue = 2 if constants.K_WIDTH <= 128 else 1
        copies = self._copies()
        consumer, producer = self._registers(copies and constants.BYTES)
        box = self._box(constants) if copies else 0
        # The addresses of a whole tile take more than 24 registers. With boxes, few tiles are copied row by row.
        few = box or constants.BYTES or producer < WHOLE_TILE
        chunk = min(self.long.KEYS, FEW_KEYS) if few else self.long.KEYS
        tile = HopperTile(*self.long[:-1], consumer, producer, chunk, queue, copies, box)
        self.make_units = Program(units_kernel, UNITS, (tile, constants), self.units, self.warps)
        self.prefill = Program(prefill_kernel, PREFILL, (tile, constants), self.units, 4)

    @property
    def generic(self) -> AttendLauncher:
        """Of spans there is one attention kernel for all batches, which counts work in 64 bits."""
        return self.decode if self.decode.tiles.one_kernel else super().generic

    def _registers(self, staged: bool) -> tuple[int, int]:
        assert self.row.registers is not None
        features = set(self.problem.features)
        # What compiles with the fewest spilled registers. Consumers compute features of single scores; in context form the producer
        # selects between two sources of keys, and with a shard it divides to find the new ones.
        of_scores = features - ONCE_A_ROW - {"context-form"}
        of_keys = "shard" in features or (not of_scores and "context-form" in features)
        consumer = self.row.registers + (-8 if of_keys else 8 if of_scores else 0)
        return consumer, REGISTERS_OF_FOUR // 2 - consumer if staged else REGISTERS - 2 * consumer

    def _copies(self) -> bool:
        problem, constants = self.problem, self.constants
        assert self.units is not None
        # Of a stride that is given at run time the compiler knows only a divisor.
        strides = (self.units[0],) if problem.form == "full" else self.units
        vector = 16 if constants.BYTES else 8
        paged = all(
            steps[5] == 1 and not any(step % vector for step in steps[:4]) for steps in (constants.K_STEPS, constants.V_STEPS)
        )
        return paged and all(unit == 16 for unit in strides)

    def _box(self, constants: AttendConstants) -> int:
        """The keys of a box: a power of two that divides the page size."""
        assert self.long is not None
        steps = (*constants.K_STEPS[:4], *constants.V_STEPS[:4])
        whole = constants.K_SLOTS >= constants.PAGE_SIZE and constants.V_SLOTS >= constants.PAGE_SIZE
        whole = whole and constants.K_DIMS >= constants.HEAD_DIM and constants.V_DIMS >= constants.V_DIM
        box = min(self.long.KEYS, constants.PAGE_SIZE & -constants.PAGE_SIZE)
        return box if whole and box >= SMALLEST_BOX and max(steps) < LARGEST_STEP else 0

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        return self.launches(call, ANY_BATCH, at)

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
        wide_rows = None if self.decode.constants.WIDE_ROWS is None else 0
        out, cache, sequences, new, features = arguments_of(call, at, extent, tile.TOKENS, wide_rows=wide_rows)
        unit_list = torch.empty(HEADER.value + FIELDS.value * schedule.long_tiles, dtype=torch.int32, device=q.device)
        units, workers = at(unit_list), max(1, min(self.processors, schedule.long_tiles * self.long.HEADS))
        # With spans the keys of each unit are found and checked: several programs share a sequence.
        parts = 1 if call.batch.spans is None else max(1, min(PARTS, schedule.long_tiles))
        yield self.make_units, (extent.seqs, parts, 1), (units, sequences, cache, features), False
        long = (out, units, ready, cache, sequences, new, features)
        # Descriptors of boxes are made on the device, in memory that Triton asks for. It is kept until all launches are issued: a
        # kernel that is launched early would otherwise be given the memory of one that still runs.
        kept: dict[int, torch.Tensor] = {}
        keep = lambda size, *_: kept.setdefault(len(kept), torch.empty(size, dtype=torch.uint8, device=q.device))  # noqa: E731
        before = _allocation._allocator.set(keep)
        try:
            yield self.prefill, (workers, 1, 1), (*long, FIRST.value, workers // 2), False
            partials = torch.empty(schedule.workspace, dtype=torch.float32, device=q.device)
            workspace = (at(partials), programs, 0, 1, self.decode.row.many or 0, 1, None)
            yield self.decode.programs[tile], (programs, 1, 1), (out, workspace, given, cache, sequences, new, features), True
            yield self.prefill, (workers, 1, 1), (*long, SECOND.value, workers // 2), True
            numbers = (tile.ROWS, tile.HEADS_PER_TILE, tile.TOKENS, tile.HEADS)
            yield (
                self.combine,
                (programs, schedule.combined_rows, 1),
                (out, workspace, cache, features, numbers),
                self.constants.PDL,
            )
        finally:
            _allocation._allocator.reset(before)


def launcher(problem: Problem, platform: Platform) -> HopperLauncher:
    """Short and long sequences concurrently."""
    return HopperLauncher(problem, platform)
