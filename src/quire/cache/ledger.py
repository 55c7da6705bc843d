"""What was written where, slot by slot: the memory that lets a check say never written, stale, or another sequence's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from quire.batch import AnySequence
    from quire.cache.pool import PagePool

UNKNOWN = -1
"""A writer nobody named: it is not compared."""
UNPLACED = -2
"""The position of a token that was written by its slot alone: it is not compared."""
_NEVER = -1
"""The position in a slot that was never written."""
_FREE = -1
"""The pool's number of a slot that no token has."""
_RELEASED = -2
"""The ledger's number of a slot that `release` gave back."""


class Finding(NamedTuple):
    """One token that is not where it should be, or would be written where it should not."""

    row: int
    position: int
    slot: int
    page: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}, position {self.position}: slot {self.slot} (page {self.page}, offset {self.offset}): {self.reason}"


class Report(NamedTuple):
    """What the check kernel counted, and the lowest row and position of the first call in which it found anything."""

    missing: int
    first: Finding

    def __str__(self) -> str:
        tokens = "1 required token was" if self.missing == 1 else f"{self.missing} required tokens were"
        return f"{tokens} not in the cache, first {self.first}"


class Ledger:
    """Beside the pages of one cache, on their device, four numbers for each slot `[pages * page_size]`:

        position  int32   the position of the token that was written last, -1 for none, -2 for a token whose position nobody said
        writer    int32   the sequence it was written for, -1 for unknown
        issue     int64   the number the pool had given the slot by then
        scales    int64   what the scales of the cache were by then (`KVCache.scale_mark`), 0 for unknown

    A slot holds the right token if the first three are what the reader's sequence and the pool say now. Without a pool the numbers
    are 0, and only `release` makes a slot stale. Recording never reads the device; only the audits and `report` do.

    In host memory every call is audited before it runs. On a GPU `attend` and `step` launch a check kernel before the attention. It
    compares position and issue of every required slot and counts into `violations`, which nobody waits for until `report` is asked.
    It knows the pool's numbers as of the last hand-out, and leaves out writers and the new tokens under a tree mask. Where it
    cannot run (`quire explain --operation audit` says why), a GPU's calls are audited under `check="full"` alone.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device | str, pool: PagePool | None = None):
        self.pages, self.page_size, self.pool = pages, page_size, pool
        self._size = pages * page_size

        def cells(value: int, dtype: torch.dtype) -> torch.Tensor:
            # The one cell too many takes what is skipped: nothing then depends on a value the host would have to read.
            return torch.full((self._size + 1,), value, dtype=dtype, device=device)

        self._cells = cells(_NEVER, torch.int32), cells(UNKNOWN, torch.int32), cells(0, torch.int64), cells(0, torch.int64)
        self.position, self.writer, self.issue, self.scales = (cell[: self._size] for cell in self._cells)
        self.device = self.issue.device
        self.current = torch.zeros_like(self.issue) if pool is None else pool.issue_on(self.device)
        """The numbers that the pool has given the slots by now."""
        self.violations = torch.zeros(9, dtype=torch.int64, device=device)
        """What the check kernel found since `clear`: count; the lowest row and position, packed; whether a token is kept; and of
        that token row, position and slot, the position in the slot, its issue and the pool's."""

    def record(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        writers: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Notes that tokens were written: integers `[tokens]` each. Slots outside the cache, -1 among them, are skipped. Without
        positions a slot counts as written, position unknown. `scales` is the cache's `scale_mark()`."""
        inside = (slots >= 0) & (slots < self._size)
        at = torch.where(inside, slots, self._size).to(torch.int64)
        position, writer, issue, marks = self._cells
        position[at] = (torch.full_like(at, UNPLACED) if positions is None else positions).to(position.dtype)
        writer[at] = (torch.full_like(at, UNKNOWN) if writers is None else writers).to(writer.dtype)
        issue[at] = self.current[at.clamp(max=self._size - 1)]
        marks[at] = torch.zeros((), dtype=marks.dtype, device=marks.device) if scales is None else scales

    @property
    def _columns(self) -> tuple[torch.Tensor, ...]:
        return self.position, self.writer, self.issue, self.scales

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Notes that whole pages were copied, all sources read before any target was written."""
        for cells in self._columns:
            pages = cells.view(self.pages, self.page_size)
            pages[target] = pages[source]

    def after(self, copies: Sequence[tuple[int, int]]) -> Ledger:
        """What the ledger will say once these pages are copied; this one stays as it is."""
        later = copy.copy(self)
        later.position, later.writer, later.issue, later.scales = (cells.clone() for cells in self._columns)
        later.copy_pages(*torch.tensor(list(copies), device=self.device).unbind(1))
        return later

    def take_over(self, other: Ledger) -> None:
        """Notes all that another ledger of as many pages says."""
        for mine, theirs in zip((*self._columns, self.violations), (*other._columns, other.violations)):
            mine.copy_(theirs)

    def audit_scales(self, slots: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Which of `slots` were written with scales other than these, as indices `[n]`. Unknown scales are not compared; slots
        outside the cache are another rule's business."""
        slots = slots.to(self.device, torch.int64)
        inside = (slots >= 0) & (slots < self._size)
        marks = self.scales[slots.clamp(0, self._size - 1)]
        return (inside & (marks != 0) & (marks != scales)).nonzero().flatten()

    def release(self, pages: torch.Tensor) -> None:
        """Notes that pages were given back, for engines that keep pages themselves; a pool's are known."""
        self.issue.view(self.pages, self.page_size)[pages] = _RELEASED

    def audit_read(
        self, slots: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, sequences: Sequence[AnySequence] | None = None
    ) -> list[Finding]:
        """Every token of `(row, position)` that its slot does not hold, in order. All three are integers `[n]`; slots outside
        the cache are another rule's business. `sequences` are the pool's, row by row: they say who wrote which position."""
        return self._misplaced(self._facts(slots, positions, rows, sequences))

    def report(self) -> Report | None:
        """What the check kernel found since the last `clear`; None if every required token was there. Reads the device."""
        missing, _, kept, *token = self.violations.tolist()
        if not kept:
            return None
        names = ("row", "position", "slot", "held", "issue", "now")
        facts = {name: torch.tensor([value], device="cpu") for name, value in zip(names, token)}
        unknown = torch.tensor([UNKNOWN], device="cpu")
        (first,) = self._misplaced(facts | {"writer": unknown, "owner": unknown, "length": facts["position"] + 1})
        return Report(missing, first)

    def clear(self) -> None:
        """Forgets what the check kernel found."""
        self.violations.zero_()

    def _misplaced(self, facts: dict[str, torch.Tensor]) -> list[Finding]:
        """The tokens that a reader would not find in their slots."""
        writer, issue, now, owner = facts["writer"], facts["issue"], facts["now"], facts["owner"]
        return self._findings(
            facts,
            (facts["held"] == _NEVER, "never written"),
            (issue == _FREE, "stale: written while the slot was free"),
            ((now == _FREE) | (issue == _RELEASED), "stale: freed after it was written"),
            (issue != now, "stale: written at step {issue}, the slot was handed out again for a token of step {now}"),
            (facts["position"] >= facts["length"], "beyond its sequence, which has {length} tokens"),
            (
                (writer != owner) & (writer != UNKNOWN) & (owner != UNKNOWN),
                "another sequence's: written by sequence {writer} at position {held}",
            ),
            ((facts["held"] != facts["position"]) & (facts["held"] != UNPLACED), "another position's: written at position {held}"),
        )

    def audit_write(
        self, slots: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, sequences: Sequence[AnySequence] | None = None
    ) -> list[Finding]:
        """Every token of `(row, position)` that must not be written to its slot, in order; to be asked before the write. A slot
        is written once in a call, and once for each time that a pool hands it out. Arguments as in `audit_read`."""
        facts = self._facts(slots, positions, rows, sequences)
        order = torch.argsort(facts["slot"], stable=True)
        again = torch.zeros_like(order, dtype=torch.bool)
        again[order[1:]] = facts["slot"][order].diff() == 0
        # Without a pool nobody says when a slot is handed out again: only a second write in one call is known to be wrong.
        written = (facts["held"] != _NEVER) & (facts["issue"] == facts["now"]) & (self.pool is not None)
        return self._findings(
            facts,
            (again, "written twice in one call"),
            (facts["now"] == _FREE, "free: the pool has given the slot to no token"),
            (facts["position"] >= facts["length"], "beyond its sequence, which has {length} tokens"),
            (written & (facts["held"] == UNPLACED), "written twice: already at step {issue}, by its slot alone"),
            (written & (facts["writer"] == UNKNOWN), "written twice: already at step {issue}, at position {held}"),
            (written, "written twice: already at step {issue}, by sequence {writer} at position {held}"),
        )

    def _facts(
        self, slots: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, sequences: Sequence[AnySequence] | None
    ) -> dict[str, torch.Tensor]:
        """What the ledger, the pool and the sequences say about each token, by the names that the reasons use."""
        slot, position, row = (t.to(self.device, torch.int64) for t in (slots, positions, rows))
        inside = (slot >= 0) & (slot < self._size)
        slot, position, row = slot[inside], position[inside], row[inside]
        now = self.current if self.pool is None else self.pool.issue.to(self.device)
        facts = {"slot": slot, "position": position, "row": row, "now": now[slot]}
        facts |= {"held": self.position[slot], "writer": self.writer[slot], "issue": self.issue[slot]}
        if sequences is None:
            return facts | {"owner": torch.full_like(slot, UNKNOWN), "length": position + 1}
        # The runs of all rows as one sorted list: a single search finds the run of every token.
        runs = [((row << 32) + start, id) for row, s in enumerate(sequences) for start, id in s.runs or [(0, UNKNOWN)]]
        starts, ids = torch.tensor(runs, dtype=torch.int64, device=self.device).view(-1, 2).unbind(1)
        lengths = torch.tensor([s.length for s in sequences], dtype=torch.int64, device=self.device)
        owner = ids[torch.searchsorted(starts.contiguous(), (row << 32) + position, right=True) - 1]
        return facts | {"owner": owner, "length": lengths[row]}

    def _findings(self, facts: dict[str, torch.Tensor], *reasons: tuple[torch.Tensor, str]) -> list[Finding]:
        """The tokens to which a reason applies, each with the first that does."""
        applies = torch.stack([condition for condition, _ in reasons])
        bad = applies.any(0).nonzero()[:, 0]
        firsts = applies[:, bad].int().argmax(0).tolist()
        values = {name: fact[bad].tolist() for name, fact in facts.items()}
        findings = []
        for i, first in enumerate(firsts):
            token = {name: value[i] for name, value in values.items()}
            page, offset = divmod(token["slot"], self.page_size)
            reason = reasons[first][1].format_map(token)
            findings.append(Finding(token["row"], token["position"], token["slot"], page, offset, reason))
        return sorted(findings)
