"""A record of what was written to each slot, so that a check can report slots that were never written, are stale, or belong to
another sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from quire.batch import AnySequence
    from quire.cache.pool import PagePool

UNKNOWN = -1
"""An unknown writer: it is not compared."""
UNPLACED = -2
"""The position of a token written with `slots` and without a batch: it is unknown and not compared."""
_NEVER = -1
"""The position of a slot that was never written."""
_FREE = -1
"""The issue number of a slot that is not allocated."""
_RELEASED = -2
"""The issue number that `release` records."""


class LedgerFinding(NamedTuple):
    """One slot that does not hold the token it should hold, or that must not be written."""

    seq: int
    """The index of the sequence in the batch."""
    position: int
    slot: int
    page: int
    offset: int
    reason: str

    def __str__(self) -> str:
        slot = f"slot {self.slot} (page {self.page}, offset {self.offset})"
        return f"sequence {self.seq}, position {self.position}: {slot}: {self.reason}"


class LedgerReport(NamedTuple):
    """The number of missing tokens that the audit kernel counted, and the first of them: of the first call with any, the lowest
    sequence and position."""

    missing: int
    first: LedgerFinding

    def __str__(self) -> str:
        tokens = "1 required token was" if self.missing == 1 else f"{self.missing} required tokens were"
        return f"{tokens} not in the cache, first {self.first}"


class Ledger:
    """Four numbers for each slot of a cache, `[pages * page_size]` on the cache's device:

        position  int32   the position of the token that was written last, -1 for none, -2 for an unknown position
        writer    int32   the id of the sequence it was written for, -1 for unknown
        issue     int64   the issue number of the slot when it was written
        scales    int64   a hash of the cache's scales when it was written (`KVCache.scale_mark`), 0 for unknown

    A slot holds the right token if the first three equal the values of the reading sequence and of the pool. Without a pool the
    issue numbers are 0, and only `release` makes a slot stale. Recording never reads the device; only the audits and `report` do.

    In host memory every call is audited before it runs. On a GPU, `attend` and `step` launch an audit kernel before the attention
    kernel. It compares position and issue number of every required slot and counts mismatches in `violations`, without
    synchronization; `report` reads the count. It uses the pool's issue numbers as of the last step, and does not compare writers or
    the new tokens under a tree mask. Where the audit kernel cannot run (`quire explain --operation audit` prints why), calls on a
    GPU are audited with `check="full"` only.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device | str, pool: PagePool | None = None):
        self.pages, self.page_size, self.pool = pages, page_size, pool
        self._size = pages * page_size

        def cells(value: int, dtype: torch.dtype) -> torch.Tensor:
            # The extra cell receives the tokens that are skipped, so that no value has to be read on the host.
            return torch.full((self._size + 1,), value, dtype=dtype, device=device)

        self._cells = cells(_NEVER, torch.int32), cells(UNKNOWN, torch.int32), cells(0, torch.int64), cells(0, torch.int64)
        self.position, self.writer, self.issue, self.scales = (cell[: self._size] for cell in self._cells)
        self.device = self.issue.device
        self.current = torch.zeros_like(self.issue) if pool is None else pool.issue_on(self.device)
        """The current issue numbers of the slots."""
        self.violations = torch.zeros(9, dtype=torch.int64, device=device)
        """The result of the audit kernel since `clear`: the count; the lowest sequence and key, packed; whether a token is
        stored; and that token's sequence, position and slot, the recorded position, the recorded issue number and the current
        one."""

    def record(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        writers: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Records that tokens were written: integers `[tokens]` each. Slots outside the cache, such as -1, are skipped. Without
        `positions` a slot counts as written, position unknown. `scales` is the cache's `scale_mark()`."""
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

    def page_columns(self) -> list[torch.Tensor]:
        """The four numbers as views `[pages, page_size]`."""
        return [cells.view(self.pages, self.page_size) for cells in self._columns]

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Records that whole pages were copied. All sources were read before any target was written."""
        for pages in self.page_columns():
            pages[target] = pages[source]

    def after(self, copies: Sequence[tuple[int, int]]) -> Ledger:
        """A copy of the ledger as it will be once these pages are copied."""
        later = copy.copy(self)
        later.position, later.writer, later.issue, later.scales = (cells.clone() for cells in self._columns)
        later.copy_pages(*torch.tensor(list(copies), device=self.device).unbind(1))
        return later

    def copy_from(self, other: Ledger) -> None:
        """Copies the content of another ledger of the same size."""
        for mine, theirs in zip((*self._columns, self.violations), (*other._columns, other.violations)):
            mine.copy_(theirs)

    def audit_scales(self, slots: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The indices `[n]` of those `slots` that were written with other scales than these. Unknown scales are not compared; slots
        outside the cache are reported by another rule."""
        slots = slots.to(self.device, torch.int64)
        inside = (slots >= 0) & (slots < self._size)
        marks = self.scales[slots.clamp(0, self._size - 1)]
        return (inside & (marks != 0) & (marks != scales)).nonzero().flatten()

    def release(self, pages: torch.Tensor) -> None:
        """Records that pages were released, for engines that manage pages themselves. A pool's pages need no such call."""
        self.issue.view(self.pages, self.page_size)[pages] = _RELEASED

    def audit_read(
        self, slots: torch.Tensor, positions: torch.Tensor, seqs: torch.Tensor, sequences: Sequence[AnySequence] | None = None
    ) -> list[LedgerFinding]:
        """Every token `(sequence, position)` that its slot does not hold, in order. All three are integers `[n]`; slots outside the
        cache are reported by another rule. `sequences` are the pool's, in the order of the batch: their runs show which sequence
        wrote which position."""
        return self._misplaced(self._facts(slots, positions, seqs, sequences))

    def report(self) -> LedgerReport | None:
        """What the audit kernel found since the last `clear`; None if every required token was there. Reads the device."""
        missing, _, kept, *token = self.violations.tolist()
        if not kept:
            return None
        names = ("seq", "position", "slot", "held", "issue", "now")
        facts = {name: torch.tensor([value], device="cpu") for name, value in zip(names, token)}
        unknown = torch.tensor([UNKNOWN], device="cpu")
        (first,) = self._misplaced(facts | {"writer": unknown, "owner": unknown, "length": facts["position"] + 1})
        return LedgerReport(missing, first)

    def clear(self) -> None:
        """Resets what the audit kernel found."""
        self.violations.zero_()

    def _misplaced(self, facts: dict[str, torch.Tensor]) -> list[LedgerFinding]:
        """The tokens that are not in their slots."""
        writer, issue, now, owner = facts["writer"], facts["issue"], facts["now"], facts["owner"]
        return self._findings(
            facts,
            (facts["held"] == _NEVER, "never written"),
            (issue == _FREE, "stale: written while the slot was free"),
            ((now == _FREE) | (issue == _RELEASED), "stale: freed after it was written"),
            (issue != now, "stale: written at step {issue}, the slot was allocated again in step {now}"),
            (facts["position"] >= facts["length"], "beyond its sequence, which has {length} tokens"),
            (
                (writer != owner) & (writer != UNKNOWN) & (owner != UNKNOWN),
                "another sequence's: written by sequence {writer} at position {held}",
            ),
            ((facts["held"] != facts["position"]) & (facts["held"] != UNPLACED), "another position's: written at position {held}"),
        )

    def audit_write(
        self, slots: torch.Tensor, positions: torch.Tensor, seqs: torch.Tensor, sequences: Sequence[AnySequence] | None = None
    ) -> list[LedgerFinding]:
        """Every token `(sequence, position)` that must not be written to its slot, in order; called before the write. A slot is
        written once in a call, and once each time that a pool allocates it. Arguments as in `audit_read`."""
        facts = self._facts(slots, positions, seqs, sequences)
        order = torch.argsort(facts["slot"], stable=True)
        again = torch.zeros_like(order, dtype=torch.bool)
        again[order[1:]] = facts["slot"][order].diff() == 0
        # Without a pool it is unknown when a slot is allocated again: only a second write in one call is certainly wrong.
        written = (facts["held"] != _NEVER) & (facts["issue"] == facts["now"]) & (self.pool is not None)
        return self._findings(
            facts,
            (again, "written twice in one call"),
            (facts["now"] == _FREE, "free: the pool has not allocated the slot"),
            (facts["position"] >= facts["length"], "beyond its sequence, which has {length} tokens"),
            (written & (facts["held"] == UNPLACED), "written twice: already at step {issue}, by a write without a batch"),
            (written & (facts["writer"] == UNKNOWN), "written twice: already at step {issue}, at position {held}"),
            (written, "written twice: already at step {issue}, by sequence {writer} at position {held}"),
        )

    def _facts(
        self, slots: torch.Tensor, positions: torch.Tensor, seqs: torch.Tensor, sequences: Sequence[AnySequence] | None
    ) -> dict[str, torch.Tensor]:
        """The values of the ledger, the pool and the sequences for each token, by the names used in the reasons."""
        slot, position, seq = (t.to(self.device, torch.int64) for t in (slots, positions, seqs))
        inside = (slot >= 0) & (slot < self._size)
        slot, position, seq = slot[inside], position[inside], seq[inside]
        now = self.current if self.pool is None else self.pool.issue.to(self.device)
        facts = {"slot": slot, "position": position, "seq": seq, "now": now[slot]}
        facts |= {"held": self.position[slot], "writer": self.writer[slot], "issue": self.issue[slot]}
        if sequences is None:
            return facts | {"owner": torch.full_like(slot, UNKNOWN), "length": position + 1}
        # The runs of all sequences as one sorted list: a single search finds the run of every token.
        runs = [((i << 32) + start, id) for i, s in enumerate(sequences) for start, id in s.runs or [(0, UNKNOWN)]]
        starts, ids = torch.tensor(runs, dtype=torch.int64, device=self.device).view(-1, 2).unbind(1)
        lengths = torch.tensor([s.length for s in sequences], dtype=torch.int64, device=self.device)
        owner = ids[torch.searchsorted(starts.contiguous(), (seq << 32) + position, right=True) - 1]
        return facts | {"owner": owner, "length": lengths[seq]}

    def _findings(self, facts: dict[str, torch.Tensor], *reasons: tuple[torch.Tensor, str]) -> list[LedgerFinding]:
        """The tokens to which a reason applies, each with its first reason."""
        applies = torch.stack([condition for condition, _ in reasons])
        bad = applies.any(0).nonzero()[:, 0]
        firsts = applies[:, bad].int().argmax(0).tolist()
        values = {name: fact[bad].tolist() for name, fact in facts.items()}
        findings = []
        for i, first in enumerate(firsts):
            token = {name: value[i] for name, value in values.items()}
            page, offset = divmod(token["slot"], self.page_size)
            reason = reasons[first][1].format_map(token)
            findings.append(LedgerFinding(token["seq"], token["position"], token["slot"], page, offset, reason))
        return sorted(findings)
