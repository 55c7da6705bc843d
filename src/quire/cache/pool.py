"""Pages and the sequences that hold them: host bookkeeping that serves the caches of all layers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple

import torch

from quire.batch import Batch
from quire.errors import ArgumentError, OutOfPages, describe


class Sequence:
    """One sequence of a pool: a handle, equal only to itself. The pool alone changes it."""

    __slots__ = ("_dropped", "_pages", "_pool", "id", "length", "runs")

    def __init__(self, pool: PagePool, id: int):
        self.id, self.length = id, 0
        self.runs: list[tuple[int, int]] = []
        """Who wrote which positions, as (first position, sequence id): a fork starts with the runs of its parent."""
        self._pages = array("i")
        self._dropped = 0
        self._pool: PagePool | None = pool

    @property
    def pages(self) -> list[int]:
        """Its page ids in order, -1 where `drop` gave a page back."""
        return self._pages.tolist()

    def __repr__(self) -> str:
        state = f"{self.length} tokens" if self._pool else "freed"
        return f"Sequence({self.id}: {state})"


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

        holders  int32 [pages]               how many sequences hold a page; live, not to be written
        issue    int64 [pages * page_size]   the step that handed a slot to its token, -1 for a slot that no token has; live

    A copied page takes its numbers along, so a slot and its number say together whether a token is where it should be:
    free, trim, reuse and copy-on-write all change the number of a slot whose content they make wrong.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device | str = "cpu"):
        for name, value in (("pages", pages), ("page_size", page_size)):
            if not _is_count(value) or value < 1:
                raise ArgumentError(name, describe(value), "an int of 1 or more")
        self.pages, self.page_size, self.device = pages, page_size, torch.device(device)
        self.steps = 0
        """How often tokens were handed out; the number of the latest hand-out."""
        self._free = list(range(pages))[::-1]
        self._live: dict[int, Sequence] = {}
        self._ids = 0
        # Python's arrays are quick to change one by one; torch sees the same memory.
        self._holders = memoryview(array("i", [0]) * pages)
        self._issue = memoryview(array("q", [-1]) * (pages * page_size))
        self.holders = torch.frombuffer(self._holders, dtype=torch.int32)
        self.issue = torch.frombuffer(self._issue, dtype=torch.int64)
        self._mirrors: dict[torch.device, torch.Tensor] = {}

    def sequence(self) -> Sequence:
        """A new sequence without tokens."""
        sequence = Sequence(self, self._ids)
        self._ids += 1
        self._live[sequence.id] = sequence
        return sequence

    def step(self, new_tokens: Mapping[Sequence, int]) -> Batch:
        """Extends every sequence by its new tokens (0 is allowed), all or none of them, and returns the batch, one row for
        each sequence in the order given. `quire.write` applies the batch's `copies` before it writes."""
        copies = self._hand_out(new_tokens)
        sequences = tuple(new_tokens)
        width = max((len(s._pages) for s in sequences), default=0) or 1
        padding = array("i", [-1]) * width
        table, kv_lens, q_starts = array("i"), array("i"), array("i", [0])
        for sequence, count in new_tokens.items():
            table += sequence._pages + padding[len(sequence._pages) :]
            kv_lens.append(sequence.length)
            q_starts.append(q_starts[-1] + count)
        return Batch(
            self._tensor(table).view(-1, width),
            self._tensor(kv_lens),
            self._tensor(q_starts),
            max_q_len=max(new_tokens.values(), default=0),
            max_kv_len=max(kv_lens, default=0),
            copies=copies,
            sequences=sequences,
        )

    def extend(self, sequence: Sequence, new_tokens: int) -> tuple[tuple[int, int], ...]:
        """`step` for one sequence, without a batch. Returns the (source, target) pages to copy before anything is written:
        give them to `copy_pages` of every layer's cache."""
        return self._hand_out({sequence: new_tokens})

    def trim(self, sequence: Sequence, length: int) -> None:
        """Forgets the tokens from position `length` on, such as drafts that were not accepted."""
        self._check(sequence)
        least = sequence._dropped * self.page_size
        if not _is_count(length) or not least <= length <= sequence.length:
            dropped = f": positions before {least} were dropped" if least else ""
            raise ArgumentError("length", describe(length), f"{least} to {sequence.length}{dropped}")
        self._shrink(sequence, length)

    def free(self, sequence: Sequence) -> None:
        """Gives back all pages of a sequence; the handle is refused from now on."""
        self._check(sequence)
        self._shrink(sequence, 0)
        del self._live[sequence.id]
        sequence._pool = None

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with the same tokens, in the same pages. Whoever first writes into a shared page gets a copy of it."""
        self._check(sequence)
        child = self.sequence()
        child.length, child._dropped = sequence.length, sequence._dropped
        child.runs, child._pages = sequence.runs[:], sequence._pages[:]
        for page in child._pages[child._dropped :]:
            self._holders[page] += 1
        return child

    def drop(self, sequence: Sequence, before: int) -> None:
        """Gives back the pages that lie wholly left of position `before`, which a sliding window no longer sees. The sequence
        keeps its length and its positions."""
        self._check(sequence)
        if not _is_count(before) or not 0 <= before <= sequence.length:
            raise ArgumentError("before", describe(before), f"0 to {sequence.length}")
        for column in range(sequence._dropped, before // self.page_size):
            self._release(sequence._pages[column])
            sequence._pages[column] = -1
            sequence._dropped += 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The live sequences, oldest first."""
        return tuple(self._live.values())

    def usage(self) -> Usage:
        shared = sum(count > 1 for count in self._holders)
        return Usage(self.pages, self.free_pages, shared, len(self._live), sum(s.length for s in self._live.values()))

    def issue_on(self, device: torch.device) -> torch.Tensor:
        """`issue` in memory of `device`: its own on the host, elsewhere a mirror that every hand-out brings up to date."""
        if device.type == "cpu":
            return self.issue
        if device not in self._mirrors:
            self._mirrors[device] = self.issue.to(device)
        return self._mirrors[device]

    def __repr__(self) -> str:
        return f"PagePool({self.pages} pages x {self.page_size} slots, {self.free_pages} free, {self.device})"

    def _hand_out(self, new_tokens: Mapping[Sequence, int]) -> tuple[tuple[int, int], ...]:
        """Pages, slots and a number for new tokens. Everything that can fail comes before the first change."""
        needed = 0
        holders: dict[int, int] = {}
        for sequence, count in new_tokens.items():
            self._check(sequence)
            if not _is_count(count) or count < 0:
                raise ArgumentError("new_tokens", describe(count), "an int of 0 or more")
            needed += self._pages_of(sequence.length + count) - len(sequence._pages)
            if count and sequence.length % self.page_size:
                page = sequence._pages[-1]
                holders.setdefault(page, self._holders[page])
                if holders[page] > 1:
                    holders[page] -= 1
                    needed += 1
        if needed > self.free_pages:
            raise OutOfPages(needed, self.free_pages, self.pages)
        self.steps += 1
        copies = []
        for sequence, count in new_tokens.items():
            if not count:
                continue
            pages, start = sequence._pages, sequence.length
            filled = start % self.page_size
            if filled and self._holders[pages[-1]] > 1:
                source, pages[-1] = pages[-1], self._take()
                self._holders[source] -= 1
                self._issue[self._slots(pages[-1], 0, filled)] = self._issue[self._slots(source, 0, filled)]
                copies.append((source, pages[-1]))
            sequence.length += count
            while len(pages) < self._pages_of(sequence.length):
                pages.append(self._take())
            for column in range(start // self.page_size, len(pages)):
                first = column * self.page_size
                self._number(pages[column], max(start - first, 0), min(sequence.length - first, self.page_size), self.steps)
            if not sequence.runs or sequence.runs[-1][1] != sequence.id:
                sequence.runs.append((start, sequence.id))
        for mirror in self._mirrors.values():
            mirror.copy_(self.issue, non_blocking=True)
        return tuple(copies)

    def _shrink(self, sequence: Sequence, length: int) -> None:
        pages = sequence._pages
        while len(pages) > self._pages_of(length):
            self._release(pages.pop())
        sequence._dropped = min(sequence._dropped, len(pages))
        filled = length % self.page_size
        if filled and self._holders[pages[-1]] == 1:
            self._number(pages[-1], filled, self.page_size, -1)
        while sequence.runs and sequence.runs[-1][0] >= length:
            sequence.runs.pop()
        sequence.length = length

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        if page < 0:
            return
        self._holders[page] -= 1
        if not self._holders[page]:
            self._number(page, 0, self.page_size, -1)
            self._free.append(page)

    def _number(self, page: int, start: int, end: int, number: int) -> None:
        self._issue[self._slots(page, start, end)] = array("q", [number]) * (end - start)

    def _slots(self, page: int, start: int, end: int) -> slice:
        return slice(page * self.page_size + start, page * self.page_size + end)

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _tensor(self, values: array[int]) -> torch.Tensor:
        host = torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32, device="cpu")
        return host.to(self.device)

    def _check(self, sequence: Sequence) -> None:
        if not isinstance(sequence, Sequence):
            raise ArgumentError("sequence", describe(sequence), "a sequence of this pool")
        if sequence._pool is not self:
            whose = "which was freed" if sequence._pool is None else "of another pool"
            raise ArgumentError("sequence", f"sequence {sequence.id}, {whose}", "a live sequence of this pool")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
