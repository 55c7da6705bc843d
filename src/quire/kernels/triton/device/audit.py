"""Checks a batch against the ledger. One program takes a chunk of the keys of one sequence, finds the slots of those that the
sequence needs from the cache, and counts the slots that do not hold their token. A second launch, of one program and zero chunks,
records the first of them for the report.

The recorded one does not depend on the order of programs: packed into a number, the lowest sequence and key is the largest.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.triton.device.arguments import Number, Pointer, Stride
from quire.kernels.triton.device.features import is_in_some_span, keys_before, lowest_position, position_of, window_begin

LARGEST = tl.constexpr(2**63 - 1)
SPANS_AT_ONCE = tl.constexpr(8)
ENTRIES_AT_ONCE = tl.constexpr(8)


class LedgerTensors(NamedTuple):
    """The ledger: for each slot the position it holds, its issue number when it was written, and its issue number now."""

    position: Pointer
    issue: Pointer
    now: Pointer
    pages: Number


class TreePositions(NamedTuple):
    """Positions of new tokens under a tree mask with a window, or None."""

    positions: Pointer
    positions_step: Stride


class AuditConstants(NamedTuple):
    """What the kernel is compiled for: which positions a sequence needs."""

    POSITIONS: int
    PAGE_SIZE: int
    LEFT: int | None
    """Visible keys to the left of a query; None is unbounded."""
    CONTEXT_FROM: int
    """Sequences with at least so many new tokens have only their context in the cache."""
    MIN_Q_LEN: int
    MAX_Q_LEN: int
    """Sequences with other numbers of new tokens are not checked."""
    KV_HEADS: int
    """This and the next two are for selections alone."""
    RIGHT: int | None
    """Visible keys to the right of a query; None is unbounded."""
    CAUSAL: bool | None
    """None: `BatchTensors.causal` has it per sequence."""


class Narrowed(NamedTuple):
    """What narrows the keys that a batch needs. These are numbers, so that a layer of which only some batches have spans or a
    selection has one compiled audit. The tensors of what a batch does not have are never read."""

    by_spans: Number
    """1 if the batch has spans, else 0."""
    by_positions: Number
    """The same for selected positions, and for selected columns."""
    by_columns: Number


@triton.jit
def audit_kernel(found, marks, batch, tree, narrowed, chunks, N: tl.constexpr):
    if chunks > 0:
        count_wrong(found, marks, batch, tree, narrowed, chunks, N)
    else:
        record_first(found, marks, batch, N)


@triton.jit
def count_wrong(found, marks, batch, tree, narrowed, chunks, N: tl.constexpr):
    """Counts the keys of one chunk whose slots do not hold their token."""
    seq = (tl.program_id(0) // chunks).to(tl.int64)
    key = (tl.program_id(0) % chunks).to(tl.int64) * N.POSITIONS + tl.arange(0, N.POSITIONS)
    first, end = needed_of(batch, tree, seq, N)
    needed = (key >= first) & (key < end)
    if narrowed.by_spans != 0:
        start = tl.load(batch.q_starts + seq * batch.q_starts_step).to(tl.int64)
        stop = tl.load(batch.q_starts + (seq + 1) * batch.q_starts_step).to(tl.int64)
        needed &= is_in_some_span(batch, start, stop, position_of(batch, key), SPANS_AT_ONCE)
    if narrowed.by_positions + narrowed.by_columns != 0:
        needed &= is_selected_by_some(batch, narrowed, seq, key, needed, N)
    slot, needed = slot_of(marks, batch, seq, key, needed, N)
    _, _, _, wrong = marks_of(marks, slot, position_of(batch, key), needed)
    count = tl.sum(wrong.to(tl.int32))
    if count > 0:
        tl.atomic_add(found, count.to(tl.int64))
        tl.atomic_max(found + 1, tl.max(tl.where(wrong, LARGEST - (seq << 32) - key, 0)))


@triton.jit
def needed_of(batch, tree, seq, N: tl.constexpr):
    """The first key that a sequence needs from the cache, and the one after the last."""
    start = tl.load(batch.q_starts + seq * batch.q_starts_step).to(tl.int64)
    stop = tl.load(batch.q_starts + (seq + 1) * batch.q_starts_step).to(tl.int64)
    kv_len = tl.load(batch.kv_lens + seq * batch.kv_lens_step).to(tl.int64)
    q_len = stop - start
    context = kv_len - q_len
    first = context * 0
    if N.LEFT is not None:
        query = context
        if tree.positions is not None:
            query = lowest_position(tree, start, stop, batch.tokens, LARGEST, N.POSITIONS)
        first = window_begin(query, N)
    end = tl.where(q_len >= N.CONTEXT_FROM, context, kv_len)
    looked_at = (q_len > 0) & (q_len >= N.MIN_Q_LEN) & (q_len <= N.MAX_Q_LEN)
    return keys_before(batch, first), keys_before(batch, tl.where(looked_at, end, 0))


@triton.jit
def is_selected_by_some(batch, narrowed, seq, key, needed, N: tl.constexpr):
    """Which keys some query of a sequence selects and sees. There is no shard: a key is its position."""
    start = tl.load(batch.q_starts + seq * batch.q_starts_step).to(tl.int64)
    stop = tl.load(batch.q_starts + (seq + 1) * batch.q_starts_step).to(tl.int64)
    by_positions = narrowed.by_positions != 0
    first = tl.where(by_positions, start, seq)
    rows = tl.where(by_positions, (tl.minimum(stop, batch.tokens) - tl.maximum(start, 0)).to(tl.int32), 1)
    rows *= tl.max(needed.to(tl.int32))  # nothing is read for a chunk of which no key is needed
    wanted = tl.where(by_positions, key, key // N.PAGE_SIZE)
    # Entries that all heads share have no stride.
    heads = tl.where(batch.select_head == 0, 1, N.KV_HEADS)
    seen = key < 0
    for i in range(rows * heads):
        row = first + i // heads
        here = key < 0
        for base in range(0, batch.select_count, ENTRIES_AT_ONCE):
            entry = base + tl.arange(0, ENTRIES_AT_ONCE)
            at = row * batch.select_row + (i % heads) * batch.select_head + entry.to(tl.int64) * batch.select_step
            value = tl.load(batch.select + at, mask=entry < batch.select_count, other=-1)
            here |= tl.max((wanted[:, None] == value[None, :]).to(tl.int32), 1) > 0
        if by_positions:
            here &= is_seen_by(batch, seq, row, key, N)
        seen |= here
    return seen


@triton.jit
def is_seen_by(batch, seq, token, key, N: tl.constexpr):
    """Which keys causality and window show to a new token."""
    stop = tl.load(batch.q_starts + (seq + 1) * batch.q_starts_step).to(tl.int64)
    own = tl.load(batch.kv_lens + seq * batch.kv_lens_step).to(tl.int64) - stop + token
    seen = key >= 0
    if N.CAUSAL is None:
        seen &= (key <= own) | (tl.load(batch.causal + seq * batch.causal_step) == 0)
    elif N.CAUSAL:
        seen &= key <= own
    if N.LEFT is not None:
        seen &= key >= own - N.LEFT
    if N.RIGHT is not None:
        seen &= key <= own + N.RIGHT
    return seen


@triton.jit
def slot_of(marks, batch, seq, key, needed, N: tl.constexpr):
    """The slot of each key, and whether it has one. Missing pages are checked by another rule."""
    column = key // N.PAGE_SIZE
    needed &= column < batch.table_width
    page = tl.load(batch.page_table + seq * batch.table_row + column * batch.table_step, mask=needed, other=-1).to(tl.int64)
    needed &= (page >= 0) & (page < marks.pages)
    return tl.where(needed, page * N.PAGE_SIZE + key % N.PAGE_SIZE, 0), needed


@triton.jit
def marks_of(marks, slot, position, needed):
    """The entries of slots, and which needed slots do not hold the token of their position."""
    held = tl.load(marks.position + slot, mask=needed, other=0).to(tl.int64)
    issue = tl.load(marks.issue + slot, mask=needed, other=0)
    now = tl.load(marks.now + slot, mask=needed, other=0)
    # Issue numbers below 0 belong to slots that were free when they were written, or freed since. Position -2 is unknown.
    return held, issue, now, needed & (((held != position) & (held != -2)) | (issue != now) | (issue < 0))


@triton.jit
def record_first(found, marks, batch, N: tl.constexpr):
    """Records the token that `count_wrong` has packed, unless an earlier call has recorded one."""
    packed = tl.load(found + 1)
    kept = tl.load(found + 2)
    seq = (LARGEST - packed) >> 32
    key = (LARGEST - packed) & 0xFFFFFFFF
    position = position_of(batch, key)
    # A call on another stream may have packed it: then it may be right in this batch, or not exist.
    slot, there = slot_of(marks, batch, seq, key, (packed > 0) & (kept == 0) & (seq < batch.seqs), N)
    held, issue, now, wrong = marks_of(marks, slot, position, there)
    tl.store(found + 2, 1, mask=wrong)
    tl.store(found + 3, seq, mask=wrong)
    tl.store(found + 4, position, mask=wrong)
    tl.store(found + 5, slot, mask=wrong)
    tl.store(found + 6, held, mask=wrong)
    tl.store(found + 7, issue, mask=wrong)
    tl.store(found + 8, now, mask=wrong)
