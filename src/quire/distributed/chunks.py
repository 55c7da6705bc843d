"""Parts of a call: some rows of it, as a call of their own, so that the results of one are sent while the next is computed."""

from __future__ import annotations

import torch

from quire.batch import Batch
from quire.errors import ArgumentError, describe
from quire.options import Options


def check_chunks(chunks: int) -> None:
    """Raises unless it is a number of parts."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ArgumentError("chunks", describe(chunks), "an int of 1 or more")


def row_ranges(rows: int, chunks: int) -> list[slice]:
    """`chunks` ranges of about equal size, none of them empty, and at least one."""
    check_chunks(chunks)
    chunks = max(1, min(rows, chunks))
    return [slice(rows * i // chunks, rows * (i + 1) // chunks) for i in range(chunks)]


def can_be_divided(options: Options, batch: Batch) -> bool:
    """Whether rows can be computed in separate calls: a query sees nothing after itself. A tree mask, spans and a non-causal call
    refer to all new tokens of a sequence."""
    return options.causal is True and options.mask is None and batch.spans is None


def rows_of(batch: Batch, rows: slice) -> Batch:
    """The sequences with only these rows as new tokens. Later tokens are not in them, so `kv_lens` ends with the rows; a sequence
    without any of the rows has no new tokens. No value is read on the host."""
    starts = batch.q_starts.clamp(rows.start, rows.stop)
    later = (batch.q_starts[1:] - torch.maximum(starts[1:], batch.q_starts[:-1])).clamp(min=0)
    part = Batch(
        batch.page_table,
        batch.kv_lens - later.to(batch.kv_lens.dtype),
        starts - rows.start,
        max_q_len=None if batch.max_q_len is None else min(batch.max_q_len, rows.stop - rows.start),
        max_kv_len=batch.max_kv_len,
        copies=batch.copies,
        sequences=batch.sequences,
        page_size=batch.page_size,
        shard=batch.shard,
    )
    part.pool_state, part.state_number = batch.pool_state, batch.state_number
    return part
