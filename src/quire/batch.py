"""Which tokens a call is about: for each sequence its pages, its length, and its run of new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch

from quire.cache.copies import Copies
from quire.cache.packing import Span, pack, packed_copies
from quire.cache.sequence import SequenceSnapshot
from quire.errors import ArgumentError, StaleBatch, describe

if TYPE_CHECKING:
    from quire.cache.sequence import Sequence as PoolSequence
    from quire.cache.step_table import Clock

    AnySequence = PoolSequence | SequenceSnapshot

INDEX_TYPES = (torch.int32, torch.int64)


def is_size(value: object) -> bool:
    """Whether it is a number of sequences, pages or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def is_index(tensor: object) -> bool:
    """Whether it is a dense tensor of int32 or int64, of one axis or more."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    return tensor.dtype in INDEX_TYPES and tensor.dim() > 0


class Batch:
    """A mixed batch of sequences. It aliases the caller's tensors, never copies them, and trusts nothing: `check` and the
    operators look at the values.

        page_table  [seqs, pages_per_seq]   page ids of a sequence, in order
        kv_lens     [seqs]                  all tokens of a sequence, the new ones included
        q_starts    [seqs + 1]              where a sequence's new tokens start among the rows of q; the last entry is their end
        slots       [tokens]                where each new token is written, `page * page_size + offset`, -1 to skip it;
                                            by default they follow from the other three
        positions   [tokens]                where each new token stands in its sequence, for RoPE

    The maxima are hints for speed. A low one is reported by `check` and never truncates.

    The batch of a `PagePool` on the CPU aliases the pool's page table. It is valid until the pool gives or takes tokens or
    pages again; then `check_current`, and with it every operator, raises `StaleBatch`. Copies never become stale: `clone()`,
    `to(device)`, a batch that a pool made for another device, and a pickled one. Pickled and deep-copied
    batches have their own tensors and no pool; their `sequences` are snapshots.
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
        "step_id",
        "validated",
        "_slot_buffer",
        "_tokens",
        "_derived",
        "clock",
        "number",
    )

    def __init__(
        self,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        q_starts: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
        copies: Sequence[tuple[int, int]] = (),
        sequences: Sequence[AnySequence] | None = None,
        page_size: int | None = None,
    ):
        self.page_table, self.kv_lens, self.q_starts = page_table, kv_lens, q_starts
        self.given_slots = slots
        """The slots that the caller gave, which `write` then uses; None if they follow from the table."""
        self.check_tensors()
        for name, hint in (("max_q_len", max_q_len), ("max_kv_len", max_kv_len)):
            if hint is not None and (not isinstance(hint, int) or isinstance(hint, bool) or hint < 0):
                raise ArgumentError(name, describe(hint), "an int of 0 or more, known on the host, or None")
        if page_size is not None and (not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1):
            raise ArgumentError("page_size", describe(page_size), "an int of 1 or more, or None")
        self.max_q_len, self.max_kv_len = max_q_len, max_kv_len
        self.copies: tuple[tuple[int, int], ...] = copies if isinstance(copies, Copies) else tuple(copies)
        """(source, target) pages to copy before this batch is written: a pool's copy-on-write. `write` applies them. A pool's
        have an id, and a cache applies them once."""
        self.sequences: tuple[AnySequence, ...] | None = None if sequences is None else tuple(sequences)
        """The pool's sequences, row by row; they let a ledger tell one sequence's tokens from another's."""
        self.validated: Any = None
        """For which calls its values were found legal: `quire.contract.validated`."""
        self.page_size = page_size
        """Slots of a page: needed for `slots` where none were given. A pool's batch knows it."""
        self.step_id: tuple[str, int] | None = None
        """The pool and the step that this batch comes from; None if no pool made it."""
        self._slot_buffer: torch.Tensor | None = None
        self._tokens: int | None = None
        self._derived: dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}
        self.clock: Clock | None = None
        self.number = 0

    def check_tensors(self) -> None:
        """Raises unless every tensor of the batch is a dense tensor."""
        tensors = (self.page_table, self.kv_lens, self.q_starts, self.given_slots)
        for i, tensor in enumerate(tensors):
            if not (isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided) and (tensor is not None or i < 3):
                name = ("page_table", "kv_lens", "q_starts", "slots")[i]
                dense = "dense " if isinstance(tensor, torch.Tensor) else ""
                raise ArgumentError(name, describe(tensor), f"a {dense}tensor of int32 or int64")

    def check_current(self) -> None:
        """Raises `StaleBatch` if this batch aliases the tables of a pool that has changed since. One comparison."""
        if self.clock is not None and self.clock.now != self.number:
            raise StaleBatch(self.number, self.clock.now)

    @property
    def seqs(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.page_table.device

    @property
    def slots(self) -> torch.Tensor | None:
        """The slot of each new token: those that were given; otherwise computed from the table, int64 `[tokens]`, if `page_size` is
        known, and None if it is not. `write` needs them computed by nobody: it looks at `given_slots` and derives the rest."""
        if self.given_slots is not None or self.page_size is None:
            return self.given_slots
        return self._derive("slots")

    @slots.setter
    def slots(self, slots: torch.Tensor | None) -> None:
        self.given_slots = slots

    @property
    def positions(self) -> torch.Tensor:
        """The position of each new token in its sequence, int64 `[tokens]`. A pool's batch computes slots and positions once;
        any other batch in every access, and reads the number of tokens from `q_starts`."""
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
            value = self._positions_of_tokens(tokens)
        if self._tokens is not None:
            self._derived[name] = sources, value
        return value

    def _positions_of_tokens(self, tokens: int) -> torch.Tensor:
        at = torch.arange(tokens, device=self.device)
        if not self.seqs:
            return torch.full_like(at, -1)
        row = self.rows_of_tokens(tokens).clamp(max=self.seqs - 1)
        return at - self.q_starts.to(torch.int64)[row + 1] + self.kv_lens.to(torch.int64)[row]

    def clone(self) -> Batch:
        """A batch with tensors of its own, which nothing changes later."""
        self.check_current()
        return self._copied(self.device)

    def to(self, device: torch.device | str) -> Batch:
        """This batch on a device: itself if it is there already, else a copy. All tensors, slots and positions included if
        they were computed, cross in one asynchronous copy."""
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
        """Every tensor of the batch by name, once."""
        self.check_tensors()
        named = {"page_table": self.page_table, "kv_lens": self.kv_lens, "q_starts": self.q_starts}
        if self._slot_buffer is not None:
            named["buffer"] = self._slot_buffer
        if self.given_slots is not None and self.given_slots is not self._slot_buffer:
            named["slots"] = self.given_slots
        sources = tuple(named.values())[:3]
        for name, (of, value) in self._derived.items():
            if all(a is b for a, b in zip(of, sources)):
                named[f"derived {name}"] = value
        return named

    def _with(self, named: dict[str, torch.Tensor], sequences: tuple[AnySequence, ...] | None) -> Batch:
        """A batch like this one, of other tensors with these names."""
        sources = (named["page_table"], named["kv_lens"], named["q_starts"])
        buffer = named.get("buffer")
        slots = buffer if buffer is not None and self.given_slots is self._slot_buffer else named.get("slots")
        batch = Batch(*sources, slots=slots, copies=self.copies, sequences=sequences, page_size=self.page_size)
        batch.max_q_len, batch.max_kv_len = self.max_q_len, self.max_kv_len
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
        fields = {name: getattr(self, name) for name in ("max_q_len", "max_kv_len", "copies", "page_size", "step_id", "_tokens")}
        buffered = self._slot_buffer is not None and self.given_slots is self._slot_buffer
        return _restored, (memory.cpu().numpy(), dict(zip(named, spans)), self.device, fields, sequences, buffered)

    def rows_of_tokens(self, tokens: int) -> torch.Tensor:
        """The sequence of each of `tokens` rows of q, `[tokens]`; padding rows get `seqs`. No host read."""
        at = torch.arange(tokens, device=self.device, dtype=self.q_starts.dtype)
        return torch.searchsorted(self.q_starts[1:].contiguous(), at, right=True)

    def slots_of_tokens(self, tokens: int, page_size: int, slots: torch.Tensor | None = None) -> torch.Tensor:
        """The slot of each of `tokens` rows of k and v, int64 `[tokens]`, -1 for padding rows and pages a table leaves
        out. Slots that are given, here or with the batch, are taken as they are for every row that is not padding."""
        slots = self.given_slots if slots is None else slots
        if slots is not None:
            live = torch.arange(tokens, device=self.device) < self.q_starts[-1]
            return torch.where(live, slots.to(torch.int64), -1)
        if not self.seqs or not tokens or not self.page_table.shape[1]:
            return torch.full((tokens,), -1, dtype=torch.int64, device=self.device)
        row = self.rows_of_tokens(tokens)
        live = row < self.seqs
        row = row.clamp(max=self.seqs - 1)
        starts = self.q_starts.to(torch.int64)
        at = torch.arange(tokens, device=self.device) - starts[row + 1] + self.kv_lens.to(torch.int64)[row]
        column = torch.div(at, page_size, rounding_mode="floor")
        live &= (column >= 0) & (column < self.page_table.shape[1])
        page = self.page_table[row, column.clamp(0, self.page_table.shape[1] - 1)].to(torch.int64)
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
    ) -> Batch:
        """A batch that owns buffers of a fixed size, for captured graphs: `fill` changes them in place. It starts empty."""
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
    ) -> Batch:
        """Takes over the values of another step, in place. Rows that are left over become empty (q_len 0). A batch that was
        once filled with slots needs them every time: a captured graph goes on reading them. A step of a pool brings its
        `copies` and `sequences`; a captured graph does not see copies: apply them to each cache before it is replayed."""
        buffer = self._slot_buffer
        if buffer is None:
            raise ArgumentError("fill", "a batch that aliases its caller's tensors", "a batch made by Batch.allocate")
        Batch(page_table, kv_lens, q_starts, slots=slots)
        for name, tensor in (("page_table", page_table), ("kv_lens", kv_lens), ("q_starts", q_starts), ("slots", slots)):
            # The copies below would cast any type; an aliased tensor is left to the rules.
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
        for name, size, room in (*sizes, ("tokens", 0 if slots is None else slots.shape[0], buffer.shape[0])):
            if size > room:
                raise ArgumentError(name, size, f"at most {room}, as allocated")
        if sequences is not None and len(sequences) != seqs:
            raise ArgumentError("sequences", f"{len(sequences)} of them", f"{seqs}, one for each row")
        # What does not fit the buffers' type saturates: a bad value stays a bad one, and no device is asked. The results are
        # new tensors, so a batch may also be filled from itself.
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
        self.copies = copies if isinstance(copies, Copies) else tuple(copies)
        self.sequences = None if sequences is None else tuple(sequences)
        self._derived, self._tokens, self.step_id = {}, None, None
        return self

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
        """vLLM's words. `seq_lens` counts all tokens there too; `slot_mapping` -1 is skipped. Nothing is copied."""
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
        """FlashAttention's words, varlen (`cu_seqlens_q`) or `q [batch, seqlen_q, ...]`.

        `seqused_k` counts all tokens. `cache_seqlens` counts those *before* the call when k and v are passed to
        `flash_attn_with_kvcache`, and all of them otherwise: say which with `appends`."""
        if (seqused_k is None) == (cache_seqlens is None):
            raise ArgumentError("seqused_k", "both or neither of seqused_k and cache_seqlens", "exactly one of them")
        if (cu_seqlens_q is None) == (seqlen_q is None):
            raise ArgumentError("cu_seqlens_q", "both or neither of cu_seqlens_q and seqlen_q", "exactly one of them")
        if (cache_seqlens is None) != (appends is None) or not isinstance(appends, bool | None):
            raise ArgumentError("appends", describe(appends), "True or False beside cache_seqlens, None beside seqused_k")
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
        """FlashInfer's words: pages in CSR form, all tokens counted. Without `qo_indptr` every sequence has one new token
        (the decode wrapper). The table is new memory; its width is `pages_per_seq`, or read from `kv_indptr` on the host."""
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

    def __repr__(self) -> str:
        hints = "".join(
            f", {name}={getattr(self, name)}" for name in ("max_q_len", "max_kv_len") if getattr(self, name) is not None
        )
        tensors = ", ".join(f"{name}={describe(getattr(self, name))}" for name in ("page_table", "kv_lens", "q_starts"))
        return f"Batch({tensors}{hints})"


def _restored(
    memory: numpy.ndarray,
    spans: dict[str, Span],
    device: torch.device,
    fields: dict[str, Any],
    sequences: tuple[SequenceSnapshot, ...] | None,
    buffered: bool,
) -> Batch:
    """A batch that was pickled."""
    bytes_ = torch.from_numpy(memory).to(device)
    named = {name: span.of(bytes_) for name, span in spans.items()}
    batch = Batch(named["page_table"], named["kv_lens"], named["q_starts"], slots=named.get("slots"), sequences=sequences)
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
