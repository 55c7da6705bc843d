"""The ledger's check. One program takes a stretch of one row's positions, finds the slots of those that the row needs from the
cache, and counts the ones that do not hold their token; then a single program of a second launch, of no stretches, keeps the first
of them, for a report.

Which one is kept does not depend on the order of programs: packed as a number, the lowest row and position is the largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.arguments import Rows
from quire.kernels.triton.launcher import At, Launch, Launcher, platform_of
from quire.kernels.triton.program import Program
from quire.kernels.triton.tuning import AUDIT, Portion
from quire.platform import Platform
from quire.problem import ANY, Extent, Problem

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
    LEFT: int | None
    """Keys that a query sees to its left; None is all of them."""
    CONTEXT_FROM: int
    """Rows with so many new tokens or more have only their context in the cache."""
    FEWEST: int
    MOST: int
    """Rows with other numbers of new tokens are not looked at."""


@triton.jit
def audit_kernel(found, marks, rows, tree, stretches, N: tl.constexpr):
    if stretches > 0:
        count_wrong(found, marks, rows, tree, stretches, N)
    else:
        keep_first(found, marks, rows, N)


@triton.jit
def count_wrong(found, marks, rows, tree, stretches, N: tl.constexpr):
    """Counts the positions of one stretch of a row that do not hold their token."""
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
    page = tl.load(rows.page_table + row * rows.table_row + column * rows.table_step, mask=needed, other=-1).to(tl.int64)
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
def keep_first(found, marks, rows, N: tl.constexpr):
    """Keeps the token that `count_wrong` packed, unless one is kept already: of several calls, the first that found any."""
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


class AuditLauncher(Launcher):
    """Launches the check of a ledger."""

    def __init__(self, problem: Problem, platform: Platform, portion: Portion = AUDIT):
        super().__init__(problem, platform)
        # Its tensors are read number by number: one kernel serves any memory.
        self.units, self.portion = None, portion
        left, _ = problem.window
        # Which new tokens are seen in a tree, its mask alone knows: they are left out.
        context_from = 0 if problem.mask else ANY if problem.form == "full" else problem.context_from
        needs = Needs(
            POSITIONS=portion.size,
            PAGE_SIZE=problem.page_size,
            LEFT=None if left is None else min(left, ANY),
            CONTEXT_FROM=context_from,
            FEWEST=problem.only[0],
            MOST=problem.only[1],
        )
        self.program = Program(audit_kernel, (None, Marks, Rows, Tree, None), (needs,), None, portion.warps)

    def launches(self, call: Any, extent: Extent, at: At) -> Iterator[Launch]:
        cache, batch, ledger, positions = call.cache, call.batch, call.cache.ledger, call.options.positions
        table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
        stretches = -(-table.shape[1] * cache.page_size // self.portion.size)
        programs = extent.seqs * stretches
        if not extent.tokens or not programs:
            return
        marks = (at(ledger.position), at(ledger.issue), at(ledger.current), cache.pages)
        rows = (
            at(table), *table.stride(), table.shape[1], at(kv_lens), *kv_lens.stride(), at(q_starts), *q_starts.stride(),
            None, None, extent.seqs, extent.tokens, ANY,
        )  # fmt: skip
        tree = (None, None) if positions is None else (at(positions), positions.stride(0))
        found = at(ledger.violations)
        yield self.program, (programs, 1, 1), (found, marks, rows, tree, stretches), False
        yield self.program, (1, 1, 1), (found, marks, rows, tree, 0), False


def launcher(problem: Problem, platform: Platform) -> AuditLauncher:
    """Counts the tokens that an attend needs from the cache and that are not there into the ledger's `violations`."""
    return AuditLauncher(problem, platform_of(problem, platform))
