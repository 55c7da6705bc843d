"""Pages and the sequences that hold them: host bookkeeping that serves the caches of all layers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
import torch

from quire.batch import Batch
from quire.cache.books import DROPPED, FIELDS, ID, LAST, LENGTH, LONGEST, OWN, PAGES, ROW, WIDTH
from quire.cache.change import Change
from quire.cache.copies import Copies, CopyId
from quire.cache.hand_out import HandOut, hand_out
from quire.cache.ids import Ids
from quire.cache.issue import FREE, number_step, numbers_of_today
from quire.cache.release import release
from quire.cache.sequence import Runs, Sequence
from quire.cache.step_table import Clock, Request, StepTable
from quire.cache.tables import Table, bytes_of, runs_of
from quire.errors import ArgumentError, describe

__all__ = ["PagePool", "Sequence", "Usage"]

_SLOTS, _IDS = attrgetter("_slot"), attrgetter("id")
_NO_COPIES: tuple[tuple[int, int], ...] = ()


class Usage(NamedTuple):
    """A pool at a glance."""

    pages: int
    free: int
    shared: int
    """Pages with more than one holder."""
    sequences: int
    tokens: int
    """The lengths of all sequences together; shared tokens count for each."""

    def __str__(self) -> str:
        held = self.pages - self.free
        sequences = f"{self.sequences} sequence{'' if self.sequences == 1 else 's'} of {self.tokens} tokens"
        return f"{held} of {self.pages} pages held ({self.shared} shared) by {sequences}"


class PagePool:
    """Lends pages to sequences and counts who holds them. It stores no keys or values and never looks at a device.

    Every operation is done as a whole or not at all, also if an exception such as KeyboardInterrupt ends it. An operation computes
    all its writes first. If it ends while it makes them, they are undone, at the latest by the next use of the pool.

    A pool can be pickled and deep-copied, with its sequences; the latest step of a copy cannot be rolled back.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device | str = "cpu"):
        for name, value in (("pages", pages), ("page_size", page_size)):
            if not _is_count(value) or value < 1:
                raise ArgumentError(name, describe(value), "an int of 1 or more")
        self.pages, self.page_size, self.device = pages, page_size, torch.device(device)
        self.steps = 0
        """The number of the latest hand-out of tokens. Numbers of steps that failed or were rolled back are not used again."""
        self._free = Ids(room=pages)
        self._holders = numpy.zeros(pages, dtype=numpy.int32)
        self._issue: numpy.ndarray | None = None
        self._shared = self._tokens = 0
        self._live: dict[int, Sequence] = {}
        self._slots = Ids()
        self._books = numpy.zeros((0, FIELDS), dtype=numpy.int64)
        self._tables: dict[int, Table] = {}
        self._ids = self._numbers = self._copied = self._changes = 0
        self._begin()

    def _begin(self) -> None:
        """What a pool has that its copies have not."""
        self._name = uuid.uuid4().hex
        self._clock = Clock()
        self._mirrors: dict[torch.device, torch.Tensor] = {}
        self._last: StepTable | None = None
        self._latest: tuple[int, Change] | None = None
        self._pending: Change | None = None

    def sequence(self) -> Sequence:
        """A new sequence without tokens."""
        self._undo_pending()
        change = Change()
        try:
            sequence = self._new_sequence(change)
            self._commit(change, keeps_step=True)
            return sequence
        except BaseException:
            self._withdraw(change)
            raise

    def step(self, new_tokens: Mapping[Sequence, int]) -> Batch:
        """Extends every sequence by its new tokens (0 is allowed), all or none of them, and returns the batch, one row for
        each sequence in the order given. `quire.write` applies the batch's `copies` before it writes.

        A step with the sequences of the previous one, in the same order, updates that step's page table in place. The batch of a
        pool on the CPU aliases this table: it is valid until the pool's next `step`, `extend`, `trim`, `drop`, `free` or
        `rollback`,
        and the operators raise `StaleBatch` for it after that. `batch.clone()` keeps it. A batch on another device is
        a copy and stays valid."""
        self._undo_pending()
        latest, change = self._latest, Change()
        try:
            request = self._request(new_tokens)
            given, copies = self._plan(request, change)
            number = self._tick(change)
            laid = StepTable(request) if self._last is None else self._last.next(request, given, self.page_size, change)
            change.value(self, "_last", laid)
            self._pending = change
            change.apply()
            batch = laid.batch(self, given, copies, number)
            self._mirror_numbers()
            self._latest = number, change
            self._pending = None
            return batch
        except BaseException:
            self._withdraw(change)
            self._latest = latest
            raise

    def extend(self, sequence: Sequence, new_tokens: int) -> tuple[tuple[int, int], ...]:
        """`step` for one sequence, without a batch. Returns the (source, target) pages to copy before anything is written:
        give them to `copy_pages` of every layer's cache."""
        self._undo_pending()
        change = Change()
        try:
            _, copies = self._plan(self._request({sequence: new_tokens}), change)
            self._commit_tokens(change)
            return copies
        except BaseException:
            self._withdraw(change)
            raise

    def rollback(self, batch: Batch) -> None:
        """Undoes the latest step, whose batch this is: pages, lengths, runs and issue numbers are as before it, and the next step
        gets the same pages. Copies of the step that a cache applied already do no harm, their targets are free again. Nothing else
        may have changed the pool since, `sequence` excepted."""
        self._undo_pending()
        if not isinstance(batch, Batch):
            raise ArgumentError("batch", describe(batch), "the batch of this pool's latest step")
        if batch.step_id is None or self._latest is None or batch.step_id != (self._name, self._latest[0]):
            given = "a batch that no pool made" if batch.step_id is None else "the batch of another step or pool"
            if batch.step_id is not None and self._latest is None and batch.step_id[0] == self._name:
                given = "a batch after which the pool was changed again"
            raise ArgumentError("batch", given, "the batch of this pool's latest step, before any other change")
        try:
            # From here on an interrupt does not stop it: whoever uses the pool next finishes it.
            self._pending = self._latest[1]
            self._undo_pending()
            self._latest = None
        except BaseException:
            self._undo_pending()
            raise

    def trim(self, sequence: Sequence, length: int) -> None:
        """Forgets the tokens from position `length` on, such as drafts that were not accepted."""
        self._undo_pending()
        row = self._row(sequence)
        least = int(row[DROPPED]) * self.page_size
        if not _is_count(length) or not least <= length <= row[LENGTH]:
            dropped = f": positions before {least} were dropped" if least else ""
            raise ArgumentError("length", describe(length), f"{least} to {row[LENGTH]}{dropped}")
        change, after = Change(), row.copy()
        kept = -(-length // self.page_size)
        last = int(row[LAST])
        if row[WIDTH]:
            cells = self._tables[int(row[WIDTH])].cells[row[ROW]]
            last = int(cells[kept - 1]) if kept else -1
            gone = cells[max(kept, row[DROPPED]) : row[PAGES]][::-1].astype(numpy.int64)
            release(self, gone, change)
            change.cells(self._tables[int(row[WIDTH])], "cells", (int(row[ROW]), slice(kept, int(row[PAGES]))), -1)
        filled = length % self.page_size
        if filled and self._issue is not None and self._holders[last] == 1:
            change.cells(self, "_issue", (last, slice(filled, None)), FREE)
        runs = sequence._runs
        while runs and runs[-1][0] >= length:
            runs = runs[:-1]
        after[LENGTH], after[PAGES], after[LAST], after[DROPPED] = length, kept, last, min(int(row[DROPPED]), kept)
        after[OWN] = bool(runs) and runs[-1][1] == sequence.id
        change.value(sequence, "_runs", runs)
        change.value(self, "_tokens", self._tokens + length - int(row[LENGTH]))
        self._update_row(sequence, row, after, change)

    def drop(self, sequence: Sequence, before: int) -> None:
        """Gives back the pages that lie wholly left of position `before`, which a sliding window no longer sees. The sequence
        keeps its length and its positions."""
        self._undo_pending()
        row = self._row(sequence)
        if not _is_count(before) or not 0 <= before <= row[LENGTH]:
            raise ArgumentError("before", describe(before), f"0 to {row[LENGTH]}")
        first, end = int(row[DROPPED]), before // self.page_size
        if end <= first:
            return
        change, after = Change(), row.copy()
        table = self._tables[int(row[WIDTH])]
        release(self, table.cells[row[ROW], first:end].astype(numpy.int64), change)
        change.cells(table, "cells", (int(row[ROW]), slice(first, end)), -1)
        after[DROPPED] = end
        if end == row[PAGES]:
            after[LAST] = -1
        self._update_row(sequence, row, after, change)

    def free(self, *sequences: Sequence) -> None:
        """Gives back all pages of sequences, all of them or none; the handles are refused from now on."""
        self._undo_pending()
        slots = self._slots_of(sequences)
        named = dict(zip(map(_IDS, sequences), sequences))
        if len(named) < len(sequences):
            twice = next(s for i, s in enumerate(sequences) if s in sequences[:i])
            raise ArgumentError("sequences", f"sequence {twice.id} twice", "each sequence once")
        change = Change()
        rows = self._books.take(slots, 0)
        pages = runs_of(self._tables, rows[:, WIDTH], rows[:, ROW], rows[:, DROPPED], rows[:, PAGES])
        if len(pages):
            release(self, pages, change)
        for width, table in self._tables.items():
            returned = rows[rows[:, WIDTH] == width, ROW]
            if len(returned):
                table.rows.exchange(change, 0, returned[::-1])
        empty = numpy.zeros(FIELDS, dtype=numpy.int64)
        empty[ID] = -1
        change.cells(self, "_books", slots, empty, old=rows)
        change.remove(self, "_live", named)
        self._slots.exchange(change, 0, slots[::-1])
        change.value(self, "_tokens", self._tokens - int(rows[:, LENGTH].sum()))
        self._tick(change)
        change.value(self, "_last", None)
        self._commit(change)

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with the same tokens, in the same pages. Whoever first writes into a shared page gets a copy of it."""
        self._undo_pending()
        change = Change()
        try:
            child = self._plan_fork(sequence, change)
            self._commit(change)
            return child
        except BaseException:
            self._withdraw(change)
            raise

    def _plan_fork(self, sequence: Sequence, change: Change) -> Sequence:
        row = self._row(sequence)
        row[OWN] = 0
        if row[WIDTH]:
            table = self._tables[int(row[WIDTH])]
            (at,) = table.next_rows(1).tolist()
            table.rows.exchange(change, 1)
            cells = table.cells[row[ROW]].copy()
            change.cells(table, "cells", at, cells)
            row[ROW] = at
            pages = cells[row[DROPPED] : row[PAGES]]
            holders = self._holders[pages]
            change.cells(self, "_holders", pages, holders + 1, old=holders)
            change.value(self, "_shared", self._shared + int((holders == 1).sum()))
        change.value(self, "_tokens", self._tokens + int(row[LENGTH]))
        return self._new_sequence(change, row, sequence._runs)

    @property
    def free_pages(self) -> int:
        self._undo_pending()
        return self.pages - self._free.used + self._free.count

    @property
    def holders(self) -> torch.Tensor:
        """int32 `[pages]`: how many sequences hold a page; live, not to be written."""
        self._undo_pending()
        return torch.from_numpy(self._holders)

    @property
    def issue(self) -> torch.Tensor:
        """int64 `[pages * page_size]`: the step that handed a slot to its token, -1 for a slot that no token has; live.

        A copied page takes its numbers along, so a slot and its number say together whether a token is where it should be:
        free, trim, reuse and copy-on-write all change the number of a slot whose content they make wrong.

        Numbers are kept from the first time that somebody asks for them, a cache with a ledger for example. Tokens that are older
        get the number of the latest step by then."""
        self._undo_pending()
        if self._issue is None:
            self._issue = numbers_of_today(self)
        return torch.from_numpy(self._issue).view(-1)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The live sequences, oldest first."""
        self._undo_pending()
        return tuple(sorted(self._live.values(), key=_IDS))

    def usage(self) -> Usage:
        self._undo_pending()
        return Usage(self.pages, self.free_pages, self._shared, len(self._live), self._tokens)

    @property
    def nbytes(self) -> int:
        """The memory of its tables and counts, without the handles of its sequences."""
        laid = 0 if self._last is None else self._last.nbytes
        issue = 0 if self._issue is None else self._issue.nbytes
        return self._holders.nbytes + self._free.nbytes + self._books.nbytes + bytes_of(self._tables.values()) + laid + issue

    def issue_on(self, device: torch.device) -> torch.Tensor:
        """`issue` in memory of `device`: its own on the host, elsewhere a mirror that every hand-out brings up to date."""
        if device.type == "cpu":
            return self.issue
        if device not in self._mirrors:
            self._mirrors[device] = self.issue.to(device)
        return self._mirrors[device]

    def __repr__(self) -> str:
        return f"PagePool({self.pages} pages x {self.page_size} slots, {self.free_pages} free, {self.device})"

    def __getstate__(self) -> dict[str, Any]:
        self._undo_pending()
        new = ("_name", "_clock", "_mirrors", "_last", "_latest", "_pending")
        return {name: value for name, value in self.__dict__.items() if name not in new}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # What a sequence asks about itself.

    def is_live(self, sequence: Sequence) -> bool:
        self._undo_pending()
        return bool(self._books[sequence._slot, ID] == sequence.id)

    def length_of(self, sequence: Sequence) -> int:
        return int(self._books[sequence._slot, LENGTH]) if self.is_live(sequence) else 0

    def runs_of(self, sequence: Sequence) -> Runs:
        return sequence._runs if self.is_live(sequence) else []

    def pages_of(self, sequence: Sequence) -> list[int]:
        if not self.is_live(sequence):
            return []
        row = self._books[sequence._slot]
        return self._tables[int(row[WIDTH])].cells[row[ROW], : row[PAGES]].tolist() if row[WIDTH] else []

    def table(self, width: int) -> Table:
        """The table whose rows have `width` columns; a new one if there is none."""
        return self._tables.setdefault(width, Table(width))

    # How an operation ends, one way or the other.

    def _undo_pending(self) -> None:
        """Undoes what an operation left half done."""
        if self._pending is not None:
            self._pending.undo()
            self._pending = None
            self._mirror_numbers()

    def _withdraw(self, change: Change) -> None:
        """Undoes an operation whose result its caller does not get, done or not: what was not done yet is as it was."""
        self._pending = change
        self._undo_pending()

    def _commit(self, change: Change, *, keeps_step: bool = False) -> None:
        """Makes all writes of a change, or none if an exception comes in between. No step can be rolled back after it, unless it
        keeps the latest."""
        if not keeps_step:
            change.value(self, "_latest", None)
        try:
            self._pending = change
            change.apply()
            self._pending = None
        except BaseException:
            self._undo_pending()
            raise

    def _commit_tokens(self, change: Change) -> None:
        """`_commit` of a change that gives tokens or takes them: batches become stale, and the table of the last step is gathered
        again."""
        self._tick(change)
        if self._last is not None:
            change.value(self, "_last", self._last.without_table())
        self._commit(change)
        self._mirror_numbers()

    def _tick(self, change: Change) -> int:
        """A new number for the state of the pool: batches of other states are stale."""
        self._changes += 1
        change.value(self._clock, "now", self._changes)
        return self._changes

    def _mirror_numbers(self) -> None:
        for mirror in self._mirrors.values():
            mirror.copy_(self.issue, non_blocking=True)

    # Requests, and what is planned for them.

    def _request(self, new_tokens: Mapping[Sequence, int]) -> Request:
        """What a step is asked for, checked."""
        if not isinstance(new_tokens, Mapping):
            raise ArgumentError("new_tokens", describe(new_tokens), "a mapping from sequences to counts, such as {sequence: 1}")
        sequences, values, last = tuple(new_tokens), list(new_tokens.values()), self._last
        known = last is not None and sequences == last.request.sequences
        slots = last.request.slots if known and last is not None else self._slots_of(sequences)
        same = known and last is not None and values == last.request.values
        if set(map(type, values)) - {int} or (not same and values and min(values) < 0):
            bad = next(value for value in values if not _is_count(value) or value < 0)
            raise ArgumentError("new_tokens", describe(bad), "an int of 0 or more")
        if same and last is not None:
            return last.request
        if values and max(values) > LONGEST:
            raise ArgumentError("new_tokens", max(values), f"at most {LONGEST} tokens in a sequence")
        return Request(sequences, slots, values)

    def _plan(self, request: Request, change: Change) -> tuple[HandOut, tuple[tuple[int, int], ...]]:
        """Pages, slots and a number for new tokens."""
        given = hand_out(self, request.slots, request.counts, change)
        change.value(self, "_tokens", self._tokens + request.tokens)
        self._numbers = max(self._numbers, self.steps) + 1
        change.value(self, "steps", self._numbers)
        if self._last is None or self._last.table is None or self._last.request is not request:
            # Otherwise the same sequences got tokens in the previous step: their last runs are their own.
            begun = numpy.flatnonzero((given.before[:, OWN] == 0) & (request.counts > 0))
            given.after[begun, OWN] = 1
            for i, start in zip(begun.tolist(), given.before[begun, LENGTH].tolist()):
                sequence = request.sequences[i]
                change.value(sequence, "_runs", [*sequence._runs, (start, sequence.id)])
        if self._issue is not None:
            number_step(self, given, self._numbers, change)
        copies = _NO_COPIES
        if len(given.copied):
            copies = Copies(zip(given.sources.tolist(), given.targets.tolist()), CopyId(self._name, self._copied))
            self._copied += 1
        return given, copies

    def _new_sequence(self, change: Change, row: numpy.ndarray | None = None, runs: Runs | None = None) -> Sequence:
        (slot,) = self._slots.next(1).tolist()
        if slot >= len(self._books):
            books = numpy.zeros((max(64, len(self._books) * 2), FIELDS), dtype=numpy.int64)
            books[: len(self._books)] = self._books
            self._books = books
        row = numpy.zeros(FIELDS, dtype=numpy.int64) if row is None else row
        sequence = Sequence(self, self._ids, slot)
        sequence._runs = [] if runs is None else runs
        self._ids += 1
        row[ID] = sequence.id
        if not row[PAGES]:
            row[LAST] = -1
        self._slots.exchange(change, 1)
        change.cells(self, "_books", slot, row)
        change.add(self, "_live", {sequence.id: sequence})
        return sequence

    def _update_row(self, sequence: Sequence, before: numpy.ndarray, after: numpy.ndarray, change: Change) -> None:
        change.cells(self, "_books", sequence._slot, after, old=before.copy())
        self._commit_tokens(change)

    def _row(self, sequence: Sequence) -> numpy.ndarray:
        """The books' row of a live sequence, as a copy."""
        (slot,) = self._slots_of((sequence,)).tolist()
        return self._books[slot].copy()

    def _slots_of(self, sequences: tuple[Sequence, ...]) -> numpy.ndarray:
        """The books' rows of live sequences of this pool; raises if one is none."""
        if set(map(type, sequences)) - {Sequence}:
            foreign = next(s for s in sequences if type(s) is not Sequence)
            raise ArgumentError("sequence", describe(foreign), "a sequence of this pool")
        slots = numpy.fromiter(map(_SLOTS, sequences), dtype=numpy.int64, count=len(sequences))
        ids = numpy.fromiter(map(_IDS, sequences), dtype=numpy.int64, count=len(sequences))
        elsewhere = [s for s in sequences if s._pool is not self]
        if elsewhere or (self._books[slots, ID] != ids).any():
            bad = elsewhere[0] if elsewhere else sequences[int((self._books[slots, ID] != ids).argmax())]
            whose = "which was freed" if bad._pool is self else "of another pool"
            raise ArgumentError("sequence", f"sequence {bad.id}, {whose}", "a live sequence of this pool")
        return slots


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
