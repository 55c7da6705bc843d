"""Launches calls of one problem: the arguments of a call, its grids and its workspace. What is compiled is decided beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

import torch
from triton import knobs

from quire.kernels.triton.arguments import Balance, Cache, Features, Finish, Geometry, New, Out, Query, Rows, Tile, Workspace
from quire.kernels.triton.attend import attend_kernel
from quire.kernels.triton.balance import balance_kernel
from quire.kernels.triton.combine import combine_kernel
from quire.kernels.triton.constants import constants_of
from quire.kernels.triton.program import Program, as_bytes, launch
from quire.kernels.triton.tile_selection import Schedule, Tiles
from quire.kernels.triton.tuning import SMALL, SMALL_GLUON, Tuning
from quire.platform import INTERPRETER, Platform
from quire.problem import ANY, Extent, Problem

BALANCED = 16
"""Query rows that one program balances."""
NO_NEW = New(*[None] * 8)

Launch = tuple[Program, tuple[int, int, int], tuple[Any, ...], bool]
"""A program, its grid, its arguments, and whether it may be launched before the kernel before it has ended."""
At = Callable[[torch.Tensor], Any]
"""What stands for a tensor among the arguments: its address, or the tensor itself where a compiler wants to know its type."""


class Launcher:
    """Launches calls of one problem on one platform."""

    def __init__(self, problem: Problem, platform: Platform):
        self.problem, self.platform = problem, platform
        aligned = problem.memory == "aligned"
        self.units = (gcd(16, problem.head_dim), gcd(16, problem.v_head_dim)) if aligned else None
        """What the strides of K's and V's heads are multiples of; None in generic memory."""

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        """The launches of a call in order; none if it has nothing to launch."""
        raise NotImplementedError

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        """A launch of each program that some batch of the problem needs."""
        return self.launches(call, Extent.of(call.k if call.q is None else call.q, call.cache, call.batch), at)

    def __call__(self, call: Any) -> None:
        rows = call.k if call.q is None else call.q
        extent, device = Extent.of(rows, call.cache, call.batch), rows.device
        if self.platform.vendor == "interpreter":
            for program, grid, arguments, _ in self.launches(call, extent, as_bytes):
                program.interpret(grid, arguments)
        elif torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                self(call)
        else:
            for program, grid, arguments, early in self.launches(call, extent, torch.Tensor.data_ptr):
                if device.index not in program.loaded:
                    self.load(call, extent, device.index)
                launch(program, device.index, grid, arguments, early)

    def load(self, call: Any, extent: Extent, device: int) -> None:
        """Compiles what a call needs and loads it."""
        for program, _, arguments, _ in self.launches(call, extent, as_bytes):
            if device not in program.loaded:
                program.load(arguments, self.platform, device)

    def keys(self, call: Any, extent: Extent) -> tuple[str, ...]:
        """A key for each compiled kernel that a call needs: a hash of what `triton.compile` is given."""
        launches = self.launches(call, extent, as_bytes)
        return tuple(dict.fromkeys(program.recipe(arguments).key(self.platform) for program, _, arguments, _ in launches))


class AttendLauncher(Launcher):
    """Launches attention: short rows split over programs and combined, long rows by tiles of queries."""

    def __init__(self, kernel: str, problem: Problem, platform: Platform, tuning: Tuning | None = None):
        super().__init__(problem, platform)
        # Batch-invariant calls are all of one shape, whatever they hold.
        kernel = "decode" if problem.batch_invariant else kernel
        self.kernel, self.tuning = kernel, tuning
        self.tiles = Tiles(kernel, problem, platform, tuning)
        self.row, self.long = self.tiles.row, self.tiles.long
        self.warps = 1 if self.row in (SMALL, SMALL_GLUON) else 4
        """Of the kernels that make ready."""
        self.programs: dict[Tile, Program] = {tile: self._attend(tile) for tile in self.tiles.short.values()}
        constants = constants_of(problem, platform, self.row, self.tiles.short[1, 1], self.long)
        self.balance = None
        if constants.BALANCE == "before":
            self.balance = Program(balance_kernel, (BALANCED, Balance.of(constants)), self.units, self.warps)
        self.combine = Program(combine_kernel, (Finish.of(constants),), self.units, 1)
        self.constants = constants
        self._generic: AttendLauncher | None = None

    def _attend(self, tile: Tile) -> Program:
        row, constants = self.row, constants_of(self.problem, self.platform, self.row, tile, self.long)
        stages = max(row.stages, row.long_stages)
        return Program(attend_kernel, (tile, self.long, constants), self.units, row.warps, stages, row.registers)

    @property
    def generic(self) -> AttendLauncher:
        """The launcher of the same problem for any memory. It counts work in 64 bits."""
        if self._generic is None:
            problem = self.problem.replace(memory="generic")
            self._generic = AttendLauncher("mixed", problem, self.platform, self.tuning)
        return self._generic

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        q, batch = call.q, call.batch
        if not extent.tokens or not extent.seqs:
            finish_empty(call)
            return
        room = batch.page_table.shape[1] * call.cache.page_size
        if self.units is not None and self.tiles.most_work(extent, room) >= 2**31:
            yield from self.generic.launches(call, extent, at)
            return
        schedule = self.tiles.schedule(extent)
        query = Query(at(q), *q.stride(), None)
        if self.balance is not None:
            ready = torch.empty(q.shape, dtype=torch.float16, device=q.device)
            exponents = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            yield self.balanced(query, extent, at(ready), at(exponents))
            query = Query(at(ready), *ready.stride(), at(exponents))
        out, cache, rows, new, features = arguments_of(call, at, extent)
        if self.long is not None:
            rows = rows._replace(short=schedule.tile.TOKENS)
        workspace = torch.empty(self.workspace(schedule), dtype=torch.float32, device=q.device)
        room = self.split_over(schedule, at(workspace))
        grid = (schedule.programs + self.long_programs(schedule.tile, extent), 1, 1)
        yield self.programs[schedule.tile], grid, (out, room, query, cache, rows, new, features), False
        yield from self.combined(schedule, out, room, cache, features)

    def all_launches(self, call: Any, at: At) -> Iterator[Launch]:
        launches = list(self.launches(call, Extent.of(call.q, call.cache, call.batch), at))
        for program, *rest in launches:
            for one in self.programs.values() if program.kernel is attend_kernel else [program]:
                yield one, *rest

    def balanced(self, query: Query, extent: Extent, ready: Any, exponents: Any) -> Launch:
        """The launch that balances queries."""
        assert self.balance is not None
        count = extent.tokens * self.problem.q_heads
        return self.balance, (-(-count // BALANCED), 1, 1), (ready, exponents, query, count), False

    def workspace(self, schedule: Schedule) -> int:
        """The numbers that partial results and their headers take."""
        return schedule.programs * (2 * schedule.tile.ROWS * (self.constants.V_WIDTH + 2) + 5)

    def split_over(self, schedule: Schedule, workspace: Any, beside: bool = False) -> Workspace:
        """How the short rows are split over programs, and where these store partial results."""
        return Workspace(workspace, schedule.programs, schedule.extras, schedule.mains, self.row.many or 0, int(beside))

    def long_programs(self, tile: Tile, extent: Extent) -> int:
        """Tiles of queries that the long rows can have at most."""
        if self.long is None:
            return 0
        rows = min(extent.seqs, extent.tokens // (tile.TOKENS + 1))
        return (extent.tokens // self.long.TOKENS + rows) * self.long.HEADS

    def combined(self, schedule: Schedule, out: Out, room: Workspace, cache: Cache, features: Features) -> Iterator[Launch]:
        """The launch that combines partial results, if there can be any."""
        if not self.constants.INVARIANT:
            tile = schedule.tile
            geometry = Geometry(tile.ROWS, tile.TOGETHER, tile.TOKENS, tile.HEADS)
            grid = (schedule.programs, schedule.combined_rows, 1)
            yield self.combine, grid, (out, room, cache, features, geometry), self.constants.EARLY


def arguments_of(call: Any, at: At, extent: Extent) -> tuple[Out, Cache, Rows, New, Features]:
    """The arguments of the attention kernels, but for queries and workspace."""
    cache, batch, options, lse = call.cache, call.batch, call.options, call.lse
    lse_arguments = (None, None, None) if lse is None else (at(lse), *lse.stride())
    out = Out(at(call.out), *call.out.stride(), *lse_arguments, int(call.zero_padding))
    k_scale, v_scale = (None, None) if cache.k_scale is None else (at(cache.k_scale), at(cache.v_scale))
    pages = Cache(at(cache.k), at(cache.v), k_scale, v_scale, cache.pages)
    table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
    causal, causal_step = _strided(options.causal, at)
    rows = Rows(
        at(table), *table.stride(), table.shape[1], at(kv_lens), *kv_lens.stride(), at(q_starts), *q_starts.stride(),
        causal, causal_step, extent.seqs, extent.tokens, ANY,
    )  # fmt: skip
    new = NO_NEW
    if call.new is not None:
        k, v = call.new
        new = New(at(k), *k.stride(), at(v), *v.stride())
    mask = (None, None, None) if options.mask is None else (at(options.mask), *options.mask.stride())
    q_scale, out_scale = options.q_scale, options.out_scale
    scale = call.q.shape[2] ** -0.5 if options.scale is None else options.scale
    on_device = [isinstance(x, torch.Tensor) and x.device == call.q.device for x in (q_scale, out_scale)]
    if q_scale is not None and not on_device[0]:
        scale *= float(q_scale)
    features = Features(
        # Not 0: what is hidden must stay at minus infinity.
        max(abs(scale) * math.log2(math.e), 2.0**-126),
        options.softcap if options.softcap is None else float(options.softcap),
        *_strided(options.alibi, at),
        *_strided(options.sinks, at),
        *mask,
        *_strided(options.positions, at),
        at(q_scale) if on_device[0] else None,
        at(out_scale) if on_device[1] else None if out_scale is None else float(out_scale),
    )
    return out, pages, rows, new, features


def _strided(value: Any, at: At) -> tuple[Any, Any]:
    """A tensor [n] and its stride; None for what is no tensor."""
    return (at(value), value.stride(0)) if isinstance(value, torch.Tensor) else (None, None)


def finish_empty(call: Any) -> None:
    """Without a token or a sequence there is nothing to launch, and all rows are padding."""
    if call.zero_padding:
        call.out.zero_()
    if call.lse is not None:
        call.lse.zero_()


def platform_of(problem: Problem, platform: Platform) -> Platform:
    """Where a problem's kernels run: tensors of the CPU run in Triton's interpreter, if it is on."""
    return INTERPRETER if problem.device == "cpu" and knobs.runtime.interpret else platform


def decode(problem: Problem, platform: Platform) -> AttendLauncher:
    """Takes every row for a short one: its keys are split over programs."""
    return AttendLauncher("decode", problem, platform_of(problem, platform))


def mixed(problem: Problem, platform: Platform) -> AttendLauncher:
    """Launches short rows and long ones side by side."""
    return AttendLauncher("mixed", problem, platform_of(problem, platform))
