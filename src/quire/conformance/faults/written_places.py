"""Faults of writes: where tokens are stored, and which ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.conformance.cases.formats import GROUP, PACK
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.faults.fault import Fault, Parameters
from quire.conformance.oracle import write as oracle
from quire.conformance.oracle.write import RIGHT, Rows, Spots, WriteOutcome, WriteStages, WriteWork

PARTS: tuple[Parameters, ...] = ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"})
ORDERS: dict[str, Callable[[int], torch.Tensor]] = {
    "first": lambda heads: torch.zeros(heads, dtype=torch.long),
    "reversed": lambda heads: torch.arange(heads).flip(0),
    "next": lambda heads: torch.arange(heads).roll(-1),
}


# Slots.


def with_slots(change: Callable[[WriteWork], torch.Tensor]) -> WriteStages:
    return RIGHT.replace(slots=change)


def _moved(by: int) -> WriteStages:
    return with_slots(lambda w: torch.where(w.live_slots >= 0, w.live_slots + by, -1))


def _skipped_stored(to: str) -> WriteStages:
    def slots(w: WriteWork) -> torch.Tensor:
        last = w.call.k_pages.shape[0] * w.case.page_size - 1
        return torch.where(w.live_slots < 0, last if to == "last" else 0, w.live_slots)

    return with_slots(slots)


def sequences_of(call: WriteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each token, and its number among the new tokens of its sequence."""
    seq = torch.arange(call.case.seqs).repeat_interleave(torch.tensor(call.case.q_lens))
    first = torch.tensor(call.case.q_lens).cumsum(0) - torch.tensor(call.case.q_lens)
    return seq, torch.arange(call.live) - first[seq]


def _by_table(position: Callable[[WriteCall], torch.Tensor]) -> WriteStages:
    """Slots follow from the page table, at these positions in the sequences."""

    def slots(w: WriteWork) -> torch.Tensor:
        assert w.call.page_table is not None
        at, (seq, _) = position(w.call).clamp(min=0), sequences_of(w.call)
        page = w.call.page_table.cpu().long()[seq, at // w.case.page_size]
        return torch.where(w.live_slots < 0, -1, page * w.case.page_size + at % w.case.page_size)

    return with_slots(slots)


def own_positions(call: WriteCall) -> torch.Tensor:
    """The position of each token in its sequence."""
    seq, t = sequences_of(call)
    context = torch.tensor(call.case.kv_lens) - torch.tensor(call.case.q_lens)
    return context[seq] + t


def _last_missing() -> WriteStages:
    def slots(w: WriteWork) -> torch.Tensor:
        seq, t = sequences_of(w.call)
        return torch.where(t == torch.tensor(w.case.q_lens)[seq] - 1, -1, w.live_slots)

    return with_slots(slots)


def _missing(rows: list[int]) -> WriteStages:
    def slots(w: WriteWork) -> torch.Tensor:
        kept = w.live_slots.clone()
        kept[rows] = -1
        return kept

    return with_slots(slots)


def _rows_not_stored(done: Any) -> Sequence[Parameters]:
    rows = done.rows_wrong.nonzero().flatten().tolist()
    return [{"rows": rows}] if rows and len(rows) < done.call.live else []


def _other_page_size(size: int) -> WriteStages:
    def locate(w: WriteWork, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return oracle.locate(w, slots // size * w.case.page_size + slots % size)

    return RIGHT.replace(locate=locate)


def _pages(change: Callable[[WriteWork, torch.Tensor], torch.Tensor]) -> WriteStages:
    def locate(w: WriteWork, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, offset = oracle.locate(w, slots)
        return change(w, page), offset

    return RIGHT.replace(locate=locate)


def _wrapped() -> WriteStages:
    def place(w: WriteWork, part: str, page: torch.Tensor, offset: torch.Tensor) -> Spots:
        stride = getattr(w.call, f"{part}_pages").stride(0)
        if 2**32 % stride:
            raise IndexError("an address that is wrapped within a page")
        return oracle.place(w, part, torch.where(page * stride >= 2**31, page - 2**32 // stride, page), offset)

    return RIGHT.replace(place=place)


def _first_address(call: WriteCall) -> int:
    """The address of the last page that is written, in elements."""
    slot = int(call.slots[: call.live].max()) if call.live else 0
    return slot // call.case.page_size * call.k_pages.stride(0)


# Heads, K and V.


def prepared(change: Callable[[WriteWork, WriteStages, str, Rows], Rows], parts: str = "kv") -> WriteStages:
    """What is stored of these parts is `change(w, stages, part, rows)`."""

    def prepare(w: WriteWork, s: WriteStages, part: str) -> Rows:
        rows = oracle.prepare(w, s, part)
        return change(w, s, part, rows) if part in parts else rows

    return RIGHT.replace(prepare=prepare)


def _heads(order: str, parts: str) -> WriteStages:
    def change(w: WriteWork, s: WriteStages, part: str, rows: Rows) -> Rows:
        at = ORDERS[order](rows.x.shape[1])
        return Rows(rows.x[:, at], rows.size[:, at], rows.roundings)

    return prepared(change, parts)


def with_arguments(change: Callable[[WriteCall], WriteCall]) -> WriteStages:
    """Keys, values and queries are those of `change(call)`."""

    def prepare(w: WriteWork, s: WriteStages, part: str) -> Rows:
        return oracle.prepare(WriteWork(change(w.call)), s, part)

    return RIGHT.replace(prepare=prepare)


def _swapped(where: str) -> WriteStages:
    def swapped(call: WriteCall) -> WriteCall:
        assert call.v is not None
        return replace(call, k=call.v, v=call.k)

    if where == "arguments":
        return with_arguments(swapped)
    return prepared(lambda w, s, part, rows: oracle.prepare(w, s, "v" if part == "k" else "k"))


def _dense(call: WriteCall) -> WriteCall:
    """The call with new tokens that are read as if they were contiguous."""

    def dense(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())

    k = dense(call.k)
    assert k is not None
    return replace(call, k=k, v=dense(call.v), q=dense(call.q))


def _part_missing(part: str) -> WriteStages:
    def finish(w: WriteWork, into: WriteOutcome) -> WriteOutcome:
        stored = into.parts[part]
        stored.written, stored.free = torch.zeros_like(stored.written), torch.zeros_like(stored.free)
        for scale in (stored.scale, stored.groups):
            if scale is not None:
                scale.fill_(torch.nan)
        return into

    return RIGHT.replace(finish=finish)


# Layouts.


def _as_other_layout(parts: str) -> WriteStages:
    """Slots and heads of a page are exchanged: the layout is taken for the other one of nhd and hnd."""

    def place(w: WriteWork, part: str, page: torch.Tensor, offset: torch.Tensor) -> Spots:
        spots = oracle.place(w, part, page, offset)
        if part not in parts:
            return spots
        size, heads = w.case.page_size, w.case.kv_heads
        if w.case.layout == "nhd":
            flat = spots.head * size + spots.offset
            return spots._replace(offset=flat // heads, head=flat % heads)
        flat = spots.offset * heads + spots.head
        return spots._replace(head=flat // size, offset=flat % size)

    return RIGHT.replace(place=place)


def _split_axis_ignored(parts: str) -> WriteStages:
    """Each head of a page is written as [offset, dim], although the layout splits an axis or exchanges them."""

    def place(w: WriteWork, part: str, page: torch.Tensor, offset: torch.Tensor) -> Spots:
        spots = oracle.place(w, part, page, offset)
        if part not in parts:
            return spots
        size, dim, x = w.case.page_size, w.case.dims[part], getattr(w.call, f"{part}_pages").shape[-1]
        flat = spots.offset * dim + spots.dim
        if part == "k":
            return spots._replace(offset=flat // x % size, dim=flat // (size * x) * x + flat % x)
        if w.case.layout == "vllm_x":
            return spots._replace(offset=flat % size, dim=flat // size)
        return spots._replace(offset=flat // (dim * x) * x + flat % x, dim=flat // x % dim)

    return RIGHT.replace(place=place)


def _nibbles_exchanged(parts: str) -> WriteStages:
    def place(w: WriteWork, part: str, page: torch.Tensor, offset: torch.Tensor) -> Spots:
        spots = oracle.place(w, part, page, offset)
        return spots._replace(dim=spots.dim ^ 1) if part in parts and w.case.formats[part] in PACK else spots

    return RIGHT.replace(place=place)


# Where faults can occur.


def _has_skipped(call: WriteCall) -> bool:
    return bool((call.slots[: call.live] < 0).any())


def _has_table(call: WriteCall) -> bool:
    return call.page_table is not None


def _has_context(call: WriteCall) -> bool:
    return _has_table(call) and any(n > q > 0 for q, n in zip(call.case.q_lens, call.case.kv_lens))


def has_values(call: WriteCall) -> bool:
    return call.v is not None


def like_parts(call: WriteCall) -> bool:
    return has_values(call) and call.case.dims["k"] == call.case.dims["v"]


WRITTEN_PLACES = (
    Fault(
        "write-skipped-token-stored",
        "writes: places",
        "a token whose slot is -1 is stored in the first or the last slot of the cache",
        "slots below 0 are clamped, or wrap around, and are not skipped",
        _skipped_stored,
        _has_skipped,
        ({"to": "last"}, {"to": "first"}),
    ),
    Fault(
        "write-slot-off",
        "writes: places",
        "every token is in the slot after or before its own",
        "slots are counted from 1, or computed from lengths without the new token",
        _moved,
        tries=({"by": 1}, {"by": -1}),
    ),
    Fault(
        "write-position-off",
        "writes: places",
        "every token is at the position after or before its own",
        "the position of a new token is taken to be the length of the sequence",
        lambda by: _by_table(lambda call: own_positions(call) + by),
        _has_table,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "write-context-not-added",
        "writes: places",
        "new tokens overwrite the first tokens of their sequences",
        "positions of new tokens are counted from 0 in every step",
        lambda: _by_table(lambda call: sequences_of(call)[1]),
        _has_context,
    ),
    Fault(
        "write-slots-ignored",
        "writes: places",
        "tokens are stored in their order from the first slot of the cache on",
        "the row of a token is taken for its slot",
        lambda: with_slots(lambda w: torch.arange(w.call.live)),
    ),
    Fault(
        "write-last-token-missing",
        "writes: places",
        "the last new token of each sequence is not stored",
        "a loop over the new tokens ends one too early",
        _last_missing,
    ),
    Fault(
        "write-other-page-size",
        "writes: places",
        "tokens are stored in pages and at offsets that follow from another page size",
        "slot / page_size is computed with a constant",
        _other_page_size,
        lambda call: call.layout == "nhd" and call.case.page_size < 128,
        ({"size": 16}, {"size": 32}, {"size": 64}, {"size": 128}),
    ),
    Fault(
        "write-page-in-16-bits",
        "writes: places",
        "pages above 65535 are stored in pages with lower ids",
        "a page id is kept in 16 bits",
        lambda: _pages(lambda w, page: page % 2**16),
        lambda call: call.live and int(call.slots[: call.live].max()) // call.case.page_size >= 2**16,
    ),
    Fault(
        "write-offset-wrapped-at-2^31",
        "writes: places",
        "tokens in pages beyond 2^31 elements are stored before the first page, or not at all",
        "slot times stride is computed in 32 bits",
        _wrapped,
        lambda call: _first_address(call) >= 2**31,
    ),
    Fault(
        "write-heads-in-wrong-order",
        "writes: places",
        "heads hold the keys or values of other heads",
        "the index of a head is not used, or reversed, or off by one",
        _heads,
        lambda call: call.case.kv_heads > 1,
        tuple({"order": order, **parts} for order in ORDERS for parts in PARTS),
    ),
    Fault(
        "write-k-and-v-swapped",
        "writes: places",
        "K holds values, and V keys",
        "two arguments, or the two halves of a joint page, are exchanged",
        _swapped,
        like_parts,
        ({"where": "arguments"}, {"where": "caches"}),
    ),
    Fault(
        "write-one-part-in-both",
        "writes: places",
        "K and V hold the same",
        "one pointer is used for both",
        lambda part: prepared(lambda w, s, other, rows: oracle.prepare(w, s, part)),
        like_parts,
        ({"part": "k"}, {"part": "v"}),
    ),
    Fault(
        "write-part-missing",
        "writes: places",
        "K, or V, is not stored",
        "a kernel stores one of them, and the other is left to a second launch",
        _part_missing,
        has_values,
        ({"part": "v"}, {"part": "k"}),
    ),
    Fault(
        "write-input-strides-ignored",
        "writes: places",
        "elements of other heads and tokens are stored",
        "new keys and values are views of a fused projection, and are read as if they were contiguous",
        lambda: with_arguments(_dense),
        lambda call: not call.k.is_contiguous(),
    ),
    Fault(
        "write-layout-as-another",
        "writes: places",
        "slots and heads are exchanged within a page",
        "NHD and HND pages have the same size, and a tensor does not state its layout",
        _as_other_layout,
        lambda call: (
            call.layout in ("nhd", "hnd", "vllm_joint")
            and call.case.kv_heads > 1
            and call.case.page_size > 1
            and not GROUP.keys() & {*call.case.formats.values()}
        ),
        PARTS,
    ),
    Fault(
        "write-split-axis-ignored",
        "writes: places",
        "elements of adjacent slots are mixed",
        "the layout splits or transposes the dims of a head, and the kernel stores them in a row",
        _split_axis_ignored,
        lambda call: call.layout in ("vllm_x", "aiter") and not PACK.keys() & {*call.case.formats.values()},
        PARTS,
    ),
    Fault(
        "write-nibbles-exchanged",
        "writes: places",
        "each two neighbours in the dims of keys or values are exchanged",
        "the even element is stored in the high four bits of a byte",
        _nibbles_exchanged,
        lambda call: bool(PACK.keys() & {*call.case.formats.values()}),
        PARTS,
    ),
    Fault(
        "write-tokens-missing",
        "writes: places",
        "some tokens are not stored: their slots keep what they held",
        "a grid is too small, a mask too narrow, or a launch is missing",
        _missing,
        tries=(),
        solve=_rows_not_stored,
        symptom=True,
        inject=lambda call: {"rows": list(range(call.live // 2, call.live))},
    ),
)
