"""The page allocator: pages, the sequences that hold them, and the batch of each step. It works on the host, for all layers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
import torch

from quire.batch import Batch
from quire.cache.allocation import Allocation, plan_allocation
from quire.cache.copies import Copies, CopyId
from quire.cache.free_list import FreeList
from quire.cache.issue_numbers import FREE, initial_numbers, number_step
from quire.cache.page_rows import PageRows, bytes_of, runs_of
from quire.cache.prefix_cache import PrefixCache, PrefixUsage, plan_match, plan_registration
from quire.cache.release import release
from quire.cache.sequence import Runs, Sequence, StateNumber
from quire.cache.sequence_record import DROPPED, FIELDS, ID, LAST, LENGTH, LONGEST, OWN, PAGES, ROW, WIDTH
from quire.cache.shard import Shard, keys_of
from quire.cache.step_table import StepRequest, StepTable
from quire.cache.swap import SwappedSequence, plan_swap_in, plan_swap_out
from quire.cache.token_ids import NO_SALT, KeyChain
from quire.cache.transaction import Transaction
from quire.errors import ArgumentError, describe
from quire.keywords import with_pointers

__all__ = ["PagePool", "Sequence", "Usage"]

_SLOTS, _IDS = attrgetter("_slot"), attrgetter("id")
_NO_COPIES: tuple[tuple[int, int], ...] = ()


class Usage(NamedTuple):
    """The state of a pool in numbers."""

    pages: int
    """Pages of the pool."""
    free: int
    """Free pages."""
    shared: int
    """Pages with more than one holder."""
    sequences: int
    """Live sequences."""
    tokens: int
    """The sum of the lengths of all sequences; a shared token counts once for each sequence."""

    def __str__(self) -> str:
        held = self.pages - self.free
        sequences = f"{self.sequences} sequence{'' if self.sequences == 1 else 's'} of {self.tokens} tokens"
        return f"{held} of {self.pages} pages held ({self.shared} shared) by {sequences}"


class PagePool:
    """Allocates pages to sequences and counts references to them. One pool serves the caches of all layers. It stores no keys or
    values and never reads a device.

    Every operation is atomic, also if an exception such as KeyboardInterrupt ends it: its writes are planned first, and undone if
    it does not finish.

    Pages of earlier prompts can be used again: see `match` and `register`.

    A pool can be pickled and deep-copied, with its sequences; the latest step of a copy cannot be rolled back.

    Args:
        pages: Number of pages, 1 or more.
        page_size: Slots (tokens) of a page, 1 or more.
        device: Where the index tensors of the batches are made. Default: the CPU.
        shard: `(rank, ranks, interleave)`, the keys that this rank holds, as in `Batch`. The pool then allocates pages for these
            keys only, and its batches have the shard. Lengths still count all tokens. Default: all keys.

    Raises:
        ArgumentError: `pages` or `page_size` is not a positive int, or the shard is invalid.

    Example:
        >>> import quire
        >>> pool = quire.PagePool(pages=8, page_size=4)
        >>> a, b = pool.sequence(), pool.sequence()
        >>> batch = pool.step({a: 6, b: 3})
        >>> batch.page_table.tolist(), batch.kv_lens.tolist()
        ([[0, 1], [2, -1]], [6, 3])
        >>> print(pool.usage())
        3 of 8 pages held (0 shared) by 2 sequences of 9 tokens
        >>> pool.free(a)
        >>> pool.free_pages
        7
    """

    @with_pointers
    def __init__(self, pages: int, page_size: int, device: torch.device | str = "cpu", shard: tuple[int, int, int] | None = None):
        for name, value in (("pages", pages), ("page_size", page_size)):
            if not _is_count(value) or value < 1:
                raise ArgumentError(name, describe(value), "an int of 1 or more")
        self.pages: int = pages
        """Number of pages."""
        self.page_size: int = page_size
        """Slots of a page."""
        self.device: torch.device = torch.device(device)
        """The device of the batches' index tensors."""
        self.shard: Shard | None = Shard.of(shard)
        """The keys that this rank holds, `(rank, ranks, interleave)`; None if it holds all of them."""
        self.steps: int = 0
        """The number of the latest step. Numbers of steps that failed or were rolled back are not used again."""
        self._free = FreeList(capacity=pages)
        self._holders = numpy.zeros(pages, dtype=numpy.int32)
        self._issue: numpy.ndarray | None = None
        self._shared = self._tokens = 0
        self._live: dict[int, Sequence] = {}
        self._swapped: dict[int, SwappedSequence] = {}
        self._slots = FreeList()
        self._prefixes: PrefixCache | None = None
        self._records = numpy.zeros((0, FIELDS), dtype=numpy.int64)
        self._tables: dict[int, PageRows] = {}
        self._ids = self._numbers = self._copied = self._changes = 0
        self._begin()

    def _begin(self) -> None:
        """Sets the attributes that are not copied or pickled."""
        self._name = uuid.uuid4().hex
        self._state = StateNumber()
        self._mirrors: dict[torch.device, torch.Tensor] = {}
        self._last: StepTable | None = None
        # The number and the writes of the latest step, and the same of the step before it.
        self._latest: tuple[int, Transaction, tuple[int, Transaction] | None] | None = None
        self._pending: Transaction | None = None

    def sequence(self) -> Sequence:
        """Makes a new sequence without tokens.

        Returns:
            A handle to pass to `step`, `extend`, `fork`, `trim`, `drop` and `free`.
        """
        self._undo_pending()
        transaction = Transaction()
        try:
            sequence = self._new_sequence(transaction)
            self._commit(transaction, keeps_step=True)
            return sequence
        except BaseException:
            self._abort(transaction)
            raise

    def step(self, new_tokens: Mapping[Sequence, int], *, share: bool = False) -> Batch:
        """Allocates slots for the new tokens of every sequence and returns the batch of the step. Either all sequences get their
        pages or none does.

        A step with the sequences of the previous one, in the same order, updates that step's page table in place. The batch of a
        pool on the CPU aliases this table. It is valid until the pool's next `step`, `extend`, `trim`, `drop`, `free` or
        `rollback`; after that the operators raise `StaleBatch` for it. `batch.clone()` makes a copy that stays valid, as does a
        pool on another device.

        Args:
            new_tokens: The number of new tokens of each sequence, 0 or more. The batch has the sequences in this order.
            share: Whether the batch says which sequences begin with the same pages (`Batch.prefixes`), so that kernels can read
                these pages once. No device is read.

        Returns:
            A `Batch`. `quire.write` applies its `copies` (copy-on-write) before it writes.

        Raises:
            OutOfPages: There are too few free pages. The pool is unchanged.
            ArgumentError: A sequence was freed or belongs to another pool, a count is not an int of 0 or more, or `share` is not a
                bool.

        Example:
            >>> import quire
            >>> pool = quire.PagePool(pages=8, page_size=4)
            >>> a, b = pool.sequence(), pool.sequence()
            >>> batch = pool.step({a: 6, b: 3})
            >>> batch = pool.step({a: 1, b: 1})
            >>> batch.q_starts.tolist(), batch.kv_lens.tolist()
            ([0, 1, 2], [7, 4])
        """
        self._undo_pending()
        if not isinstance(share, bool):
            raise ArgumentError("share", describe(share), "True or False")
        latest, transaction = self._latest, Transaction()
        try:
            request = self._request(new_tokens)
            given, copies = self._plan(request, transaction)
            number = self._advance_state(transaction)
            laid = StepTable(request) if self._last is None else self._last.next(request, given, self, transaction)
            transaction.set_attribute(self, "_last", laid)
            self._pending = transaction
            transaction.apply()
            batch = laid.batch(self, given, copies, number, share)
            self._update_mirrors()
            self._latest = number, transaction, latest and latest[:2]
            self._pending = None
            return batch
        except BaseException:
            # Before anything is undone: another interrupt may end that, and the next use of the pool then completes it.
            self._pending, self._latest = transaction, latest
            self._undo_pending()
            raise

    def extend(self, sequence: Sequence, new_tokens: int) -> tuple[tuple[int, int], ...]:
        """Allocates slots for new tokens of one sequence, without making a batch.

        Returns:
            The (source, target) pages that copy-on-write must copy before the tokens are written. Pass them to `copy_pages` of
            every layer's cache.

        Raises:
            OutOfPages: There are too few free pages. The pool is unchanged.
            ArgumentError: The sequence was freed or belongs to another pool, or the count is not an int of 0 or more.
        """
        self._undo_pending()
        transaction = Transaction()
        try:
            _, copies = self._plan(self._request({sequence: new_tokens}), transaction)
            self._commit_tokens(transaction)
            return copies
        except BaseException:
            self._abort(transaction)
            raise

    def rollback(self, batch: Batch) -> None:
        """Undoes the latest step: pages, lengths, runs and issue numbers are as before it, and the next step gets the same pages.
        Page copies that a cache applied already do no harm, because their targets are free again. The step before it is then the
        latest: it can be rolled back, too, but none before that.

        Args:
            batch: The batch that the latest step returned.

        Raises:
            ArgumentError: The batch is not that of the latest step, or the pool has changed since. A call of `sequence` is allowed.
        """
        self._undo_pending()
        if not isinstance(batch, Batch):
            raise ArgumentError("batch", describe(batch), "the batch of this pool's latest step")
        if batch.step_id is None or self._latest is None or batch.step_id != (self._name, self._latest[0]):
            given = "a batch that no pool made" if batch.step_id is None else "the batch of another step or pool"
            if batch.step_id is not None and self._latest is None and batch.step_id[0] == self._name:
                given = "a batch after which the pool was changed again"
            raise ArgumentError("batch", given, "the batch of this pool's latest step, before any other change")
        try:
            # If an interrupt ends this, the next use of the pool completes it.
            self._latest[1].is_rolled_back = True
            self._pending = self._latest[1]
            self._undo_pending()
            self._latest = self._latest[2] and (*self._latest[2], None)
        except BaseException:
            self._undo_pending()
            raise

    def trim(self, sequence: Sequence, length: int) -> None:
        """Removes the tokens from position `length` on, such as rejected draft tokens.

        Raises:
            ArgumentError: `length` is above the sequence's length or within the positions that were dropped.
        """
        self._undo_pending()
        row = self._row(sequence)
        least = int(row[DROPPED]) * self.page_size
        if self.shard is not None and least:
            least = self.shard.position(least - 1) + 1
        if not _is_count(length) or not least <= length <= row[LENGTH]:
            dropped = f": positions before {least} were dropped" if least else ""
            raise ArgumentError("length", describe(length), f"{least} to {row[LENGTH]}{dropped}")
        transaction, after = Transaction(), row.copy()
        keys = keys_of(self.shard, length)
        kept = -(-keys // self.page_size)
        last = int(row[LAST])
        if row[WIDTH]:
            cells = self._tables[int(row[WIDTH])].cells[row[ROW]]
            last = int(cells[kept - 1]) if kept else -1
            gone = cells[max(kept, row[DROPPED]) : row[PAGES]][::-1].astype(numpy.int64)
            release(self, gone, transaction)
            transaction.set_cells(self._tables[int(row[WIDTH])], "cells", (int(row[ROW]), slice(kept, int(row[PAGES]))), -1)
        filled = keys % self.page_size
        if filled and length < row[LENGTH] and self._holders[last] == 1:
            if self._issue is not None:
                transaction.set_cells(self, "_issue", (last, slice(filled, None)), FREE)
            if self._prefixes is not None:
                self._prefixes.forget(self._prefixes.cached(numpy.array([last])), transaction)
        runs = sequence._runs
        while runs and runs[-1][0] >= length:
            runs = runs[:-1]
        after[LENGTH], after[PAGES], after[LAST], after[DROPPED] = length, kept, last, min(int(row[DROPPED]), kept)
        after[OWN] = bool(runs) and runs[-1][1] == sequence.id
        transaction.set_attribute(sequence, "_runs", runs)
        transaction.set_attribute(sequence, "_chain", sequence._chain.upto(length // self.page_size))
        transaction.set_attribute(self, "_tokens", self._tokens + length - int(row[LENGTH]))
        self._update_row(sequence, row, after, transaction)

    def drop(self, sequence: Sequence, before: int) -> None:
        """Releases the pages whose positions are all below `before`, which a sliding window no longer reads. The sequence keeps its
        length and its positions.

        Raises:
            ArgumentError: `before` is not in 0 to the sequence's length.
        """
        self._undo_pending()
        row = self._row(sequence)
        if not _is_count(before) or not 0 <= before <= row[LENGTH]:
            raise ArgumentError("before", describe(before), f"0 to {row[LENGTH]}")
        first, end = int(row[DROPPED]), keys_of(self.shard, before) // self.page_size
        if end <= first:
            return
        transaction, after = Transaction(), row.copy()
        table = self._tables[int(row[WIDTH])]
        # The last ones first, so that what is not evicted is a prefix.
        release(self, table.cells[row[ROW], first:end][::-1].astype(numpy.int64), transaction)
        transaction.set_cells(table, "cells", (int(row[ROW]), slice(first, end)), -1)
        after[DROPPED] = end
        if end == row[PAGES]:
            after[LAST] = -1
        self._update_row(sequence, row, after, transaction)

    def free(self, *sequences: Sequence) -> None:
        """Releases all pages of sequences. Their handles become invalid.

        Raises:
            ArgumentError: A sequence was freed before, is given twice or belongs to another pool. Nothing is freed then.
        """
        self._undo_pending()
        slots = self._slots_of(sequences, swapped=True)
        named = dict(zip(map(_IDS, sequences), sequences))
        if len(named) < len(sequences):
            twice = next(s for i, s in enumerate(sequences) if s in sequences[:i])
            raise ArgumentError("sequences", f"sequence {twice.id} twice", "each sequence once")
        transaction = Transaction()
        rows = self._records.take(slots, 0)
        pages = runs_of(self._tables, rows[:, WIDTH], rows[:, ROW], rows[:, DROPPED], rows[:, PAGES])
        if len(pages):
            release(self, pages, transaction)
        for width, table in self._tables.items():
            returned = rows[rows[:, WIDTH] == width, ROW]
            if len(returned):
                table.rows.exchange(transaction, 0, returned[::-1])
        empty = numpy.zeros(FIELDS, dtype=numpy.int64)
        empty[ID] = -1
        transaction.set_cells(self, "_records", slots, empty, old=rows)
        transaction.remove_entries(self, "_live", named)
        transaction.remove_entries(self, "_swapped", {id: self._swapped[id] for id in named if id in self._swapped})
        self._slots.exchange(transaction, 0, slots[::-1])
        transaction.set_attribute(self, "_tokens", self._tokens - int(rows[:, LENGTH].sum()))
        self._advance_state(transaction)
        transaction.set_attribute(self, "_last", None)
        self._commit(transaction)

    def fork(self, sequence: Sequence) -> Sequence:
        """Makes a new sequence with the same tokens, in the same pages (prefix sharing). A shared page is copied when one of its
        sequences first writes to it (copy-on-write).

        Example:
            >>> import quire
            >>> pool = quire.PagePool(pages=8, page_size=4)
            >>> prefix = pool.sequence()
            >>> batch = pool.step({prefix: 6})
            >>> answer = pool.fork(prefix)
            >>> pool.step({answer: 1}).copies
            ((1, 2),)
        """
        self._undo_pending()
        transaction = Transaction()
        try:
            child = self._plan_fork(sequence, transaction)
            self._commit(transaction)
            return child
        except BaseException:
            self._abort(transaction)
            raise

    def _plan_fork(self, sequence: Sequence, transaction: Transaction) -> Sequence:
        row = self._row(sequence)
        row[OWN] = 0
        if row[WIDTH]:
            table = self._tables[int(row[WIDTH])]
            (at,) = table.next_rows(1).tolist()
            table.rows.exchange(transaction, 1)
            cells = table.cells[row[ROW]].copy()
            transaction.set_cells(table, "cells", at, cells)
            row[ROW] = at
            pages = cells[row[DROPPED] : row[PAGES]]
            holders = self._holders[pages]
            transaction.set_cells(self, "_holders", pages, holders + 1, old=holders)
            transaction.set_attribute(self, "_shared", self._shared + int((holders == 1).sum()))
        transaction.set_attribute(self, "_tokens", self._tokens + int(row[LENGTH]))
        return self._new_sequence(transaction, row, sequence._runs, sequence._chain)

    def match(self, token_ids: Any, salt: str = "", *, window: int | None = None) -> Sequence:
        """Makes a new sequence that begins with the cached pages of a prompt: full pages that `register` added for sequences with
        the same first tokens and the same salt. At least the last token is left to be computed.

        The sequence holds these pages as a fork does. They stay cached as long as a sequence holds them; pages that none holds are
        evicted when no other page is free, in the order in which they were released. To keep a prefix, keep a sequence that holds
        it.

        Args:
            token_ids: The ids of the prompt's tokens, 64-bit ints: a list, a tuple, a numpy array or a CPU tensor. Where a token
                stands for other content, such as a part of an image, give a hash of the content in place of its id.
            salt: What else the keys and values depend on, or who may share them: a LoRA adapter, a tenant. Only sequences with
                the same salt share pages.
            window: For a pool of which all layers have a sliding window: the largest `Options.window`. Only pages that the next
                token sees are then needed and held; pages before these are as after `drop`. Default: all pages are needed.

        Returns:
            The sequence. Its `length` is the number of tokens found, a multiple of `page_size`, perhaps 0.

        Raises:
            ArgumentError: `token_ids`, `salt` or `window` has another type or value, or the pool has a shard.

        Example:
            >>> import quire
            >>> pool = quire.PagePool(pages=8, page_size=4)
            >>> prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
            >>> a = pool.match(prompt)
            >>> batch = pool.step({a: 9 - a.length})
            >>> pool.register(a, prompt)  # once its keys and values are certain to be written
            >>> b = pool.match([1, 2, 3, 4, 5, 6, 7, 99, 100])
            >>> b.length, b.pages
            (4, [0])
        """
        self._undo_pending()
        transaction = Transaction()
        try:
            sequence = plan_match(self, token_ids, salt, window, transaction)
            self._commit(transaction)
            return sequence
        except BaseException:
            self._abort(transaction)
            raise

    def register(self, sequence: Sequence, token_ids: Any) -> None:
        """Adds the full pages of a sequence to the prefix cache, so that `match` finds them. Call it again when another page is
        full: ids of pages that were added before are only compared.

        Their keys and values must be written before a sequence that `match` returned reads them. A page whose content the cache
        has already, in another page, is not added; if that page is evicted, calling this again adds the sequence's own. The
        salt is that of `match`; a sequence that `sequence` made has none.

        Args:
            token_ids: The ids of the sequence's tokens from the first on, as in `match`; of all its tokens or of fewer.

        Raises:
            ArgumentError: There are more ids than tokens, or an id differs from the one that a page was registered with; the
                sequence was freed or belongs to another pool; or the pool has a shard.
        """
        self._undo_pending()
        transaction = Transaction()
        plan_registration(self, sequence, token_ids, transaction)
        self._commit(transaction)

    def swap_out(self, sequence: Sequence) -> tuple[int, ...]:
        """Releases all pages of a sequence whose keys and values are kept in host memory. The sequence keeps its length; until
        `swap_in`, it can only be freed.

        Returns:
            The pages that it held. Pass them to `KVCache.swap_out` of every layer before anything else is written.

        Raises:
            ArgumentError: The sequence was freed, is swapped out or belongs to another pool.

        Example:
            >>> import torch, quire
            >>> pool = quire.PagePool(pages=4, page_size=4)
            >>> cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8)
            >>> a = pool.sequence()
            >>> k = torch.randn(6, 1, 8, dtype=torch.bfloat16)
            >>> quire.write(k, k, cache, pool.step({a: 6}))
            >>> kept = cache.swap_out(pool.swap_out(a))  # for every layer
            >>> pool.free_pages, a.length, a.pages
            (4, 6, [-1, -1])
            >>> cache.swap_in(kept, pool.swap_in(a))
            >>> batch = pool.step({a: 1})
        """
        self._undo_pending()
        transaction = Transaction()
        try:
            pages = plan_swap_out(self, sequence, transaction)
            self._advance_state(transaction)
            self._commit(transaction)
            self._update_mirrors()
            return pages
        except BaseException:
            self._abort(transaction)
            raise

    def swap_in(self, sequence: Sequence) -> tuple[int, ...]:
        """Allocates pages for a sequence that was swapped out.

        Returns:
            The pages. Pass them to `KVCache.swap_in` of every layer before the sequence is used.

        Raises:
            OutOfPages: There are too few free pages. The pool is unchanged.
            ArgumentError: The sequence is not swapped out, was freed or belongs to another pool.
        """
        self._undo_pending()
        transaction = Transaction()
        try:
            pages = plan_swap_in(self, sequence, transaction)
            self._commit_tokens(transaction)
            return pages
        except BaseException:
            self._abort(transaction)
            raise

    def prefix_usage(self) -> PrefixUsage:
        """Numbers of pages of the prefix cache: cached, free, found, not found and evicted."""
        self._undo_pending()
        return PrefixUsage(0, 0, 0, 0, 0) if self._prefixes is None else self._prefixes.usage()

    @property
    def free_pages(self) -> int:
        """Number of free pages. Cached pages that no sequence holds are among them."""
        self._undo_pending()
        cached = 0 if self._prefixes is None else self._prefixes.unheld.count
        return self.pages - self._free.used + self._free.count + cached

    @property
    def holders(self) -> torch.Tensor:
        """Reference counts of the pages, int32 `[pages]`. A view of the pool's state: do not write to it."""
        self._undo_pending()
        return torch.from_numpy(self._holders)

    @property
    def issue(self) -> torch.Tensor:
        """Issue numbers, int64 `[pages * page_size]`: the number of the step that allocated a slot, -1 for a free slot. A view of
        the pool's state.

        A page copied by copy-on-write keeps its numbers. A ledger compares them: free, trim, reuse and copy-on-write change the
        number of exactly the slots whose content becomes invalid.

        Numbers are kept from the first access on, for example by a cache with a ledger. Tokens that are older get the number of the
        latest step at that time."""
        self._undo_pending()
        if self._issue is None:
            self._issue = initial_numbers(self)
        return torch.from_numpy(self._issue).view(-1)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The live sequences, oldest first."""
        self._undo_pending()
        return tuple(sorted(self._live.values(), key=_IDS))

    def usage(self) -> Usage:
        """Numbers of pages, free pages, shared pages, sequences and tokens."""
        self._undo_pending()
        return Usage(self.pages, self.free_pages, self._shared, len(self._live), self._tokens)

    @property
    def nbytes(self) -> int:
        """Host memory of the pool in bytes, without the handles of its sequences."""
        laid = 0 if self._last is None else self._last.nbytes
        issue = 0 if self._issue is None else self._issue.nbytes
        cached = 0 if self._prefixes is None else self._prefixes.nbytes
        own = self._holders.nbytes + self._free.nbytes + self._records.nbytes + bytes_of(self._tables.values())
        return own + laid + issue + cached

    def issue_on(self, device: torch.device) -> torch.Tensor:
        """`issue` on `device`; on another device than the CPU, a copy that every step updates."""
        if device.type == "cpu":
            return self.issue
        if device not in self._mirrors:
            self._mirrors[device] = self.issue.to(device)
        return self._mirrors[device]

    def __repr__(self) -> str:
        shard = "" if self.shard is None else f", shard={tuple(self.shard)}"
        return f"PagePool({self.pages} pages x {self.page_size} slots, {self.free_pages} free, {self.device}{shard})"

    def __getstate__(self) -> dict[str, Any]:
        self._undo_pending()
        new = ("_name", "_state", "_mirrors", "_last", "_latest", "_pending")
        return {name: value for name, value in self.__dict__.items() if name not in new}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # Properties of a sequence.

    def is_live(self, sequence: Sequence) -> bool:
        """Whether a sequence was not freed."""
        self._undo_pending()
        return bool(self._records[sequence._slot, ID] == sequence.id)

    def length_of(self, sequence: Sequence) -> int:
        """`sequence.length`."""
        return int(self._records[sequence._slot, LENGTH]) if self.is_live(sequence) else 0

    def runs_of(self, sequence: Sequence) -> Runs:
        """`sequence.runs`."""
        return sequence._runs if self.is_live(sequence) else []

    def pages_of(self, sequence: Sequence) -> list[int]:
        """`sequence.pages`."""
        if not self.is_live(sequence):
            return []
        row = self._records[sequence._slot]
        return self._tables[int(row[WIDTH])].cells[row[ROW], : row[PAGES]].tolist() if row[WIDTH] else []

    def table(self, width: int) -> PageRows:
        """The rows of page ids with `width` columns; made if there are none."""
        return self._tables.setdefault(width, PageRows(width))

    def _prefix_cache(self) -> PrefixCache:
        """The prefix cache, made on first use."""
        if self._prefixes is None:
            self._prefixes = PrefixCache(self.pages)
        return self._prefixes

    # Commit and undo.

    def _undo_pending(self) -> None:
        """Undoes an operation that an exception interrupted."""
        if self._pending is not None:
            self._pending.undo()
            self._pending = None
            self._update_mirrors()

    def _abort(self, transaction: Transaction) -> None:
        """Undoes an operation that raises, whether its writes were applied or not."""
        self._pending = transaction
        self._undo_pending()

    def _commit(self, transaction: Transaction, *, keeps_step: bool = False) -> None:
        """Applies all writes of a transaction, or none if an exception interrupts it. The latest step cannot be rolled back after
        it, unless `keeps_step`."""
        if not keeps_step:
            transaction.set_attribute(self, "_latest", None)
        try:
            self._pending = transaction
            transaction.apply()
            self._pending = None
        except BaseException:
            self._undo_pending()
            raise

    def _commit_tokens(self, transaction: Transaction) -> None:
        """`_commit` of a transaction that changes tokens: batches become stale, and the page table of the last step is gathered
        again."""
        self._advance_state(transaction)
        if self._last is not None:
            transaction.set_attribute(self, "_last", self._last.without_table())
        self._commit(transaction)
        self._update_mirrors()

    def _advance_state(self, transaction: Transaction) -> int:
        """Plans a new state number: batches with another number become stale."""
        self._changes += 1
        transaction.set_attribute(self._state, "now", self._changes)
        return self._changes

    def _update_mirrors(self) -> None:
        for mirror in self._mirrors.values():
            mirror.copy_(self.issue, non_blocking=True)

    # Requests and plans.

    def _request(self, new_tokens: Mapping[Sequence, int]) -> StepRequest:
        """The arguments of a step, validated."""
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
        return StepRequest(sequences, slots, values)

    def _plan(self, request: StepRequest, transaction: Transaction) -> tuple[Allocation, tuple[tuple[int, int], ...]]:
        """Plans pages, slots and issue numbers for new tokens."""
        given = plan_allocation(self, request.slots, request.counts, transaction)
        transaction.set_attribute(self, "_tokens", self._tokens + request.tokens)
        self._numbers = max(self._numbers, self.steps) + 1
        transaction.set_attribute(self, "steps", self._numbers)
        if self._last is None or self._last.table is None or self._last.request is not request:
            # Otherwise the same sequences got tokens in the previous step, so their last runs are their own.
            begun = numpy.flatnonzero((given.before[:, OWN] == 0) & (request.counts > 0))
            given.after[begun, OWN] = 1
            for i, start in zip(begun.tolist(), given.before[begun, LENGTH].tolist()):
                sequence = request.sequences[i]
                transaction.set_attribute(sequence, "_runs", [*sequence._runs, (start, sequence.id)])
        if self._issue is not None:
            number_step(self, given, self._numbers, transaction)
        copies = _NO_COPIES
        if len(given.copied):
            copies = Copies(zip(given.sources.tolist(), given.targets.tolist()), CopyId(self._name, self._copied))
            self._copied += 1
        return given, copies

    def _new_sequence(
        self, transaction: Transaction, row: numpy.ndarray | None = None, runs: Runs | None = None, chain: KeyChain = NO_SALT
    ) -> Sequence:
        (slot,) = self._slots.next(1).tolist()
        if slot >= len(self._records):
            records = numpy.zeros((max(64, len(self._records) * 2), FIELDS), dtype=numpy.int64)
            records[: len(self._records)] = self._records
            self._records = records
        row = numpy.zeros(FIELDS, dtype=numpy.int64) if row is None else row
        sequence = Sequence(self, self._ids, slot)
        sequence._runs = [] if runs is None else runs
        sequence._chain = chain
        self._ids += 1
        row[ID] = sequence.id
        if not row[PAGES]:
            row[LAST] = -1
        self._slots.exchange(transaction, 1)
        transaction.set_cells(self, "_records", slot, row)
        transaction.add_entries(self, "_live", {sequence.id: sequence})
        return sequence

    def _update_row(self, sequence: Sequence, before: numpy.ndarray, after: numpy.ndarray, transaction: Transaction) -> None:
        transaction.set_cells(self, "_records", sequence._slot, after, old=before.copy())
        self._commit_tokens(transaction)

    def _row(self, sequence: Sequence) -> numpy.ndarray:
        """A copy of the record of a live sequence."""
        (slot,) = self._slots_of((sequence,)).tolist()
        return self._records[slot].copy()

    def _slots_of(self, sequences: tuple[Sequence, ...], *, swapped: bool = False) -> numpy.ndarray:
        """The record indices of live sequences of this pool, `swapped`: also of those that are swapped out. Raises ArgumentError
        for any other."""
        if set(map(type, sequences)) - {Sequence}:
            foreign = next(s for s in sequences if type(s) is not Sequence)
            raise ArgumentError("sequence", describe(foreign), "a sequence of this pool")
        slots = numpy.fromiter(map(_SLOTS, sequences), dtype=numpy.int64, count=len(sequences))
        ids = numpy.fromiter(map(_IDS, sequences), dtype=numpy.int64, count=len(sequences))
        elsewhere = [s for s in sequences if s._pool is not self]
        if elsewhere or (self._records[slots, ID] != ids).any():
            bad = elsewhere[0] if elsewhere else sequences[int((self._records[slots, ID] != ids).argmax())]
            whose = "which was freed" if bad._pool is self else "which belongs to another pool"
            raise ArgumentError("sequence", f"sequence {bad.id}, {whose}", "a live sequence of this pool")
        if self._swapped and not swapped:
            for sequence in sequences:
                if sequence.id in self._swapped:
                    allowed = "a sequence with its pages: swap it in first"
                    raise ArgumentError("sequence", f"sequence {sequence.id}, which is swapped out", allowed)
        return slots


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
