"""The page table of a pool's latest step. The next step with the same sequences updates it in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch

from quire.batch import Batch
from quire.cache.allocation import Allocation
from quire.cache.page_rows import gather
from quire.cache.prefixes import Prefixes
from quire.cache.sequence import Sequence
from quire.cache.sequence_record import LENGTH, LONGEST, PAGES, ROW, WIDTH
from quire.cache.shard import keys_of
from quire.cache.transaction import Transaction
from quire.errors import ArgumentError

if TYPE_CHECKING:
    from quire.cache.pool import PagePool


class StepRequest:
    """The arguments of one step: sequences, the indices of their records, and the number of new tokens of each."""

    __slots__ = ("counts", "max_q_len", "q_starts", "sequences", "slots", "tokens", "values")

    def __init__(self, sequences: tuple[Sequence, ...], slots: numpy.ndarray | slice, values: list[int]):
        if isinstance(slots, numpy.ndarray) and len(slots) and (numpy.diff(slots) == 1).all():
            slots = slice(int(slots[0]), int(slots[-1]) + 1)
        self.sequences, self.slots, self.values = sequences, slots, values
        self.counts = numpy.array(values, dtype=numpy.int64)
        self.max_q_len = max(values, default=0)
        self.tokens = int(self.counts.sum())
        if self.tokens > LONGEST:
            raise ArgumentError("new_tokens", f"{self.tokens} in all", f"at most {LONGEST} tokens in a step")
        self.q_starts = numpy.zeros(len(values) + 1, dtype=numpy.int32)
        numpy.cumsum(self.counts, out=self.q_starts[1:])


class StepTable:
    """A step's request and its page table `[sequences, columns]`, None until it is gathered. Columns for later steps hold -1."""

    __slots__ = ("_prefixes", "_view", "request", "table")

    def __init__(
        self,
        request: StepRequest,
        table: numpy.ndarray | None = None,
        view: torch.Tensor | None = None,
        prefixes: Prefixes | None = None,
    ):
        self.request, self.table, self._view = request, table, view
        self._prefixes = prefixes
        """What the sequences share, if a step with this table searched it."""

    @property
    def nbytes(self) -> int:
        return 0 if self.table is None else self.table.nbytes

    def without_table(self) -> StepTable:
        return StepTable(self.request)

    def next(self, request: StepRequest, given: Allocation, pool: PagePool, transaction: Transaction) -> StepTable:
        """The table of the next step. If it has the same sequences and enough columns, the new pages are planned as writes to this
        one."""
        table = self.table
        if table is None or request.sequences != self.request.sequences:
            return StepTable(request)
        if -(-keys_of(pool.shard, given.longest) // pool.page_size) > table.shape[1]:
            return StepTable(request)
        if len(given.copied):
            transaction.set_cells(
                self, "table", (given.copied, given.before[given.copied, PAGES] - 1), given.targets, old=given.sources
            )
        if given.runs is not None:
            transaction.set_cells(self, "table", given.runs.cells_in(given.grown), given.pages.reshape(given.runs.shape), old=-1)
        return StepTable(request, table, self._view, self._prefixes)

    def batch(
        self, pool: PagePool, given: Allocation, copies: tuple[tuple[int, int], ...], number: int, share: bool = False
    ) -> Batch:
        """The batch of the step, after its transaction was applied; with `share` it has the prefixes of its sequences."""
        after, request = given.after, self.request
        width = max(-(-keys_of(pool.shard, given.longest) // pool.page_size), 1)
        if self.table is None:
            self.table = gather(pool._tables, after[:, WIDTH], after[:, ROW], width + width // 8 + 8)
        if self._view is None or self._view.shape[1] != width:
            self._view = torch.from_numpy(self.table)[:, :width]
        batch = Batch(
            self._view,
            torch.from_numpy(after[:, LENGTH].astype(numpy.int32)),
            torch.from_numpy(request.q_starts.copy()),
            max_q_len=request.max_q_len,
            max_kv_len=given.longest,
            copies=copies,
            sequences=request.sequences,
            page_size=pool.page_size,
            shard=pool.shard,
        )
        if share:
            batch.prefixes = self._shared(pool, given, width).clone()
        batch.step_id, batch._tokens = (pool._name, number), request.tokens
        if pool.device.type != "cpu":
            return batch.to(pool.device)
        batch.pool_state, batch.state_number = pool._state, number
        return batch

    def _shared(self, pool: PagePool, given: Allocation, width: int) -> Prefixes:
        """The prefixes of the sequences. As long as steps update one table, they stay the same: the pages that a prefix may have
        were full before, and a page that a step fills has one holder when it is written."""
        assert self.table is not None
        if self._prefixes is None:
            context = keys_of(pool.shard, given.after[:, LENGTH] - self.request.counts)
            self._prefixes = Prefixes.of_table(self.table[:, :width], context, pool.page_size)
        return self._prefixes
