"""The sequences of one call: for each its pages, its length, and its new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import torch

from quire.cache.copies import Copies
from quire.cache.packing import PackedTensor, pack, packed_copies
from quire.cache.prefixes import Prefixes
from quire.cache.select import Select
from quire.cache.sequence import NO_POOL, SequenceSnapshot
from quire.cache.shard import Shard
from quire.errors import ArgumentError, StaleBatch, describe
from quire.keywords import refuse_unknown

if TYPE_CHECKING:
    from quire.cache.sequence import Sequence as PoolSequence

    AnySequence = PoolSequence | SequenceSnapshot

INDEX_TYPES = (torch.int32, torch.int64)
NOT_GIVEN: Any = None
"""A tensor that has to be given: without one the constructor names it."""


def is_size(value: object) -> bool:
    """Whether a value is a valid number of sequences, pages or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def is_index(tensor: object) -> bool:
    """Whether a value is a dense tensor of int32 or int64 with at least one axis."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    return tensor.dtype in INDEX_TYPES and tensor.dim() > 0


class Batch:
    """A mixed batch of sequences: some prefill, some decode. `PagePool.step` makes batches; engines that manage pages themselves
    construct them from their own index tensors. The batch aliases these tensors and never copies them. Their values are checked
    when an operator is called.

    The batch of a `PagePool` on the CPU aliases the pool's page table. It is valid until the pool allocates or releases tokens or
    pages again; then every operator raises `StaleBatch`. Copies never become stale: `clone()`, `to(device)`, the batch of a pool on
    another device, and a pickled batch. Pickled and deep-copied batches have no pool; their `sequences` are snapshots.

    Args:
        page_table: int32 or int64 `[seqs, pages_per_seq]`. The page ids of each sequence, in order. Entries after the last page may
            hold any value.
        kv_lens: int32 or int64 `[seqs]`. The length of each sequence, including the new tokens.
        q_starts: int32 or int64 `[seqs + 1]`. The index of each sequence's first new token in q; the last entry is the end. The new
            tokens of sequence i are `q[q_starts[i]:q_starts[i + 1]]`, and are the last tokens of the sequence.
        slots: int32 or int64 `[tokens]`. The slot of each new token, `page * page_size + offset`, -1 to skip it. Default: computed
            from the other three.
        max_q_len: An upper bound of the new tokens of a sequence. Only a hint for speed: results are correct if it is too low, and
            `quire.check` reports it.
        max_kv_len: An upper bound of the lengths; a hint like `max_q_len`.
        copies: (source, target) pages that `quire.write` copies before it writes (copy-on-write).
        sequences: The sequences of the pool, in the order of the batch; a ledger reads them.
        page_size: Slots of a page; needed for the property `slots` if no slots are given.
        shard: `(rank, ranks, interleave)` for context parallelism: the cache holds only the keys whose position p satisfies
            `p // interleave % ranks == rank`, and the page table has the pages of these keys. Lengths and `q_starts` still count
            all tokens of a sequence. `write` skips tokens of other ranks; `attend` sees only keys of this rank, and
            `quire.merge` of all ranks' results is the attention over all keys. Default: the cache holds every key.
        spans: int32 or int64 `[tokens, 2]`: the new token in row i of q sees the keys at positions [begin, end) of its sequence,
            whatever its own position is; none if begin >= end. It replaces causality and window, so a call with spans has no
            `causal`, `window` or `mask` in its options. Default: causality, window and mask decide.
        select: `quire.Select(positions=...)` or `quire.Select(columns=...)`: the only keys that queries see, of those that
            causality and window show (sparse attention). `write` does not read it. Default: all of them.
        prefixes: `quire.Prefixes(...)`: which sequences begin with the same pages. Kernels that can read these pages once for all
            of them; the result is the same. Default: none are known.

    Raises:
        ArgumentError: An index argument is not a dense tensor, a hint is not an int of 0 or more, or the shard, the selection or
            the prefixes are invalid.

    Example:
        >>> import torch, quire
        >>> batch = quire.Batch(
        ...     page_table=torch.tensor([[4, 2], [7, -1]]),
        ...     kv_lens=torch.tensor([6, 3]),        # sequence 0 has 6 tokens, sequence 1 has 3
        ...     q_starts=torch.tensor([0, 1, 4]),    # 1 new token (decode), 3 new tokens (prefill)
        ...     page_size=4,
        ... )
        >>> batch.slots.tolist()
        [9, 28, 29, 30]
        >>> batch.positions.tolist()
        [5, 0, 1, 2]
    """

    __slots__ = (
        "page_table",
        "kv_lens",
        "q_starts",
        "given_slots",
        "max_q_len",
        "max_kv_len",
        "copies",
        "sequences",
        "page_size",
        "shard",
        "spans",
        "select",
        "prefixes",
        "step_id",
        "validated",
        "_slot_buffer",
        "_tokens",
        "_derived",
        "pool_state",
        "state_number",
    )

    def __init__(
        self,
        page_table: torch.Tensor = NOT_GIVEN,
        kv_lens: torch.Tensor = NOT_GIVEN,
        q_starts: torch.Tensor = NOT_GIVEN,
        *,
        slots: torch.Tensor | None = None,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
        copies: Sequence[tuple[int, int]] = (),
        sequences: Sequence[AnySequence] | None = None,
        page_size: int | None = None,
        shard: tuple[int, int, int] | None = None,
        spans: torch.Tensor | None = None,
        select: Select | None = None,
        prefixes: Prefixes | None = None,
        **unknown: NoReturn,
    ):
        if unknown:
            refuse_unknown(Batch.__init__, unknown)
        self.page_table: torch.Tensor = page_table
        """The pages of each sequence, `[seqs, pages_per_seq]`."""
        self.kv_lens: torch.Tensor = kv_lens
        """The length of each sequence with its new tokens, `[seqs]`."""
        self.q_starts: torch.Tensor = q_starts
        """Where the new tokens of each sequence start in q, `[seqs + 1]`."""
        self.given_slots = slots
        """The slots given by the caller; None if they are computed from the page table."""
        self.spans: torch.Tensor | None = spans
        """The keys [begin, end) that each new token sees, `[tokens, 2]`, or None."""
        self.check_tensors()
        _check_numbers(max_q_len, max_kv_len, page_size)
        self.max_q_len: int | None = max_q_len
        """An upper bound of the new tokens of a sequence, or None: a hint."""
        self.max_kv_len: int | None = max_kv_len
        """An upper bound of the lengths, or None: a hint."""
        self.copies: tuple[tuple[int, int], ...] = copies if isinstance(copies, Copies) else tuple(copies)
        """(source, target) pages to copy before this batch is written (copy-on-write). `write` applies them, once for each
        cache."""
        self.sequences: tuple[AnySequence, ...] | None = None if sequences is None else tuple(sequences)
        """The pool's sequences in the order of the batch, or None. A ledger uses them to distinguish the tokens of sequences."""
        self.validated: Any = None
        """The calls for which the values of this batch were validated: `quire.contract.validated`."""
        self.page_size: int | None = page_size
        """Slots of a page, or None."""
        self.shard: Shard | None = Shard.of(shard)
        """The keys that this rank holds, `(rank, ranks, interleave)`; None if it holds all of them."""
        self.select: Select | None = Select.of(select)
        """The only keys that queries see, or None."""
        self.prefixes: Prefixes | None = Prefixes.of(prefixes, self)
        """Which sequences begin with the same pages, or None."""
        self.step_id: tuple[str, int] | None = None
        """The pool and the step that made this batch; None for other batches."""
        self._slot_buffer: torch.Tensor | None = None
        self._tokens: int | None = None
        self._derived: dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}
        self.pool_state, self.state_number = NO_POOL, NO_POOL.now
        """The state counter of the pool whose page table the batch aliases, and its value when the batch was made."""

    def check_tensors(self) -> None:
        """Raises unless every tensor of the batch is a dense tensor."""
        tensors = (self.page_table, self.kv_lens, self.q_starts, self.given_slots, self.spans)
        for i, tensor in enumerate(tensors):
            if not (isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided) and (tensor is not None or i < 3):
                name = ("page_table", "kv_lens", "q_starts", "slots", "spans")[i]
                dense = "dense " if isinstance(tensor, torch.Tensor) else ""
                raise ArgumentError(name, describe(tensor), f"a {dense}tensor of int32 or int64")

    def check_current(self) -> None:
        """Raises `StaleBatch` if this batch aliases the page table of a pool that has changed since."""
        if self.pool_state.now != self.state_number:
            raise StaleBatch(self.state_number, self.pool_state.now)

    @property
    def seqs(self) -> int:
        """Number of sequences."""
        return self.kv_lens.shape[0]

    @property
    def max_keys(self) -> int | None:
        """`max_kv_len`; with a shard, how many of as many tokens are on this rank."""
        return self.max_kv_len if self.shard is None or self.max_kv_len is None else self.shard.count(self.max_kv_len)

    @property
    def device(self) -> torch.device:
        """The device of the index tensors."""
        return self.page_table.device

    @property
    def slots(self) -> torch.Tensor | None:
        """The slot of each new token, `[tokens]`: those given; otherwise computed from the page table, int64, if `page_size` is
        known; otherwise None. `quire.write` does not need them."""
        if self.given_slots is not None or self.page_size is None:
            return self.given_slots
        return self._derive("slots")

    @slots.setter
    def slots(self, slots: torch.Tensor | None) -> None:
        self.given_slots = slots

    @property
    def positions(self) -> torch.Tensor:
        """The position of each new token in its sequence, int64 `[tokens]`, for example for RoPE. The batch of a pool computes
        slots and positions once; any other batch in every access, and reads the number of tokens from `q_starts`."""
        return self._derive("positions")

    def _derive(self, name: str) -> torch.Tensor:
        sources = (self.page_table, self.kv_lens, self.q_starts)
        known = self._derived.get(name)
        if known is not None and all(a is b for a, b in zip(known[0], sources)):
            self.check_current()
            return known[1]
        self.check_current()
        self.check_tensors()
        tokens = int(self.q_starts[-1]) if self._tokens is None else self._tokens
        if name == "slots":
            assert self.page_size is not None
            value = self.slots_of_tokens(tokens, self.page_size)
        else:
            value = self.positions_of_tokens(tokens)
        if self._tokens is not None:
            self._derived[name] = sources, value
        return value

    def positions_of_tokens(self, tokens: int) -> torch.Tensor:
        """The position of each row of q, int64 `[tokens]`; meaningless for padding rows. Nothing is read on the host.

        Args:
            tokens: Number of rows of q.
        """
        at = torch.arange(tokens, device=self.device)
        if not self.seqs:
            return torch.full_like(at, -1)
        seq = self.sequences_of_tokens(tokens).clamp(max=self.seqs - 1)
        return at - self.q_starts.to(torch.int64)[seq + 1] + self.kv_lens.to(torch.int64)[seq]

    def with_spans(self, spans: torch.Tensor | None) -> Batch:
        """A batch that differs from this one only in its spans and shares everything else: tensors, copies, the pool's state.
        Layers that see different keys use the same step. The buffers of a batch made by `Batch.allocate` are shared as well; only
        that batch itself can be filled.

        Args:
            spans: As in `Batch`; None for a batch without spans.

        Raises:
            ArgumentError: `spans` is not a dense tensor.

        Example:
            >>> import torch, quire
            >>> pool = quire.PagePool(pages=8, page_size=4)
            >>> batch = pool.step({pool.sequence(): 3})
            >>> batch.with_spans(torch.tensor([[0, 3]] * 3)).spans.tolist()  # three new tokens that see each other
            [[0, 3], [0, 3], [0, 3]]
        """
        batch = self._like()
        batch.spans = spans
        batch.check_tensors()
        return batch

    def with_select(self, select: Select | None) -> Batch:
        """A batch that differs from this one only in its selection, as `with_spans`.

        Args:
            select: As in `Batch`; None for a batch without one.

        Raises:
            ArgumentError: It is not a `quire.Select`.

        Example:
            >>> import torch, quire
            >>> pool = quire.PagePool(pages=8, page_size=4)
            >>> batch = pool.step({pool.sequence(): 9})
            >>> batch.with_select(quire.Select(positions=torch.full((9, 1, 2), -1))).select
            Select(positions=int64[9, 1, 2] on cpu)
        """
        batch = self._like()
        batch.select = Select.of(select)
        return batch

    def with_prefixes(self, prefixes: Prefixes | None) -> Batch:
        """A batch that differs from this one only in its prefixes, as `with_spans`.

        Args:
            prefixes: As in `Batch`, for example `quire.Prefixes.find(batch)`; None for a batch without them.

        Raises:
            ArgumentError: They are no `quire.Prefixes` of as many sequences.

        Example:
            >>> import quire
            >>> pool = quire.PagePool(pages=64, page_size=16)
            >>> batch = pool.step({pool.sequence(): 9})
            >>> batch.with_prefixes(quire.Prefixes.find(batch)).prefixes
            Prefixes()
        """
        batch = self._like()
        batch.prefixes = Prefixes.of(prefixes, self)
        return batch

    def _like(self) -> Batch:
        """A batch that shares everything with this one and cannot be filled."""
        batch = Batch.__new__(Batch)
        for name in Batch.__slots__:
            setattr(batch, name, getattr(self, name))
        batch._slot_buffer = None
        return batch

    def clone(self) -> Batch:
        """A copy of this batch with its own tensors. It does not become stale.

        Raises:
            StaleBatch: This batch is stale already.
        """
        self.check_current()
        return self._copied(self.device)

    def to(self, device: torch.device | str) -> Batch:
        """This batch on `device`: the batch itself if it is there already, otherwise a copy, made with one asynchronous transfer of
        all tensors.

        Raises:
            StaleBatch: This batch is stale already.
        """
        self.check_current()
        device = torch.device(device)
        mine = self.device
        if device.type == mine.type and (device.index is None or device.index == mine.index):
            return self
        return self._copied(device)

    def _copied(self, device: torch.device) -> Batch:
        named = self._tensors()
        copies = dict(zip(named, packed_copies(list(named.values()), device)))
        return self._with(copies, self.sequences)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the batch by name, each once."""
        self.check_tensors()
        named = {"page_table": self.page_table, "kv_lens": self.kv_lens, "q_starts": self.q_starts}
        if self._slot_buffer is not None:
            named["buffer"] = self._slot_buffer
        if self.given_slots is not None and self.given_slots is not self._slot_buffer:
            named["slots"] = self.given_slots
        if self.spans is not None:
            named["spans"] = self.spans
        if self.select is not None:
            named[self.select.kind] = self.select.entries
        if self.prefixes is not None:
            named |= self.prefixes.tensors
        sources = tuple(named.values())[:3]
        for name, (of, value) in self._derived.items():
            if all(a is b for a, b in zip(of, sources)):
                named[f"derived {name}"] = value
        return named

    def _with(self, named: dict[str, torch.Tensor], sequences: tuple[AnySequence, ...] | None) -> Batch:
        """A batch like this one, with other tensors."""
        sources = (named["page_table"], named["kv_lens"], named["q_starts"])
        buffer = named.get("buffer")
        slots = buffer if buffer is not None and self.given_slots is self._slot_buffer else named.get("slots")
        batch = Batch(*sources, slots=slots, copies=self.copies, sequences=sequences, page_size=self.page_size, shard=self.shard)
        batch.max_q_len, batch.max_kv_len, batch.spans = self.max_q_len, self.max_kv_len, named.get("spans")
        batch.select = _selection_among(named)
        batch.prefixes = None if self.prefixes is None else Prefixes.restored(self.prefixes.numbers, named)
        batch._slot_buffer, batch._tokens, batch.step_id = buffer, self._tokens, self.step_id
        batch._derived = {
            name.removeprefix("derived "): (sources, value) for name, value in named.items() if name.startswith("derived ")
        }
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        self.check_current()
        named = self._tensors()
        memory, spans = pack(list(named.values()))
        sequences = None
        if self.sequences is not None:
            sequences = tuple(SequenceSnapshot(s.id, s.length, list(s.runs)) for s in self.sequences)
        fields = {
            name: getattr(self, name) for name in ("max_q_len", "max_kv_len", "copies", "page_size", "shard", "step_id", "_tokens")
        }
        buffered = self._slot_buffer is not None and self.given_slots is self._slot_buffer
        numbers = None if self.prefixes is None else self.prefixes.numbers
        return _restored, (memory.cpu().numpy(), dict(zip(named, spans)), self.device, fields, sequences, buffered, numbers)

    def sequences_of_tokens(self, tokens: int) -> torch.Tensor:
        """The index of the sequence of each row of q, `[tokens]`; `seqs` for padding rows. Nothing is read on the host.

        Args:
            tokens: Number of rows of q.
        """
        at = torch.arange(tokens, device=self.device, dtype=self.q_starts.dtype)
        return torch.searchsorted(self.q_starts[1:].contiguous(), at, right=True)

    def slots_of_tokens(self, tokens: int, page_size: int, slots: torch.Tensor | None = None) -> torch.Tensor:
        """The slot of each row of k and v, int64 `[tokens]`; -1 for padding rows, for pages that the table does not have, and for
        tokens whose position does not belong to the batch's shard.

        Args:
            tokens: Number of rows of k and v.
            page_size: Slots of a page.
            slots: Slots to use instead of computed ones. Default: those given with the batch.
        """
        slots = self.given_slots if slots is None else slots
        if slots is not None:
            live = torch.arange(tokens, device=self.device) < self.q_starts[-1]
            return torch.where(live, slots.to(torch.int64), -1)
        if not self.seqs or not tokens or not self.page_table.shape[1]:
            return torch.full((tokens,), -1, dtype=torch.int64, device=self.device)
        seq = self.sequences_of_tokens(tokens)
        live = seq < self.seqs
        seq = seq.clamp(max=self.seqs - 1)
        starts = self.q_starts.to(torch.int64)
        at = torch.arange(tokens, device=self.device) - starts[seq + 1] + self.kv_lens.to(torch.int64)[seq]
        if self.shard is not None:
            live &= (at >= 0) & self.shard.owns(at)
            at = self.shard.count(at)
        column = torch.div(at, page_size, rounding_mode="floor")
        live &= (column >= 0) & (column < self.page_table.shape[1])
        page = self.page_table[seq, column.clamp(0, self.page_table.shape[1] - 1)].to(torch.int64)
        return torch.where(live & (page >= 0), page * page_size + at % page_size, -1)

    @classmethod
    def allocate(
        cls,
        seqs: int,
        pages_per_seq: int,
        tokens: int,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int32,
        shard: tuple[int, int, int] | None = None,
        spans: bool = False,
    ) -> Batch:
        """Makes an empty batch with buffers of a fixed size, for CUDA graphs. `fill` updates the buffers in place.

        Args:
            seqs, pages_per_seq, tokens: The maximum number of sequences, of pages of a sequence, and of new tokens.
            max_q_len, max_kv_len: Upper bounds of the lengths, for all later steps.
            device: The device of the buffers.
            dtype: torch.int32 or torch.int64.
            shard: As in `Batch`, for all later steps.
            spans: Whether there is a buffer for spans; every `fill` then needs them.

        Raises:
            ArgumentError: A size is not an int of 0 or more, `dtype` is not an index type, or the shard is invalid.

        Example:
            >>> import quire
            >>> pool = quire.PagePool(pages=8, page_size=4)
            >>> step = pool.step({pool.sequence(): 3})
            >>> batch = quire.Batch.allocate(seqs=2, pages_per_seq=2, tokens=4)
            >>> batch.fill(step.page_table, step.kv_lens, step.q_starts).kv_lens.tolist()
            [3, 0]
        """
        for name, size in (("seqs", seqs), ("pages_per_seq", pages_per_seq), ("tokens", tokens)):
            if not is_size(size):
                raise ArgumentError(name, describe(size), "an int of 0 or more")
        if not isinstance(dtype, torch.dtype) or dtype not in INDEX_TYPES:
            raise ArgumentError("dtype", describe(dtype), "torch.int32 or torch.int64")
        batch = cls(
            torch.full((seqs, pages_per_seq), -1, dtype=dtype, device=device),
            torch.zeros(seqs, dtype=dtype, device=device),
            torch.zeros(seqs + 1, dtype=dtype, device=device),
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            shard=shard,
            spans=torch.zeros(tokens, 2, dtype=dtype, device=device) if spans else None,
        )
        batch._slot_buffer = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        return batch

    def fill(
        self,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        q_starts: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        copies: Sequence[tuple[int, int]] = (),
        sequences: Sequence[AnySequence] | None = None,
        spans: torch.Tensor | None = None,
    ) -> Batch:
        """Copies the index tensors of another step into the buffers of this batch. Remaining sequences become empty (no new
        tokens).

        Args:
            page_table, kv_lens, q_starts: As in `Batch`, at most as large as allocated; those of the shard, if the batch has one.
            slots: As in `Batch`. A batch that was filled with slots once needs them every time, because a captured graph reads
                them.
            copies, sequences: Those of a pool's step. A captured graph does not apply copies: call `cache.copy_pages(copies)` for
                each cache before the graph is replayed.
            spans: As in `Batch`; needed every time if the batch was allocated with spans, refused otherwise.

        Returns:
            This batch.

        Raises:
            ArgumentError: The batch was not made by `Batch.allocate`, or a tensor has a wrong type or is larger than allocated.
        """
        buffer = self._check_fill(page_table, kv_lens, q_starts, slots, sequences)
        self._check_spans(spans, buffer.shape[0])
        seqs, width = page_table.shape
        # Values that do not fit the buffers' type saturate, so an invalid value stays invalid without a device read. The results
        # are new tensors, so a batch may also be filled from itself.
        fits = torch.iinfo(self.kv_lens.dtype)
        page_table, kv_lens, q_starts = (t.long().clamp(fits.min, fits.max) for t in (page_table, kv_lens, q_starts))
        self.page_table.fill_(-1)[:seqs, :width].copy_(page_table)
        self.kv_lens.zero_()[:seqs].copy_(kv_lens)
        self.q_starts[: seqs + 1].copy_(q_starts)
        self.q_starts[seqs + 1 :] = q_starts[-1]
        if slots is not None:
            self.given_slots = buffer
            buffer[: slots.shape[0]].copy_(slots.clone())
            buffer[slots.shape[0] :] = -1
        if spans is not None and self.spans is not None:
            self.spans.zero_()[: spans.shape[0]].copy_(spans.long().clamp(fits.min, fits.max))
        self.copies = copies if isinstance(copies, Copies) else tuple(copies)
        self.sequences = None if sequences is None else tuple(sequences)
        self._derived, self._tokens, self.step_id = {}, None, None
        return self

    def _check_fill(
        self,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        q_starts: torch.Tensor,
        slots: torch.Tensor | None,
        sequences: Sequence[AnySequence] | None,
    ) -> torch.Tensor:
        """Raises unless `fill` can copy these tensors; returns the buffer for slots."""
        buffer = self._slot_buffer
        if buffer is None:
            raise ArgumentError("fill", "a batch that aliases the caller's tensors", "a batch made by Batch.allocate")
        Batch(page_table, kv_lens, q_starts, slots=slots)
        for name, tensor in (("page_table", page_table), ("kv_lens", kv_lens), ("q_starts", q_starts), ("slots", slots)):
            # `fill` would cast any type. The constructor leaves the types of aliased tensors to the rules.
            if tensor is not None and (tensor.dtype not in INDEX_TYPES or tensor.is_meta != buffer.is_meta):
                raise ArgumentError(name, describe(tensor), "a tensor of int32 or int64")
        if page_table.dim() != 2 or kv_lens.shape != page_table.shape[:1] or q_starts.shape != (kv_lens.shape[0] + 1,):
            given = ", ".join(
                f"{n} {list(t.shape)}" for n, t in (("page_table", page_table), ("kv_lens", kv_lens), ("q_starts", q_starts))
            )
            raise ArgumentError("fill", given, "page_table [seqs, pages_per_seq], kv_lens [seqs], q_starts [seqs + 1]")
        if slots is None and self.given_slots is not None:
            raise ArgumentError("slots", None, "a tensor [tokens]: this batch was filled with slots before")
        seqs, width = page_table.shape
        sizes = (("seqs", seqs, self.seqs), ("pages_per_seq", width, self.page_table.shape[1]))
        for name, size, capacity in (*sizes, ("tokens", 0 if slots is None else slots.shape[0], buffer.shape[0])):
            if size > capacity:
                raise ArgumentError(name, size, f"at most {capacity}, as allocated")
        if sequences is not None and len(sequences) != seqs:
            raise ArgumentError("sequences", f"{len(sequences)} of them", f"{seqs}, one for each sequence of page_table")
        return buffer

    def _check_spans(self, spans: torch.Tensor | None, tokens: int) -> None:
        """Raises unless `fill` can copy these spans."""
        if (spans is None) != (self.spans is None):
            allowed = "None: the batch was allocated without spans" if self.spans is None else "a tensor [tokens, 2]: it has spans"
            raise ArgumentError("spans", describe(spans), allowed)
        if spans is not None and (not is_index(spans) or spans.shape[1:] != (2,) or spans.shape[0] > tokens):
            raise ArgumentError("spans", describe(spans), f"int32 or int64 [tokens, 2] of at most {tokens} tokens, as allocated")

    @classmethod
    def from_vllm(
        cls,
        *,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
    ) -> Batch:
        """Makes a batch from the arguments of vLLM's attention operators. Nothing is copied.

        Args:
            block_table: vLLM's name of `page_table`.
            seq_lens: vLLM's name of `kv_lens`; both include the new tokens.
            query_start_loc: vLLM's name of `q_starts`.
            slot_mapping: vLLM's name of `slots`; -1 skips a token.
            max_query_len, max_seq_len: vLLM's names of `max_q_len` and `max_kv_len`.

        Raises:
            ArgumentError: as `Batch`.
        """
        return cls(block_table, seq_lens, query_start_loc, slots=slot_mapping, max_q_len=max_query_len, max_kv_len=max_seq_len)

    @classmethod
    def from_flash_attn(
        cls,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        seqlen_q: int | None = None,
        seqused_k: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
        appends: bool | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Batch:
        """Makes a batch from the arguments of FlashAttention.

        Args:
            block_table: FlashAttention's name of `page_table`.
            cu_seqlens_q: FlashAttention's name of `q_starts` (varlen functions). Give either this or `seqlen_q`.
            seqlen_q: The number of new tokens of every sequence, for `q [batch, seqlen_q, heads, dim]`.
            seqused_k: FlashAttention's name of `kv_lens`. Give either this or `cache_seqlens`.
            cache_seqlens: The lengths given to `flash_attn_with_kvcache`.
            appends: Required with `cache_seqlens`. True if k and v are passed to `flash_attn_with_kvcache`: the lengths then do not
                include the new tokens. False otherwise.
            max_seqlen_q, max_seqlen_k: FlashAttention's names of `max_q_len` and `max_kv_len`.

        Raises:
            ArgumentError: Both or neither of two alternative arguments are given, or a tensor has a wrong type or shape.
        """
        if (seqused_k is None) == (cache_seqlens is None):
            raise ArgumentError("seqused_k", "both or neither of seqused_k and cache_seqlens", "exactly one of them")
        if (cu_seqlens_q is None) == (seqlen_q is None):
            raise ArgumentError("cu_seqlens_q", "both or neither of cu_seqlens_q and seqlen_q", "exactly one of them")
        if (cache_seqlens is None) != (appends is None) or not isinstance(appends, bool | None):
            raise ArgumentError("appends", describe(appends), "True or False with cache_seqlens, None with seqused_k")
        lens = seqused_k if seqused_k is not None else cache_seqlens
        for name, tensor in (("seqused_k or cache_seqlens", lens), ("cu_seqlens_q", cu_seqlens_q)):
            if not is_index(tensor) and not (name == "cu_seqlens_q" and tensor is None):
                raise ArgumentError(name, describe(tensor), "a tensor of int32 or int64")
        assert lens is not None
        if cu_seqlens_q is not None and (cu_seqlens_q.shape != (lens.shape[0] + 1,) or cu_seqlens_q.device != lens.device):
            raise ArgumentError("cu_seqlens_q", describe(cu_seqlens_q), f"[{lens.shape[0] + 1}] on {lens.device}")
        if cu_seqlens_q is None:
            assert seqlen_q is not None
            if not is_size(seqlen_q):
                raise ArgumentError("seqlen_q", describe(seqlen_q), "an int of 0 to 2^31 - 1")
            if lens.dim() != 1:
                raise ArgumentError("seqused_k or cache_seqlens", describe(lens), "[seqs]")
            cu_seqlens_q = torch.arange(lens.shape[0] + 1, device=lens.device, dtype=lens.dtype) * seqlen_q
            max_seqlen_q = seqlen_q if max_seqlen_q is None else max_seqlen_q
        if appends:
            lens = lens + cu_seqlens_q.diff().to(lens.dtype)
        return cls(block_table, lens, cu_seqlens_q, max_q_len=max_seqlen_q, max_kv_len=max_seqlen_k)

    @classmethod
    def from_flashinfer(
        cls,
        *,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        page_size: int,
        qo_indptr: torch.Tensor | None = None,
        pages_per_seq: int | None = None,
    ) -> Batch:
        """Makes a batch from the arguments of FlashInfer's wrappers, whose page table is in CSR form. The page table is new memory.

        Args:
            kv_indptr: `[seqs + 1]`, where the pages of each sequence start in `kv_indices`.
            kv_indices: The page ids of all sequences.
            kv_last_page_len: `[seqs]`, the tokens in the last page of each sequence.
            page_size: Slots of a page.
            qo_indptr: FlashInfer's name of `q_starts`. Default: every sequence has one new token, as in the decode wrapper.
            pages_per_seq: Columns of the page table. Default: read from `kv_indptr` on the host.

        Raises:
            ArgumentError: A tensor has a wrong type, shape or device; in host memory also if its values are invalid.
        """
        cls._check_flashinfer(kv_indptr, kv_indices, kv_last_page_len, page_size, pages_per_seq)
        seqs, counts = kv_last_page_len.shape[0], kv_indptr.diff()
        width = pages_per_seq if pages_per_seq is not None else (int(counts.max()) if seqs else 0)
        column = torch.arange(width, device=kv_indptr.device)
        at = kv_indptr[:-1, None].to(torch.int64) + column
        inside = column < counts[:, None]
        if kv_indices.numel():
            table = torch.where(inside, kv_indices[at.clamp(max=kv_indices.shape[0] - 1)], -1)
        else:
            table = torch.full((seqs, width), -1, dtype=kv_indices.dtype, device=kv_indices.device)
        kv_lens = torch.where(counts > 0, (counts - 1) * page_size + kv_last_page_len, 0)
        if qo_indptr is None:
            qo_indptr = torch.arange(seqs + 1, device=kv_indptr.device, dtype=kv_indptr.dtype)
        return cls(table, kv_lens, qo_indptr)

    @staticmethod
    def _check_flashinfer(
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        page_size: int,
        pages_per_seq: int | None,
    ) -> None:
        """Raises unless the arguments of `from_flashinfer` fit together."""
        for name, tensor in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices), ("kv_last_page_len", kv_last_page_len)):
            if not is_index(tensor) or tensor.dim() != 1:
                raise ArgumentError(name, describe(tensor), "a tensor of int32 or int64")
            if tensor.device != kv_indptr.device:
                raise ArgumentError(name, describe(tensor), f"on {kv_indptr.device}, where kv_indptr is")
        if not is_size(page_size) or page_size < 1:
            raise ArgumentError("page_size", describe(page_size), "1 to 2^31 - 1")
        if pages_per_seq is not None and not is_size(pages_per_seq):
            raise ArgumentError("pages_per_seq", describe(pages_per_seq), "an int of 0 to 2^31 - 1, or None")
        if pages_per_seq is None and kv_indptr.is_meta:
            raise ArgumentError("pages_per_seq", None, "an int: kv_indptr has no values to read it from")
        seqs = kv_last_page_len.shape[0]
        if kv_indptr.shape != (seqs + 1,):
            raise ArgumentError("kv_indptr", describe(kv_indptr), f"[{seqs + 1}]: one more than kv_last_page_len")
        counts = kv_indptr.diff()
        if kv_indptr.device.type == "cpu" and seqs:
            if int(counts.min()) < 0 or int(kv_indptr[0]) != 0 or int(kv_indptr[-1]) > kv_indices.shape[0]:
                raise ArgumentError(
                    "kv_indptr", kv_indptr.tolist(), f"0 first, never falling, at most {kv_indices.shape[0]} (kv_indices)"
                )
            full = kv_last_page_len[counts > 0]
            if full.numel() and not 1 <= int(full.min()) <= int(full.max()) <= page_size:
                raise ArgumentError("kv_last_page_len", kv_last_page_len.tolist(), f"1 to page_size = {page_size}")

    def __repr__(self) -> str:
        hints = "".join(
            f", {name}={getattr(self, name)}" for name in ("max_q_len", "max_kv_len") if getattr(self, name) is not None
        )
        if self.shard is not None:
            hints += f", shard={tuple(self.shard)}"
        if self.spans is not None:
            hints += f", spans={describe(self.spans)}"
        if self.select is not None:
            hints += f", select={self.select}"
        if self.prefixes is not None:
            hints += f", prefixes={self.prefixes}"
        tensors = ", ".join(f"{name}={describe(getattr(self, name))}" for name in ("page_table", "kv_lens", "q_starts"))
        return f"Batch({tensors}{hints})"


def _check_numbers(max_q_len: object, max_kv_len: object, page_size: object) -> None:
    """Raises unless the numbers of a batch are ints in range, or None."""
    for name, hint in (("max_q_len", max_q_len), ("max_kv_len", max_kv_len)):
        if hint is not None and (not isinstance(hint, int) or isinstance(hint, bool) or hint < 0):
            raise ArgumentError(name, describe(hint), "an int of 0 or more, known on the host, or None")
    if page_size is not None and (not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1):
        raise ArgumentError("page_size", describe(page_size), "an int of 1 or more, or None")


def _selection_among(named: dict[str, torch.Tensor]) -> Select | None:
    """The selection of a batch with these tensors."""
    if "positions" in named:
        return Select(positions=named["positions"])
    return Select(columns=named["columns"]) if "columns" in named else None


def _restored(
    memory: numpy.ndarray,
    spans: dict[str, PackedTensor],
    device: torch.device,
    fields: dict[str, Any],
    sequences: tuple[SequenceSnapshot, ...] | None,
    buffered: bool,
    prefixes: tuple[int, ...] | None = None,
) -> Batch:
    """Unpickles a batch."""
    bytes_ = torch.from_numpy(memory).to(device)
    named = {name: span.of(bytes_) for name, span in spans.items()}
    batch = Batch(named["page_table"], named["kv_lens"], named["q_starts"], slots=named.get("slots"), sequences=sequences)
    batch.spans = named.get("spans")
    batch.select = _selection_among(named)
    batch.prefixes = None if prefixes is None else Prefixes.restored(prefixes, named)
    for name, value in fields.items():
        setattr(batch, name, value)
    batch._slot_buffer = named.get("buffer")
    if buffered:
        batch.given_slots = batch._slot_buffer
    sources = (batch.page_table, batch.kv_lens, batch.q_starts)
    for name, tensor in named.items():
        if name.startswith("derived "):
            batch._derived[name.removeprefix("derived ")] = sources, tensor
    return batch
