"""From tensors to launches: the constants that calls of a kind are compiled for, and the arguments of each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.triton.arguments import Cache, Constants, Features, New, Out, Query, Room, Rows, Tile
from quire.kernels.triton.attend import attend_kernel
from quire.kernels.triton.balance import balance_kernel
from quire.kernels.triton.combine import combine_kernel
from quire.kernels.triton.target import Target, target_of
from quire.kernels.triton.tuning import SMALL, SMALL_GLUON, Tuning, tuning_for
from quire.options import Options
from quire.problem import dtype_name, is_fp8, power_of_two

BALANCED = 16
"""Query rows that one program balances."""
ANY = 2**31 - 1
"""More new tokens than any row has."""
FAR = 2**30
"""Further than any key: windows reach at most that far in 32 bits."""
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
QUERIES = 64 * 1024
"""Bytes that the queries of a short tile may take: the shared memory of the smallest card."""
IN_REGISTERS = 8 * 1024
"""The same for products in fp32, which no matrix unit computes: each thread holds whole rows of its queries in registers. With 64
rows of 128 NVIDIA's assembler kept 3 to 7 KB of a thread's numbers on the stack."""
WGMMA_WIDTH = 64
"""Elements of 16 bits that Hopper's matrix unit takes from one row of shared memory, in its widest arrangement."""

Pair = tuple[torch.Tensor, torch.Tensor] | None


class Launch(NamedTuple):
    """One launch of one kernel: what it is given, what it is compiled for, and how many programs run."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    grid: tuple[int, int, int]
    warps: int
    stages: int
    early: bool = False
    """Whether it may be launched before the one before it has ended."""
    registers: int | None = None
    """At most so many a thread; None leaves it to the compiler."""

    @property
    def how(self) -> dict[str, Any]:
        """What the compiler is told besides the constants."""
        how: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        how |= {"launch_pdl": True} if self.early else {}
        return how | ({} if self.registers is None else {"maxnreg": self.registers})

    def __call__(self) -> Any:
        return self.kernel[self.grid](*self.arguments, *self.constants, **self.how)


class Plan:
    """What calls of a kind have in common: shapes, strides, types and options, but no tensor."""

    def __init__(
        self,
        kernel: str,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options,
        new: Pair,
        out: torch.Tensor,
        *,
        context_from: int = 1,
        only: tuple[int, int] = (0, ANY),
        zero_padding: bool = False,
        target: Target | None = None,
        tuning: Tuning | None = None,
    ):
        target = target or target_of(q.device)
        # Batch-invariant calls are all of one shape, whatever they hold.
        kernel = "decode" if options.batch_invariant else kernel
        dot, balance = dot_type(q, cache, new)
        widths = tile_widths(cache, dot, target)
        self.row = row = tuning or tuning_for(kernel, target, max(widths), BYTES[dot], cache.format.itemsize)
        self.helpers = 1 if row in (SMALL, SMALL_GLUON) else 4
        """Warps of those who make ready."""
        group = q.shape[1] // cache.kv_heads
        self.few = self._few(kernel, q, batch)
        most = max(16, min(64, (IN_REGISTERS if dot == "fp32" else QUERIES) // (max(widths) * BYTES[dot])))
        rows = most if options.batch_invariant else max(row.rows, min(most, power_of_two(self.few * group)))
        self.programs = max(1, int(target.multiprocessors * row.per_multiprocessor))
        # Plain decodes only: those were measured.
        alone = options.batch_invariant or options.mask is not None or new is not None
        together = 1 if alone else self._together(rows, group, q, cache, batch)
        self.short = short = Tile.of(rows, row.keys, row.stages, True, group, cache.kv_heads, together)
        self.long = None
        if kernel != "decode":
            self.long = Tile.of(row.long_rows, row.long_keys, row.long_stages, False, group, cache.kv_heads)
        self.scale, negate = _scale(q, options)
        left, right = options.sides
        causal = options.causal
        scan = min(1024, max(16, power_of_two(batch.seqs)))
        units = min(q.shape[0], q.shape[0] // short.TOKENS + batch.seqs) * short.HEADS
        many = row.many is not None and units >= row.many * self.programs and self.programs >= short.HEADS
        extras = self.programs if many and self.long is None else 0
        mains = self.programs // short.HEADS
        self.programs += extras
        self.constants = Constants(
            KV_HEADS=cache.kv_heads,
            GROUP=group,
            HEAD_DIM=cache.head_dim,
            V_DIM=cache.v_head_dim,
            K_WIDTH=widths[0],
            V_WIDTH=widths[1],
            PAGE_SIZE=cache.page_size,
            TABLE_STEP=batch.page_table.stride(1),
            Q_DIM=q.stride(2),
            OUT_DIM=out.stride(2) if out.shape[2] else 1,
            NEW_K_DIM=0 if new is None else new[0].stride(2),
            NEW_V_DIM=0 if new is None else new[1].stride(2),
            K_STEPS=page_steps(cache.k_view),
            K_SLOTS=cache.k_view.shape[3],
            K_DIMS=cache.k_view.shape[5],
            V_STEPS=page_steps(cache.v_view),
            V_SLOTS=cache.v_view.shape[3],
            V_DIMS=cache.v_view.shape[5],
            FAR=max(map(_reach, (cache.k_view, cache.v_view))) >= 2**31,
            BYTES=cache.format.itemsize == 1,
            FORMAT=cache.format.name,
            HARDWARE=target.hardware_e4m3fn,
            K_SCALE_STEPS=scale_steps(cache.k_scale),
            V_SCALE_STEPS=scale_steps(cache.v_scale),
            PER_KEY=cache.k_scale is not None and (cache.k_scale.dim() == 3 or new is not None),
            DOT=dot,
            BALANCE=None if not balance else "here" if self.long is None else "before",
            NEGATE=negate,
            CAUSAL=None if isinstance(causal, torch.Tensor) else causal,
            NEW=new is not None,
            TREE=options.mask is not None,
            LEFT=None if left is None else min(left, FAR),
            RIGHT=None if right is None else min(right, FAR),
            CONTEXT_FROM=context_from,
            FEWEST=only[0],
            MOST=only[1],
            SHORT=ANY if self.long is None else short.TOKENS,
            LEAST=row.least,
            OPENING=row.opening,
            EXTRAS=extras,
            MAINS=mains,
            MANY_UNITS=row.many if extras else None,
            INVARIANT=options.batch_invariant,
            Q_FORMAT=dtype_name(q.dtype) if is_fp8(q.dtype) else "float",
            OUT=dtype_name(out.dtype) if is_fp8(out.dtype) else "float",
            OUT_NUMBER=not _on_device(options.out_scale, q.device),
            ZERO_PADDING=zero_padding,
            SCAN=scan,
            MANY=batch.seqs > scan,
            WIDE=self._pieces(q, cache, batch) >= 2**31,
            UNIFORM=target.arch.startswith("sm"),
            EARLY=target.launches_early and not options.batch_invariant,
            BESIDE=kernel == "gluon",
        )
        self.multiprocessors = target.multiprocessors
        self.units = 0
        self.grid = self.programs
        if self.long is not None:
            longest = min(batch.seqs, q.shape[0] // (short.TOKENS + 1))
            self.grid += (q.shape[0] // self.long.TOKENS + longest) * self.long.HEADS
        self.room = self.programs * (2 * short.ROWS * (widths[1] + 2) + 5)
        self.empty = not q.shape[0] or not batch.seqs
        self.asks = any(_on_device(getattr(options, name), q.device) for name in OPTIONAL)

    def settles(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options,
        new: Pair,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> bool:
        """Without a token or a sequence there is nothing to launch, and all rows are padding."""
        if self.empty:
            for mine in (out if self.constants.ZERO_PADDING else None, lse):
                if mine is not None:
                    mine.zero_()
        return self.empty

    def _few(self, kernel: str, q: torch.Tensor, batch: Batch) -> int:
        """New tokens that a tile of a short row should hold. Of a hint no more is looked at than what makes a kind: calls of one
        kind have one plan, whichever of them came first."""
        hint = q.shape[0] if batch.max_q_len is None else min(power_of_two(batch.max_q_len), q.shape[0])
        return 1 if kernel != "decode" else max(1, min(hint, 16))

    def _together(self, rows: int, group: int, q: torch.Tensor, cache: KVCache, batch: Batch) -> int:
        """Key heads that a tile of a short row holds: more than one only if units are more than programs, for what is shared must
        be added up, and would be more."""
        fit = min(self.row.together, rows // (self.few * group))
        units = min(q.shape[0], batch.seqs) * cache.kv_heads
        heads = 1
        while 2 * heads <= fit and cache.kv_heads % (2 * heads) == 0 and units > self.programs * heads:
            heads *= 2
        return heads

    def _pieces(self, q: torch.Tensor, cache: KVCache, batch: Batch) -> int:
        """More work than the batch can hold."""
        keys = batch.page_table.shape[1] * cache.page_size + q.shape[0]
        tiles = keys // self.short.STEP + 3 + self.row.opening
        return (q.shape[0] // self.short.TOKENS + batch.seqs) * self.short.HEADS * tiles

    def tensors(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options,
        new: Pair,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """The tensors of one call in the order of `arguments`. Workspace comes from torch's allocator: it belongs to this call and
        its stream."""
        room = torch.empty(self.room, dtype=torch.float32, device=q.device)
        found = [out, room] if lse is None else [out, lse, room]
        if self.units:
            found.append(torch.empty(self.units, dtype=torch.int32, device=q.device))
        found.append(q)
        if self.constants.BALANCE == "before":
            found.append(torch.empty(q.shape, dtype=torch.float16, device=q.device))
            found.append(torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
        found += (cache.k, cache.v)
        if cache.k_scale is not None and cache.v_scale is not None:
            found += (cache.k_scale, cache.v_scale)
        found += (batch.page_table, batch.kv_lens, batch.q_starts)
        if new is not None:
            found += new
        if self.asks:
            found += [value for name in OPTIONAL if _on_device(value := getattr(options, name), q.device)]
        return found

    def arguments(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options,
        new: Pair,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        at: Callable[[torch.Tensor], Any],
    ) -> tuple[Any, ...]:
        """The arguments of one call; `at` says what stands for a tensor."""
        take = map(at, self.tensors(q, cache, batch, options, new, out, lse)).__next__

        def maybe(value: object) -> Any:
            return take() if _on_device(value, q.device) else None

        where = Out(take(), out.stride(0), out.stride(1), None if lse is None else take())
        room = Room(take(), self.programs, take() if self.units else None)
        query: Any = take()
        exponents = None
        if self.constants.BALANCE == "before":
            query, exponents = (query, take()), take()
        k, v = take(), take()
        k_scale, v_scale = (None, None) if cache.k_scale is None else (take(), take())
        pages = Cache(k, v, k_scale, v_scale, cache.pages)
        table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
        index = (take(), table.stride(0), table.shape[1], take(), kv_lens.stride(0), take(), q_starts.stride(0))
        fresh = NO_NEW
        if new is not None:
            fresh = New(take(), new[0].stride(0), new[0].stride(1), take(), new[1].stride(0), new[1].stride(1))
        causal, alibi, sinks, mask, positions, q_scale, out_scale = (maybe(getattr(options, name)) for name in OPTIONAL)
        if options.out_scale is not None and out_scale is None:
            out_scale = float(options.out_scale)
        features = Features(
            scale=self.scale,
            softcap=options.softcap,
            alibi=alibi,
            alibi_step=_step(options.alibi),
            sinks=sinks,
            sinks_step=_step(options.sinks),
            mask=mask,
            mask_token=_step(options.mask),
            mask_column=None if options.mask is None else options.mask.stride(1),
            positions=positions,
            positions_step=_step(options.positions),
            q_scale=q_scale,
            out_scale=out_scale,
        )
        rows = Rows(*index, causal, batch.seqs, q.shape[0])
        return where, room, Query(query, q.stride(0), q.stride(1), exponents), pages, rows, fresh, features

    def launches(self, arguments: tuple[Any, ...]) -> Iterator[Launch]:
        """The launches of one call, in order."""
        before, arguments, constants = self.balanced(arguments)
        yield from before
        yield self.shared_out(arguments, constants)
        yield from self.combined(arguments, constants)

    def balanced(self, arguments: tuple[Any, ...]) -> tuple[list[Launch], tuple[Any, ...], Constants]:
        """The launch that balances queries, if they are balanced beforehand, and what the others are then given."""
        out, room, query, cache, rows, new, features = arguments
        constants = self.constants
        if constants.BALANCE != "before":
            return [], arguments, constants
        heads = constants.KV_HEADS * constants.GROUP
        ready = Query(query.at[1], heads * constants.HEAD_DIM, constants.HEAD_DIM, query.exponents)
        launch = Launch(
            balance_kernel,
            (ready.at, ready.exponents, query._replace(at=query.at[0], exponents=None), rows.tokens * heads),
            (BALANCED, constants),
            (-(-rows.tokens * heads // BALANCED), 1, 1),
            self.helpers,
            1,
        )
        return [launch], (out, room, ready, cache, rows, new, features), constants._replace(Q_DIM=1)

    def shared_out(self, arguments: tuple[Any, ...], constants: Constants) -> Launch:
        """The launch that computes."""
        row = self.row
        stages = max(row.stages, row.long_stages)
        tiles = (self.short, self.long, constants)
        return Launch(attend_kernel, arguments, tiles, (self.grid, 1, 1), row.warps, stages, registers=row.registers)

    def combined(self, arguments: tuple[Any, ...], constants: Constants) -> Iterator[Launch]:
        """The launch that combines what was shared, if anything is."""
        out, room, _, cache, _, _, features = arguments
        if not constants.INVARIANT:
            grid = (self.programs, min(self.short.ROWS, self.few * constants.GROUP * self.short.TOGETHER), 1)
            yield Launch(combine_kernel, (out, room, cache, features), (self.short, constants), grid, 1, 1, constants.EARLY)


NO_NEW = New(*[None] * 6)
OPTIONAL = ("causal", "alibi", "sinks", "mask", "positions", "q_scale", "out_scale")
"""Options that may be tensors, in the order in which they are passed."""


def launches(
    kernel: str,
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: Pair,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    **how: Any,
) -> list[Launch]:
    """The launches of a call. No tensor is read: those of torch's meta device will do."""
    return launches_of(Plan(kernel, q, cache, batch, options, new, out, **how), q, cache, batch, options, new, out, lse)


def launches_of(plan: Plan, *call: Any) -> list[Launch]:
    """The launches of a call that is planned."""
    return [] if plan.settles(*call) else list(plan.launches(plan.arguments(*call, at=as_bytes)))


def dot_type(q: torch.Tensor, cache: KVCache, new: Pair) -> tuple[str, bool]:
    """The type of the products, and whether queries are balanced for it.

    Whatever has eight bits fits fp16, and hardware turns it into fp16 sooner than into bf16. Two kinds of floats meet in fp32."""
    floats = {dtype_name(t.dtype) for t in (q, cache.k, *(new or ())) if t.dtype.itemsize > 1}
    if floats == {"bf16"} and cache.format.itemsize == 1 and new is None and cache.scale_kind != "token":
        return "fp16", True
    if len(floats) > 1 or "fp32" in floats:
        return "fp32", False
    return next(iter(floats), "fp16"), False


def tile_widths(cache: KVCache, dot: str, target: Target) -> tuple[int, int]:
    """head_dim and v_head_dim as tiles are wide: powers of two, 16 at least.

    Hopper's matrix unit reads keys and values from shared memory in one of three arrangements, by the width of a row. On an H200
    with Triton 3.6 products were wrong whenever rows of values were narrower than the arrangement of the keys (widths 32/16, 64/16
    and 128/16), and right with the same widths, or with wider values, in 100 other random calls: so values are as wide there."""
    k_width, v_width = (max(16, power_of_two(dim)) for dim in (cache.head_dim, cache.v_head_dim))
    if target.arch == "sm90" and dot != "fp32":
        v_width = max(v_width, min(k_width, WGMMA_WIDTH))
    return k_width, v_width


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Eight-bit tensors enter as bytes: not every target knows every format."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _scale(q: torch.Tensor, options: Options) -> tuple[float, bool]:
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    if options.q_scale is not None and not _on_device(options.q_scale, q.device):
        scale *= float(options.q_scale)
    # Not 0: what is hidden must stay at minus infinity.
    return max(abs(scale) * math.log2(math.e), 2.0**-126), scale < 0


def _step(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.stride(0)


def _on_device(value: object, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def scale_steps(scale: torch.Tensor | None) -> tuple[int, ...] | None:
    """Strides of a scale by page, slot and head: 0 where one serves all."""
    return None if scale is None else (0,) * (3 - scale.dim()) + scale.stride()


def page_steps(view: torch.Tensor) -> tuple[int, ...]:
    """Strides of pages. An axis of length 1 counts 0: what is multiplied with it then vanishes, and the compiler sees what is
    aligned."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(view.stride(), view.shape))


def _reach(view: torch.Tensor) -> int:
    """The offset of the last element."""
    return sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))


def launch_decode(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: Pair,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    **how: Any,
) -> None:
    """Every row is taken for a short one: its keys are shared out."""
    for launch in launches("decode", q, cache, batch, options, new, out, lse, **how):
        launch()


def launch_mixed(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    options: Options,
    new: Pair,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    **how: Any,
) -> None:
    """Short rows and long ones, side by side."""
    for launch in launches("mixed", q, cache, batch, options, new, out, lse, **how):
        launch()
