"""The ledger's check. One program takes a stretch of one row's positions, finds the slots of those that the row needs from the
cache, and counts the ones that do not hold their token; then a single program keeps the first of them, for a report.

Which one is kept does not depend on the order of programs: packed as a number, the lowest row and position is the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.kernels.triton.arguments import Rows
from quire.kernels.triton.bind import Bound
from quire.kernels.triton.launch import ANY, Launch, Pair, as_bytes
from quire.kernels.triton.tuning import AUDIT, Portion
from quire.options import Options

LARGEST = tl.constexpr(2**63 - 1)


class Marks(NamedTuple):
    """The ledger: for each slot the position it holds, the number it had when it was written, and its number now."""

    position: Any
    issue: Any
    now: Any
    pages: Any


class Tree(NamedTuple):
    """Positions of new tokens under a tree mask with a window, or None."""

    positions: Any
    positions_step: Any


class Needs(NamedTuple):
    """What the kernel is compiled for: which positions a row needs."""

    POSITIONS: int
    PAGE_SIZE: int
    TABLE_STEP: int
    LEFT: int | None
    """Keys that a query sees to its left; None is all of them."""
    CONTEXT_FROM: int
    """Rows with so many new tokens or more have only their context in the cache."""
    FEWEST: int
    MOST: int
    """Rows with other numbers of new tokens are not looked at."""


@triton.jit
def audit_kernel(found, marks, rows, tree, stretches, N: tl.constexpr):
    row = (tl.program_id(0) // stretches).to(tl.int64)
    position = (tl.program_id(0) % stretches).to(tl.int64) * N.POSITIONS + tl.arange(0, N.POSITIONS)
    first, end = needed_of(rows, tree, row, N)
    needed = (position >= first) & (position < end)
    slot, needed = slot_of(marks, rows, row, position, needed, N)
    _, _, _, wrong = marks_of(marks, slot, position, needed)
    count = tl.sum(wrong.to(tl.int32))
    if count > 0:
        tl.atomic_add(found, count.to(tl.int64))
        tl.atomic_max(found + 1, tl.max(tl.where(wrong, LARGEST - (row << 32) - position, 0)))


@triton.jit
def needed_of(rows, tree, row, N: tl.constexpr):
    """The first position that a row needs from the cache, and the one behind the last."""
    start = tl.load(rows.q_starts + row * rows.q_starts_step).to(tl.int64)
    stop = tl.load(rows.q_starts + (row + 1) * rows.q_starts_step).to(tl.int64)
    kv_len = tl.load(rows.kv_lens + row * rows.kv_lens_step).to(tl.int64)
    q_len = stop - start
    context = kv_len - q_len
    first = context * 0
    if N.LEFT is not None:
        query = context
        if tree.positions is not None:
            query = context * 0 + LARGEST
            for base in range(0, tl.minimum(q_len, rows.tokens).to(tl.int32), N.POSITIONS):
                token = start + base + tl.arange(0, N.POSITIONS)
                inside = (token >= 0) & (token < stop) & (token < rows.tokens)
                at = tl.load(tree.positions + token * tree.positions_step, mask=inside, other=0).to(tl.int64)
                query = tl.minimum(query, tl.min(tl.where(inside, at, LARGEST)))
        first = tl.maximum(query - N.LEFT, 0)
    end = tl.where(q_len >= N.CONTEXT_FROM, context, kv_len)
    looked_at = (q_len > 0) & (q_len >= N.FEWEST) & (q_len <= N.MOST)
    return first, tl.where(looked_at, end, 0)


@triton.jit
def slot_of(marks, rows, row, position, needed, N: tl.constexpr):
    """The slot of each position, and whether it has one: what the table leaves out is another rule's business."""
    column = position // N.PAGE_SIZE
    needed &= column < rows.table_width
    page = tl.load(rows.page_table + row * rows.table_row + column * N.TABLE_STEP, mask=needed, other=-1).to(tl.int64)
    needed &= (page >= 0) & (page < marks.pages)
    return tl.where(needed, page * N.PAGE_SIZE + position % N.PAGE_SIZE, 0), needed


@triton.jit
def marks_of(marks, slot, position, needed):
    """What the ledger says about slots, and which of those that are needed do not hold their position's token."""
    held = tl.load(marks.position + slot, mask=needed, other=0).to(tl.int64)
    issue = tl.load(marks.issue + slot, mask=needed, other=0)
    now = tl.load(marks.now + slot, mask=needed, other=0)
    # Numbers below 0 are of slots that were free when they were written, or given back since. Position -2 is unknown.
    return held, issue, now, needed & (((held != position) & (held != -2)) | (issue != now) | (issue < 0))


@triton.jit
def keep_kernel(found, marks, rows, N: tl.constexpr):
    """Keeps the token that `audit_kernel` packed, unless one is kept already: of several calls, the first that found any."""
    packed = tl.load(found + 1)
    kept = tl.load(found + 2)
    row = (LARGEST - packed) >> 32
    position = (LARGEST - packed) & 0xFFFFFFFF
    # Another stream's call may have packed it: then it need not be wrong in this batch, or there at all.
    slot, there = slot_of(marks, rows, row, position, (packed > 0) & (kept == 0) & (row < rows.seqs), N)
    held, issue, now, wrong = marks_of(marks, slot, position, there)
    tl.store(found + 2, 1, mask=wrong)
    tl.store(found + 3, row, mask=wrong)
    tl.store(found + 4, position, mask=wrong)
    tl.store(found + 5, slot, mask=wrong)
    tl.store(found + 6, held, mask=wrong)
    tl.store(found + 7, issue, mask=wrong)
    tl.store(found + 8, now, mask=wrong)


class Plan:
    """What the checks of calls of a kind have in common."""

    def __init__(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        options: Options,
        new: Pair,
        *,
        context_from: int = 1,
        only: tuple[int, int] = (0, ANY),
        zero_padding: bool = False,
        portion: Portion = AUDIT,
    ):
        self.portion = portion
        left, _ = options.sides
        # Which new tokens somebody sees in a tree, its mask alone knows: they are left out.
        context_from = 0 if options.mask is not None else ANY if new is None else context_from
        self.constants = Needs(
            POSITIONS=portion.size,
            PAGE_SIZE=cache.page_size,
            TABLE_STEP=batch.page_table.stride(1),
            LEFT=None if left is None else min(left, ANY),
            CONTEXT_FROM=context_from,
            FEWEST=only[0],
            MOST=only[1],
        )
        self.stretches = -(-batch.page_table.shape[1] * cache.page_size // portion.size)
        self.grid = (batch.seqs * self.stretches, 1, 1)
        self.empty = not q.shape[0] or not self.grid[0]

    def settles(self, *call: Any) -> bool:
        return self.empty

    def tensors(self, *call: Any) -> list[torch.Tensor]:
        """The tensors of one check in the order of `arguments`."""
        found: list[torch.Tensor] = []
        self.arguments(*call, at=found.append)
        return found

    def arguments(self, *call: Any, at: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
        """The arguments of one check of q, cache, batch, options, new; `at` says what stands for a tensor."""
        q, cache, batch, options, _ = call
        ledger = cache.ledger
        table, kv_lens, q_starts, positions = batch.page_table, batch.kv_lens, batch.q_starts, options.positions
        return (
            at(ledger.violations),
            Marks(at(ledger.position), at(ledger.issue), at(ledger.current), cache.pages),
            Rows(
                *(at(table), table.stride(0), table.shape[1], at(kv_lens), kv_lens.stride(0), at(q_starts), q_starts.stride(0)),
                *(None, batch.seqs, q.shape[0]),
            ),
            Tree(None, None) if positions is None else Tree(at(positions), positions.stride(0)),
        )

    def launches(self, arguments: tuple[Any, ...]) -> list[Launch]:
        found, marks, rows, tree = arguments
        return [
            Launch(audit_kernel, (found, marks, rows, tree, self.stretches), (self.constants,), self.grid, self.portion.warps, 1),
            Launch(keep_kernel, (found, marks, rows), (self.constants,), (1, 1, 1), 1, 1),
        ]


def launches(q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, new: Pair, **how: Any) -> list[Launch]:
    """The launches of a check, or none if no row needs anything. No tensor is read."""
    plan = Plan(q, cache, batch, options, new, **how)
    return [] if plan.empty else plan.launches(plan.arguments(q, cache, batch, options, new, at=as_bytes))


def bind(q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, new: Pair, **how: Any) -> Callable[..., None]:
    """A launcher for checks of calls like this one."""
    return Bound(Plan(q, cache, batch, options, new, **how))


def launch(q: torch.Tensor, cache: KVCache, batch: Batch, options: Options, new: Pair, **how: Any) -> None:
    """Counts the tokens that an attend needs from the cache and that are not there into the ledger's `violations`."""
    for one in launches(q, cache, batch, options, new, **how):
        one()
