"""Launchers: the arguments of a call, its grids and its workspace. Which kernels are compiled follows from the problem alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

from quire.kernels.triton.device.arguments import (
    AttendConstants,
    BalanceConstants,
    BatchTensors,
    Cache,
    CombineConstants,
    New,
    Number,
    Out,
    OwnedPointer,
    Query,
    TileNumbers,
    TritonTile,
    Workspace,
)
from quire.kernels.triton.device.attend import attend_kernel
from quire.kernels.triton.device.balance import balance_kernel
from quire.kernels.triton.device.combine import combine_kernel
from quire.kernels.triton.device.features import Features
from quire.kernels.triton.device.partials import HEADER
from quire.kernels.triton.host.constants import constants_of, has_one_kernel
from quire.kernels.triton.host.program import Program, as_bytes, is_compiled
from quire.kernels.triton.host.specimen import specimen
from quire.kernels.triton.host.tile_selection import MAX_DECODE_TOKENS, Tiles
from quire.kernels.triton.host.tuning import SMALL, SMALL_GLUON, Tuning
from quire.platform import INTERPRETER, Platform
from quire.problem import ANY, Extent, Problem, power_of_two

BALANCE_ROWS = 16
"""Query rows that one program of `balance_kernel` converts."""
COMBINE_WIDTH = 128
"""Elements of a row that one warp of `combine_kernel` computes."""
COMBINE_REGISTERS = 168
"""The most registers of a thread of `combine_kernel` for v_head_dim up to 128, on NVIDIA GPUs: twelve programs then fit a
multiprocessor of 64 K registers. Triton 3.7 takes 164 for sm90 and spills none."""
MOST_PARTIALS = 64 * 2**20
"""The most bytes of partial results of a batch-invariant call. If a batch has more of them, no unit is divided: the bits are the
same."""
LOG2E = math.log2(math.e)
NO_NEW = (None,) * 8
NO_SHARD = (None,) * 3
NO_SPANS = (None,) * 3
NO_SELECT = (None,) * 5
NO_PREFIXES: tuple[Any, ...] = (None,) * 10

ATTEND = (Out, Workspace, Query, Cache, BatchTensors, New, Features)
COMBINE = (Out, Workspace, Cache, Features, TileNumbers)
BALANCE = (OwnedPointer, OwnedPointer, Query, Number)
"""The records of the kernels' arguments, or the types of single values."""
ANY_BATCH = Extent(seqs=8, tokens=64, max_q_len=8, max_kv_len=1024)
"""Any batch: what is compiled does not depend on its size."""

Launch = tuple[Program, tuple[int, int, int], tuple[Any, ...], bool]
"""A program, its grid, its arguments, and whether it may be launched before the previous kernel has ended."""
At = Callable[[torch.Tensor], Any]
"""Converts a tensor to an argument: its address, or the tensor itself where the compiler needs its type."""


class Launcher:
    """Launches calls of one problem on one platform."""

    def __init__(self, problem: Problem, platform: Platform):
        self.problem, self.platform = problem, platform
        aligned = problem.memory == "aligned"
        self.units = (gcd(16, problem.head_dim), gcd(16, problem.v_head_dim)) if aligned else None
        """The divisors of the strides of K's and V's heads; None in generic memory."""
        self.workspace_bytes = 0
        """The most that a call allocates for partial results."""

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        """The launches of a call in order; none if it has nothing to launch."""
        raise NotImplementedError

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        """A launch of each program that some batch of the problem needs."""
        return self.launches(call, Extent.of(call.k if call.q is None else call.q, call.cache, call.batch), at)

    def __call__(self, call: Any) -> None:
        rows = call.k if call.q is None else call.q
        extent, device = call.extent or Extent.of(rows, call.cache, call.batch), rows.device
        if self.platform.vendor == "interpreter":
            for program, grid, arguments, _ in self.launches(call, extent, as_bytes):
                program.interpret(grid, arguments)
        elif torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                self(call)
        else:
            stream = driver.active.get_current_stream(device.index)
            # Triton's hooks are chains, which may be empty.
            enter_hook, exit_hook = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            enter_hook = enter_hook if getattr(enter_hook, "calls", enter_hook) else None
            exit_hook = exit_hook if getattr(exit_hook, "calls", exit_hook) else None
            for program, grid, arguments, early in self.launches(call, extent, torch.Tensor.data_ptr):
                if device.index not in program.loaded:
                    self.load(call, extent, device.index)
                kernel, run, run_early = program.loaded[device.index]
                arguments = (*arguments, *program.constants)
                metadata = None if enter_hook is None else kernel.launch_metadata(grid, stream, *arguments)
                run = run_early if early else run
                run(*grid, stream, kernel.function, kernel.packed_metadata, metadata, enter_hook, exit_hook, *arguments)

    def load(self, call: Any, extent: Extent, device: int) -> None:
        """Compiles what a call needs and loads it."""
        for program, _, arguments, _ in self.launches(call, extent, as_bytes):
            if device not in program.loaded:
                program.load(arguments, self.platform, device, self.problem)

    def keys(self, extent: Extent | None = None) -> tuple[str, ...]:
        """A key for each compiled kernel that a batch needs: a hash of what `triton.compile` is given. Without an extent, for each
        that some batch of the problem needs. The interpreter compiles none."""
        if self.platform.vendor == "interpreter":
            return ()
        return tuple(dict.fromkeys(program.recipe(arguments).key(self.platform) for program, arguments in self.needed(extent)))

    def not_compiled(self, extent: Extent) -> tuple[str, ...]:
        """The names of a batch's kernels that a call would have to compile."""
        recipes = {recipe.key(self.platform): recipe for recipe in (p.recipe(a) for p, a in self.needed(extent))}
        return tuple(recipe.kernel.__name__ for recipe in recipes.values() if not is_compiled(recipe, self.platform))

    def prepare(self, device: int | None) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each kernel that some batch of the problem needs, by its key, and a function that compiles it and, for a device, loads
        it. The interpreter compiles none."""
        if self.platform.vendor == "interpreter":
            return
        for program, arguments in self.needed():
            recipe = program.recipe(arguments)
            if device is None:
                yield recipe.key(self.platform), partial(recipe.compile, self.platform)
            else:
                yield recipe.key(self.platform), partial(program.load, arguments, self.platform, device)

    def needed(self, extent: Extent | None = None) -> Iterator[tuple[Program, tuple[Any, ...]]]:
        """The programs of a batch, or of all batches, and arguments with the types of the problem's calls."""
        call = specimen(self.problem, extent or ANY_BATCH)
        launches = self.all_launches(call, as_bytes) if extent is None else self.launches(call, extent, as_bytes)
        for program, _, arguments, _ in launches:
            yield program, arguments


class Schedule(NamedTuple):
    """How one batch is launched."""

    tile: TritonTile
    """Of the short sequences."""
    programs: int
    """That the short sequences are split over."""
    tail_programs: int
    main_programs: int
    combined_rows: int
    """The most rows of a tile that hold queries."""
    long_tiles: int
    """The most query tiles that the long sequences can have, per head."""
    workspace: int
    """Its size in numbers of 4 bytes."""
    rows: int | None
    """The rows of partial results of a batch-invariant call."""
    short: int
    """The most new tokens of a short sequence."""
    fits: bool
    """Whether the work, in key tiles, can be counted in 32 bits."""


class AttendLauncher(Launcher):
    """Launches attention: short sequences are split over programs and combined, long ones are computed by tiles of queries."""

    def __init__(self, kernel: str, problem: Problem, platform: Platform, tuning: Tuning | None = None):
        super().__init__(problem, platform)
        # Batch-invariant calls use one tile shape for every batch.
        kernel = "decode" if problem.batch_invariant else kernel
        self.kernel, self.tuning = kernel, tuning
        self.tiles = Tiles(kernel, problem, platform, tuning)
        self.row, self.long = self.tiles.row, self.tiles.long
        self.warps = 1 if self.row in (SMALL, SMALL_GLUON) else 4
        """Of the kernels that prepare queries and units."""
        first, *others = dict.fromkeys(self.tiles.short.values())
        constants = self.constants_for(first)
        if self.tiles.one_kernel:
            if others:
                (wide_rows,) = others
                constants = constants._replace(WIDE_ROWS=wide_rows)
            self.programs = dict.fromkeys((first, *others), self._attend(first, constants))
        else:
            self.programs = {tile: self._attend(tile, self.constants_for(tile)) for tile in (first, *others)}
        self.balance = None
        if constants.BALANCE == "before":
            self.balance = Program(balance_kernel, BALANCE, (BALANCE_ROWS, BalanceConstants.of(constants)), self.units, self.warps)
        registers = COMBINE_REGISTERS if platform.vendor == "nvidia" and constants.V_WIDTH <= COMBINE_WIDTH else None
        # One warp has too few registers for partial results of wider heads, and spills two kilobytes a thread.
        warps = max(1, constants.V_WIDTH // COMBINE_WIDTH)
        # Compiled as for generic memory, so that both kinds of memory share it: its workspace is aligned in any case.
        self.combine = Program(combine_kernel, COMBINE, (CombineConstants.of(constants),), None, warps, registers=registers)
        self.constants = constants
        self.partials = {tile: 2 * tile.ROWS * (constants.V_WIDTH + 2) + HEADER.value for tile in self.tiles.short.values()}
        """The numbers in the workspace for each program with this tile."""
        self.workspace_bytes = 4 * 2 * self.tiles.programs * max(self.partials.values())
        if problem.batch_invariant:
            self.workspace_bytes = 4 * (self.most_rows * (constants.V_WIDTH + 2) + HEADER.value * self.tiles.programs)
        self._generic: AttendLauncher | None = None

    def constants_for(self, tile: TritonTile) -> AttendConstants:
        """What the kernel with this tile of short sequences is compiled for."""
        return constants_of(self.problem, self.platform, self.row, tile, self.long)

    def _attend(self, tile: TritonTile, constants: AttendConstants) -> Program:
        row = self.row
        stages = max(row.stages, row.long_stages)
        return Program(attend_kernel, ATTEND, (tile, self.long, constants), self.units, row.warps, stages, row.registers)

    @property
    def most_rows(self) -> int:
        """The most rows of partial results that a batch-invariant call allocates."""
        return MOST_PARTIALS // (4 * (self.constants.V_WIDTH + 2))

    @property
    def generic(self) -> AttendLauncher:
        """The launcher of the same problem for generic memory, which counts work in 64 bits."""
        if self._generic is None:
            problem = self.problem.replace(memory="generic")
            self._generic = AttendLauncher("mixed", problem, self.platform, self.tuning)
        return self._generic

    def schedule(self, call: Any, extent: Extent) -> Schedule:
        """The tile of a batch's short sequences, the programs they are split over, and the workspace."""
        tiles, problem = self.tiles, self.problem
        long = None if tiles.all_decode else self.long
        seqs, tokens, max_q_len, _, _ = extent
        few, heads, programs = 1, 1, tiles.programs
        if problem.batch_invariant:
            few = min(max_q_len, tiles.short[1, 1].TOKENS)
        if max_q_len > tiles.most_of_first:
            few = min(power_of_two(max_q_len), MAX_DECODE_TOKENS)
            few = few if (few, 1) in tiles.short else MAX_DECODE_TOKENS
        # Several key heads in a tile only if there are more units than programs: otherwise more units would be split and have to be
        # combined.
        while (few, 2 * heads) in tiles.short and min(tokens, seqs) * problem.kv_heads > programs * heads:
            heads *= 2
        tile = tiles.short[1 if problem.batch_invariant else few, heads]
        tail_programs, units = 0, min(tokens, tokens // tile.TOKENS + seqs) * tile.HEADS
        if self.constants.TAIL and units >= self.row.many * programs and programs >= tile.HEADS:  # type: ignore[operator]
            tail_programs = programs
        short = ANY if long is None else max(tile.TOKENS, MAX_DECODE_TOKENS) if problem.batch_invariant else tile.TOKENS
        long_tiles = 0 if long is None else tokens // long.TOKENS + min(seqs, tokens // (short + 1))
        keys = call.batch.page_table.shape[1] * problem.page_size + tokens
        if call.batch.select is not None:
            keys = call.batch.select.n * call.batch.select.keys_per_entry(problem.page_size)
        if long is not None:
            units = seqs * tile.HEADS * -(-short // tile.TOKENS)
        most = units * (keys // tile.PIECE + 3 + self.constants.UNIT_OVERHEAD)
        rows, workspace = None, (programs + tail_programs) * self.partials[tile]
        if problem.batch_invariant:
            rows = min(self.most_rows, most * min(tile.ROWS, min(tokens, tile.TOKENS) * problem.group))
            workspace = rows * (self.constants.V_WIDTH + 2) + HEADER.value * programs
        return Schedule(
            tile,
            programs + tail_programs,
            tail_programs,
            max(1, programs // tile.HEADS),
            min(tile.ROWS, few * self.constants.GROUP * heads),
            long_tiles,
            workspace,
            rows,
            short,
            self.constants.WIDE or most < 2**31,
        )

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        q = call.q
        if not extent.tokens or not extent.seqs:
            finish_empty(call)
            return
        schedule = self.schedule(call, extent)
        if not schedule.fits:
            yield from self.generic.launches(call, extent, at)
            return
        query: tuple[Any, ...] = (at(q), *q.stride(), None)
        if self.balance is not None:
            ready, exponents = balanced(q)
            yield self.balancing(query, extent, at(ready), at(exponents))
            query = (at(ready), *ready.stride(), at(exponents))
        tile, programs = schedule.tile, schedule.programs
        partials = torch.empty(schedule.workspace, dtype=torch.float32, device=q.device)
        workspace = (at(partials), programs, schedule.tail_programs, schedule.main_programs, self.row.many or 0, 0, schedule.rows)
        heads = 0 if self.long is None else self.long.HEADS
        wide_rows = None if self.constants.WIDE_ROWS is None else int(tile == self.constants.WIDE_ROWS)
        out, cache, sequences, new, features = arguments_of(call, at, extent, schedule.short, wide_rows=wide_rows)
        grid = (programs + schedule.long_tiles * heads, 1, 1)
        yield self.programs[tile], grid, (out, workspace, query, cache, sequences, new, features), False
        numbers = (tile.ROWS, tile.HEADS_PER_TILE, tile.TOKENS, tile.HEADS)
        grid = (programs, schedule.combined_rows, 1)
        yield self.combine, grid, (out, workspace, cache, features, numbers), self.constants.PDL

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        for program, grid, arguments, early in self.launches(call, ANY_BATCH, at):
            for one in dict.fromkeys(self.programs.values()) if program.kernel is attend_kernel else [program]:
                yield one, grid, arguments, early

    def balancing(self, query: tuple[Any, ...], extent: Extent, ready: Any, exponents: Any) -> Launch:
        """The launch of `balance_kernel`."""
        assert self.balance is not None
        count = extent.tokens * self.problem.q_heads
        return self.balance, (-(-count // BALANCE_ROWS), 1, 1), (ready, exponents, query, count), False


def balanced(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for balanced queries and the powers of two they were divided by."""
    ready = torch.empty(q.shape, dtype=torch.float16, device=q.device)
    return ready, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def arguments_of(
    call: Any, at: At, extent: Extent, short: int, prefixes: tuple[Any, ...] = NO_PREFIXES, wide_rows: int | None = None
) -> tuple[tuple[Any, ...], ...]:
    """The arguments of the attention kernels except queries and workspace: `Out`, `Cache`, `BatchTensors`, `New` and `Features`, as
    plain tuples. Sequences with up to `short` new tokens are short. `prefixes` are the members of `BatchTensors` about them;
    `wide_rows` is one, too."""
    cache, batch, options, out, lse, new = call.cache, call.batch, call.options, call.out, call.lse, call.new
    table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
    causal, k_scale, v_scale, q_scale, out_scale = options.causal, cache.k_scale, cache.v_scale, options.q_scale, options.out_scale
    scale = call.q.shape[2] ** -0.5 if options.scale is None else options.scale
    if q_scale is not None:
        if isinstance(q_scale, torch.Tensor) and q_scale.device == out.device:
            q_scale = at(q_scale)
        else:
            scale, q_scale = scale * float(q_scale), None
    if out_scale is not None:
        on_device = isinstance(out_scale, torch.Tensor) and out_scale.device == out.device
        out_scale = at(out_scale) if on_device else float(out_scale)
    # Not 0: masked scores must stay at minus infinity.
    features = [max(abs(scale) * LOG2E, 2.0**-126), *options.numbers]
    for tensor, axes in options.tensors:
        features += (None,) * (axes + 1) if tensor is None else (at(tensor), *tensor.stride())
    return (
        (at(out), *out.stride(), *((None,) * 3 if lse is None else (at(lse), *lse.stride())), int(call.zero_padding)),
        (
            at(cache.k),
            at(cache.v),
            None if k_scale is None else at(k_scale),
            None if v_scale is None else at(v_scale),
            cache.pages,
        ),
        (
            *(at(table), *table.stride(), table.shape[1], at(kv_lens), *kv_lens.stride(), at(q_starts), *q_starts.stride()),
            *((None, None) if causal is True or causal is False else (at(causal), causal.stride(0))),
            *(extent.seqs, extent.tokens, short, wide_rows, *(batch.shard or NO_SHARD)),
            *(NO_SPANS if batch.spans is None else (at(batch.spans), *batch.spans.stride())),
            *(NO_SELECT if batch.select is None else selection_of(batch.select, at)),
            *prefixes,
        ),
        NO_NEW if new is None else (at(new[0]), *new[0].stride(), at(new[1]), *new[1].stride()),
        (*features, q_scale, out_scale),
    )


def selection_of(select: Any, at: At) -> tuple[Any, ...]:
    """The arguments of a selection."""
    entries = select.entries
    row, head, step = entries.stride()
    return at(entries), row, 0 if entries.shape[1] == 1 else head, step, entries.shape[2]


def finish_empty(call: Any) -> None:
    """A batch without tokens or sequences launches no kernel: all rows are padding."""
    if call.zero_padding:
        call.out.zero_()
    if call.lse is not None:
        call.lse.zero_()


def platform_of(problem: Problem, platform: Platform) -> Platform:
    """Where a problem's kernels run: tensors of the CPU run in Triton's interpreter, if it is on."""
    return INTERPRETER if problem.device == "cpu" and knobs.runtime.interpret else platform


def decode(problem: Problem, platform: Platform) -> AttendLauncher:
    """Every sequence is short: its keys are split over programs."""
    return AttendLauncher("decode", problem, platform_of(problem, platform))


def mixed(problem: Problem, platform: Platform) -> AttendLauncher:
    """Short and long sequences in one launch."""
    if problem.memory == "generic" and problem.aligned_pages and has_one_kernel(problem):
        from quire.kernels.triton.host.copied import CopyingLauncher

        return CopyingLauncher("mixed", problem, platform_of(problem, platform))
    return AttendLauncher("mixed", problem, platform_of(problem, platform))
