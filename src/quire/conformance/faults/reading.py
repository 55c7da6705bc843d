"""Faults of reading: indices, pages, slots, bytes, scales."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance import exact as x
from quire.conformance.call import Call
from quire.conformance.exact import PLAIN, Indices, Row, Stages, Values, Work
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault

# Index tensors.


def _reinterpreted(tensor: torch.Tensor) -> torch.Tensor:
    """int64 memory read as int32: each number becomes its low half and its high half, and half of them are never reached."""
    flat = tensor.contiguous().cpu().view(torch.int32).reshape(-1)[: tensor.numel()]
    return flat.reshape(tensor.shape).long()


def _read(name: str) -> Stages:
    def read(w: Work) -> Indices:
        at = x.read(w)
        source = {"starts": w.call.q_starts, "lens": w.call.kv_lens, "table": w.call.page_table}[name]
        return at._replace(**{name: _reinterpreted(source)})

    return PLAIN.replace(read=read)


def _starts(rows: str = "all") -> Stages:
    """q_starts reinterpreted, by everybody, or by one of two kernels that share the rows out: the one for rows of one new token
    ('decode'), or the one for longer rows ('prefill'). That one takes the rows that look like its own."""
    if rows == "all":
        return _read("starts")

    def shared(w: Work, at: Indices) -> list[Row]:
        theirs = x.rows(w, at._replace(starts=_reinterpreted(w.call.q_starts)))
        return [
            *(row for row in x.rows(w, at) if (row.q_len == 1) != (rows == "decode")),
            *(row for row in theirs if (row.q_len == 1) == (rows == "decode")),
        ]

    return PLAIN.replace(rows=shared)


def _is_long(name: str) -> Any:
    return lambda call: getattr(call, name).dtype is torch.int64 and call.seqs > 1


def _rows(change: Any) -> Stages:
    """Every sequence's row, changed."""
    return PLAIN.replace(rows=lambda w, at: [change(w, row) for row in x.rows(w, at)])


def _longer(by: int) -> Stages:
    """Sees keys beyond the end, each as a slot of the page it would lie in."""

    def rows(w: Work, at: Indices) -> list[Row]:
        return x.rows(w, at)

    def gather(w: Work, s: Stages, at: Indices, row: Row) -> Values:
        return x.gather(w, s, at, row._replace(kv_len=row.kv_len + by, q_len=row.q_len))

    def see(w: Work, row: Row, keys: int) -> torch.Tensor:
        visible = x.see(w, row, min(keys, row.kv_len))
        return torch.cat((visible, torch.ones(row.q_len, max(keys - row.kv_len, 0), dtype=torch.bool)), 1)

    return PLAIN.replace(rows=rows, gather=gather, see=see, bias=_bias_to_the_end)


def _bias_to_the_end(w: Work, row: Row, keys: int) -> torch.Tensor | float:
    if w.call.alibi is None:
        return 0.0
    q_at = torch.arange(row.context, row.context + row.q_len)
    return -x.slopes(w) * (q_at[:, None] - torch.arange(keys)[None, :]).abs()


def _up_to(end: Any) -> Stages:
    """Sees every slot up to `end(w, row)`, whatever the length says."""

    def gather(w: Work, s: Stages, at: Indices, row: Row) -> Values:
        return x.gather(w, s, at, row._replace(kv_len=max(end(w, row), row.kv_len)))

    return _longer(0).replace(gather=gather)


def _locate(change: Any) -> Stages:
    """Another way to find a key's page: `change(w, at, row, positions)`."""
    return PLAIN.replace(locate=change)


def _ids(change: Any) -> Stages:
    def locate(w: Work, at: Indices, row: Row, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, slot = x.locate(w, at, row, positions)
        return change(page), slot

    return _locate(locate)


def _table_row(by: int) -> Stages:
    def locate(w: Work, at: Indices, row: Row, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.locate(w, at, row._replace(seq=min(max(row.seq + by, 0), w.call.seqs - 1)), positions)

    return _locate(locate)


def _table_column(by: int) -> Stages:
    def locate(w: Work, at: Indices, row: Row, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = w.call.page_size
        column = (positions // size + by).clamp(0, at.table.shape[1] - 1)
        return at.table[row.seq, column], positions % size

    return _locate(locate)


def _contiguous(w: Work, at: Indices, row: Row, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = w.call.page_size
    return at.table[row.seq, 0] + positions // size, positions % size


def _slot(by: int) -> Stages:
    def locate(w: Work, at: Indices, row: Row, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, slot = x.locate(w, at, row, positions)
        return page, (slot + by) % w.call.page_size

    return _locate(locate)


def _page_size(factor: float) -> Stages:
    """The table is read as if pages had another size."""

    def locate(w: Work, at: Indices, row: Row, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(int(w.call.page_size * factor), 1)
        column = (positions // size).clamp(max=at.table.shape[1] - 1)
        slot = positions % size
        return at.table[row.seq, column] + slot // w.call.page_size, slot % w.call.page_size

    return _locate(locate)


def _cells(cells: dict[tuple[int, int], int]) -> Stages:
    """Some cells of the table are read as other pages."""

    def read(w: Work) -> Indices:
        at = x.read(w)
        table = at.table.clone()
        for (seq, column), page in cells.items():
            table[seq, column] = page
        return at._replace(table=table)

    return PLAIN.replace(read=read)


def _last_cell(spare: bool) -> Any:
    """Parameters that replace the last page of the longest sequence by one that nobody owns, or by a neighbour's."""

    def plant(call: Call) -> dict[str, Any]:
        table, lens = call.page_table.cpu().long(), call.kv_lens.cpu().long()
        used = -(-lens // call.page_size)
        if call.new is not None:
            used = -(-(lens - call.q_starts.cpu().long().diff()) // call.page_size)
        seq = int(used.argmax())
        column = int(used[seq]) - 1
        mine = {int(page) for i in range(call.seqs) for page in table[i, : int(used[i])]}
        others = sorted({int(page) for i in range(call.seqs) if i != seq for page in table[i, : int(used[i])]})
        free = [page for page in solve.pool(call) if page not in mine]
        pages = free if spare else [page for page in others if page != int(table[seq, column])]
        return {"cells": {(seq, column): pages[-1]}}

    return plant


def _has_cells(call: Call) -> bool:
    lens = call.kv_lens.cpu().long() - (0 if call.new is None else call.q_starts.cpu().long().diff())
    return bool((lens > 0).sum() > 1) and call.case is not None and call.case.table not in ("shared",)


def _address(change: Any) -> Stages:
    return PLAIN.replace(address=lambda w, part, page, slot: change(x.address(w, part, page, slot)))


def _signed(offset: torch.Tensor) -> torch.Tensor:
    return (offset + 2**31) % 2**32 - 2**31


# Bytes.


def _decode(change: Any) -> Stages:
    """Another way to make numbers: `change(w, part, raw, page, slot)`."""
    return PLAIN.replace(decode=change)


def _rescaled(change: Any) -> Stages:
    """Other scales: `change(w, part, page, slot, scale)`."""

    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        scale = x.scale_at(w, part, page, slot)
        return x.as_numbers(raw, w.call.format, w.number) * change(w, part, page, slot, scale)

    return _decode(decode)


def _only(which: str, change: Any) -> Stages:
    return _rescaled(lambda w, part, page, slot, scale: change(scale) if part == which else scale)


def _swapped_scales(w: Work, part: str, page: torch.Tensor, slot: torch.Tensor, scale: Any) -> Any:
    return x.scale_at(w, "v" if part == "k" else "k", page, slot)


def _first_scale(w: Work, part: str, page: torch.Tensor, slot: torch.Tensor, scale: Any) -> Any:
    return w.scales[part].reshape(-1)[0].cpu().to(w.number)  # type: ignore[union-attr]


def _first_slot_scale(w: Work, part: str, page: torch.Tensor, slot: torch.Tensor, scale: Any) -> Any:
    return x.scale_at(w, part, page, torch.zeros_like(slot))


def _reversed_head_scales(w: Work, part: str, page: torch.Tensor, slot: torch.Tensor, scale: Any) -> Any:
    return scale.flip(1)


def _as_format(name: str) -> Stages:
    def decode(w: Work, part: str, raw: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return x.as_numbers(raw, name, w.number) * x.scale_at(w, part, page, slot)

    return _decode(decode)


def _is(*formats: str) -> Any:
    return lambda call: call.format in formats


def _is_quantised(call: Call) -> bool:
    return call.k_scale is not None


def _scale_kind(dims: int) -> Any:
    return lambda call: call.k_scale is not None and call.k_scale.dim() == dims and call.kv_heads > 1


def _other_x(factor: int) -> Stages:
    """Keys packed by x are read as if packed by another x, in the same memory."""

    def address(w: Work, part: str, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        if part == "v":
            return x.address(w, part, page, slot)
        size, dim, other = w.call.page_size, w.dims["k"], w.x * factor
        h = torch.arange(w.call.kv_heads).view(1, -1, 1)
        d = torch.arange(dim).view(1, 1, -1)
        stride = w.pages["k"].stride()
        inner = (d // other) * (size * other) + slot.view(-1, 1, 1) * other + d % other
        return page.view(-1, 1, 1) * stride[0] + h * stride[1] + inner

    return PLAIN.replace(address=address)


def _transposed(parts: str) -> Stages:
    """nhd read as hnd or the other way round: slots and heads change places in the same memory."""

    def address(w: Work, part: str, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        if part not in parts:
            return x.address(w, part, page, slot)
        size, heads, dim = w.call.page_size, w.call.kv_heads, w.dims[part]
        h = torch.arange(heads).view(1, -1, 1)
        d = torch.arange(dim).view(1, 1, -1)
        at = slot.view(-1, 1, 1)
        inner = (h * size + at) if w.call.layout == "nhd" else (at * heads + h)
        return page.view(-1, 1, 1) * w.pages[part].stride(0) + inner * dim + d

    return PLAIN.replace(address=address)


def _plain_pages(call: Call) -> bool:
    contiguous = call.k_pages[0].is_contiguous() and call.v_pages[0].is_contiguous()
    return call.layout in ("nhd", "hnd") and call.kv_heads > 1 and call.page_size > 1 and contiguous


def _untransposed_values() -> Stages:
    """Values that lie dim by slot are read as if they lay slot by dim."""

    def address(w: Work, part: str, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        if part == "k":
            return x.address(w, part, page, slot)
        stride = w.pages["v"].stride()
        h, d = torch.arange(w.call.kv_heads).view(1, -1, 1), torch.arange(w.dims["v"]).view(1, 1, -1)
        return page.view(-1, 1, 1) * stride[0] + h * stride[1] + slot.view(-1, 1, 1) * w.dims["v"] + d

    return PLAIN.replace(address=address)


def _gather(change: Any) -> Stages:
    def gather(w: Work, s: Stages, at: Indices, row: Row) -> Values:
        return change(w, row, x.gather(w, s, at, row))

    return PLAIN.replace(gather=gather)


def _new_ignored() -> Stages:
    """Only what the cache holds is seen."""

    def see(w: Work, row: Row, keys: int) -> torch.Tensor:
        visible = x.see(w, row, keys)
        visible[:, max(row.context, 0) :] = False
        return visible

    return PLAIN.replace(see=see)


def _new_from_cache() -> Stages:
    def gather(w: Work, s: Stages, at: Indices, row: Row) -> Values:
        fresh, w.new = w.new, {"k": None, "v": None}
        parts = []
        for part in ("k", "v"):
            page, slot = s.locate(w, at, row, torch.arange(row.kv_len))
            parts.append(s.decode(w, part, x.load(w, part, s.address(w, part, page, slot)), page, slot))
        w.new = fresh
        return Values(*parts)

    return PLAIN.replace(gather=gather)


def _new_rows(by: int) -> Stages:
    """The new tokens' keys and values are taken from rows further on."""

    def gather(w: Work, s: Stages, at: Indices, row: Row) -> Values:
        k, v = x.gather(w, s, at, row)
        n = max(row.context, 0)
        tail = {}
        for part in ("k", "v"):
            rows = (torch.arange(row.first, row.first + row.q_len) + by).clamp(0, max(w.call.live - 1, 0))
            tail[part] = w.new[part][rows.to(w.call.device)].cpu().to(w.number)  # type: ignore[index]
        return Values(torch.cat((k[:n], tail["k"])), torch.cat((v[:n], tail["v"])))

    return PLAIN.replace(gather=gather)


def _new_quantised() -> Stages:
    """New tokens go through the cache's format on their way, as if they had been read back from it."""

    def gather(w: Work, s: Stages, at: Indices, row: Row) -> Values:
        from quire.conformance.build import encode

        parts = list(x.gather(w, s, at, row))
        n = max(row.context, 0)
        for i, part in enumerate(("k", "v")):
            scale = w.scales[part].cpu().float().reshape(1, -1, 1)  # type: ignore[union-attr]
            fresh = parts[i][n:]
            parts[i] = torch.cat((parts[i][:n], encode(fresh, w.call.format, scale).to(w.number) * scale.to(w.number)))
        return Values(*parts)

    return PLAIN.replace(gather=gather)


def _kv_cut(call: Call) -> bool:
    return call.max_kv_len is not None and call.kv_lens.numel() > 0 and call.max_kv_len < int(call.kv_lens.max())


def _q_cut(call: Call) -> bool:
    return call.max_q_len is not None and call.seqs > 0 and call.max_q_len < int(call.q_starts.diff().max())


def _see_until(end: Any) -> Stages:
    """Keys from `end(w, row)` on are not seen."""

    def see(w: Work, row: Row, keys: int) -> torch.Tensor:
        visible = x.see(w, row, keys)
        visible[:, max(end(w, row), 0) :] = False
        return visible

    return PLAIN.replace(see=see)


def _shifted_lengths(change: Any) -> Stages:
    """Positions follow from another length: the queries sit elsewhere, and more keys or fewer are read."""
    return _rows(lambda w, row: row._replace(kv_len=max(change(row), 0)))


def _full(call: Call) -> bool:
    return call.new is None and call.positions is None and call.mask is None


def _context(call: Call) -> bool:
    return call.new is not None


def _is_high(call: Call) -> bool:
    return call.pages > 2**16


def _elements(call: Call) -> int:
    return call.pages * int(call.k_pages.stride(0))


ISSUE_INT64 = ("vLLM #28905", "FlashInfer #1654", "FlashInfer #725")

READING = (
    Fault(
        "q-starts-int64-as-int32",
        "indices",
        "every other sequence looks empty or negatively long, and its rows are never written",
        "torch.cumsum of int32 gives int64; a kernel casts the pointer without looking at the type",
        _starts,
        _is_long("q_starts"),
        tries=({}, {"rows": "decode"}, {"rows": "prefill"}),
        issues=ISSUE_INT64,
    ),
    Fault(
        "kv-lens-int64-as-int32",
        "indices",
        "every other sequence has length 0, the rest have a neighbour's",
        "an unchecked pointer cast of an int64 tensor",
        lambda: _read("lens"),
        _is_long("kv_lens"),
        issues=ISSUE_INT64,
    ),
    Fault(
        "table-int64-as-int32",
        "indices",
        "every other page is page 0, and rows of the table run into each other",
        "an unchecked pointer cast of an int64 tensor",
        lambda: _read("table"),
        _is_long("page_table"),
        issues=("FlashInfer #1654", "vLLM #50427"),
    ),
    Fault(
        "kv-lens-taken-as-context",
        "indices",
        "queries sit q_len too far right and see as many slots too many",
        "one API counts all tokens, the next only those before the call; the kernel adds the new ones again",
        lambda: _shifted_lengths(lambda row: row.kv_len + row.q_len),
        _full,
        issues=("FlashAttention: cache_seqlens with and without k, v",),
    ),
    Fault(
        "context-taken-as-kv-lens",
        "indices",
        "queries sit q_len too far left; decode rows miss their own token",
        "a caller's total length is treated as one that still counts the new tokens separately",
        lambda: _shifted_lengths(lambda row: row.kv_len - row.q_len),
        _full,
        issues=("transformers: varlen and decode paths count differently",),
    ),
    Fault(
        "max-kv-len-truncates",
        "indices",
        "keys beyond a host maximum are missing from long sequences",
        "the number of tiles or splits comes from max_seq_len, and the caller's hint was too low",
        lambda: _see_until(lambda w, row: w.call.max_kv_len),
        _kv_cut,
        issues=("vLLM test_prefix_prefill passes max_seq_len 1024 for lengths up to 1792",),
    ),
    Fault(
        "max-q-len-truncates",
        "indices",
        "rows of a long prefill beyond a host maximum are never written",
        "the grid is sized by max_query_len",
        lambda: PLAIN.replace(store=_store_until_hint),
        _q_cut,
    ),
    Fault(
        "table-row-off-by-one",
        "pages",
        "a sequence reads its neighbour's pages",
        "a row index that counts from 1, a sliced table, padding rows in front",
        lambda by: _table_row(by),
        lambda call: call.seqs > 1,
        ({"by": 1}, {"by": -1}),
        issues=("vLLM #39120",),
    ),
    Fault(
        "table-column-off-by-one",
        "pages",
        "everything comes from one page further on; the last page from the table's tail",
        "a column index computed from the length instead of the position, or from 1",
        lambda by: _table_column(by),
        lambda call: int(call.kv_lens.max() if call.seqs else 0) > 0,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "stale-page",
        "pages",
        "the slots of one page hold somebody's old tokens",
        "a table that was not refreshed after a page was freed and given away",
        lambda cells: _cells(cells),
        _has_cells,
        tries=(),
        solve=solve.cells(owned=False),
        plant=_last_cell(spare=True),
        issues=("vLLM #42494", "vLLM #42273"),
    ),
    Fault(
        "neighbour-page",
        "pages",
        "the slots of one page hold another sequence's tokens",
        "two sequences were given the same page, or a column was read from the neighbouring row",
        lambda cells: _cells(cells),
        _has_cells,
        tries=(),
        solve=solve.cells(owned=True),
        plant=_last_cell(spare=False),
        issues=("vLLM #42273", "tt-plugin #103"),
    ),
    Fault(
        "page-ids-shifted",
        "pages",
        "every page is the one beside the right one",
        "a null page that one side counts and the other does not",
        lambda by: _ids(lambda page: page + by),
        tries=({"by": 1}, {"by": -1}, {"by": 2}, {"by": -2}),
        issues=("vLLM reserves page 0 as NULL_BLOCK_ID",),
    ),
    Fault(
        "pages-taken-as-contiguous",
        "pages",
        "all but the first page of a sequence come from elsewhere, unless its pages lie in order",
        "only the first id of a row is read; most tests have tables in order and cannot see it",
        lambda: _locate(_contiguous),
        lambda call: bool((call.kv_lens > call.page_size).any()),
        issues=("FlashInfer #3219",),
    ),
    Fault(
        "page-ids-wrapped-at-2^16",
        "pages",
        "pages with ids from 65536 on are read from the bottom of the pool",
        "ids are carried in 16 bits",
        lambda: _ids(lambda page: page % 2**16),
        _is_high,
        issues=("AITER #3062", "AITER #3211"),
    ),
    Fault(
        "page-ids-wrapped-at-2^15",
        "pages",
        "pages with ids from 32768 on are read from elsewhere",
        "ids are carried in signed 16 bits and their sign is dropped",
        lambda: _ids(lambda page: page % 2**15),
        _is_high,
    ),
    Fault(
        "offset-wrapped-at-2^31",
        "pages",
        "tokens far into a large cache are read from before its start",
        "page * stride is computed in a signed 32-bit register",
        lambda: _address(_signed),
        lambda call: _elements(call) > 2**31,
        issues=("vLLM #50427", "vLLM #50483", "SGLang #20389"),
    ),
    Fault(
        "offset-wrapped-at-2^32",
        "pages",
        "tokens far into a very large cache are read from its beginning",
        "page * stride is computed in an unsigned 32-bit register",
        lambda: _address(lambda offset: offset % 2**32),
        lambda call: _elements(call) > 2**32,
        issues=("vLLM #50427", "SGLang #20389"),
    ),
    Fault(
        "page-size-mistaken",
        "pages",
        "tokens beyond the first part of a page come from the wrong page",
        "a kernel compiled for another page size, or a virtual page that is a multiple of the real one",
        lambda factor: _page_size(factor),
        lambda call: call.page_size > 1 and call.page_size % 2 == 0,
        ({"factor": 2}, {"factor": 0.5}, {"factor": 4}),
        issues=("FlashInfer #4347", "vLLM #57614"),
    ),
    Fault(
        "slots-rotated",
        "pages",
        "the tokens of a page are read from the slots beside theirs",
        "an offset within the page that counts from 1",
        lambda by: _slot(by),
        lambda call: call.page_size > 1,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "last-page-read-whole",
        "lengths",
        "the unused slots of the last page take part",
        "the loop runs over pages and masks nothing in the last one",
        lambda: _up_to(lambda w, row: -(-row.kv_len // w.call.page_size) * w.call.page_size),
        lambda call: call.new is None and call.mask is None and bool((call.kv_lens % call.page_size != 0).any()),
        issues=("vLLM #35219", "vLLM #43990"),
    ),
    Fault(
        "table-tail-read",
        "lengths",
        "pages behind a sequence's end take part",
        "the loop runs over the table's width, or one page too far",
        lambda pages: _up_to(
            lambda w, row: (-(-row.kv_len // w.call.page_size) + pages if pages else w.call.page_table.shape[1]) * w.call.page_size
        ),
        lambda call: call.new is None and call.mask is None,
        ({"pages": 1}, {"pages": 0}),
        issues=("vLLM #53658", "vLLM #42494"),
    ),
    Fault(
        "length-too-long",
        "lengths",
        "slots just beyond the end take part",
        "<= where < was meant, or a length that was already advanced",
        lambda by: _longer(by),
        lambda call: call.new is None and call.mask is None,
        ({"by": 1}, {"by": 2}, {"by": 3}),
    ),
    Fault(
        "k-scale-missing",
        "scales",
        "logits are off by the scale of K",
        "the scale is folded into the softmax scale on one path and forgotten on the other",
        lambda: _only("k", lambda scale: 1.0),
        _is_quantised,
    ),
    Fault(
        "v-scale-missing",
        "scales",
        "outputs are off by the scale of V",
        "the scale is to be applied once at the end, and one path returns earlier",
        lambda: _only("v", lambda scale: 1.0),
        _is_quantised,
    ),
    Fault(
        "k-scale-twice",
        "scales",
        "logits are nearly all alike, or far too sharp",
        "applied when bytes are decoded, and again with the softmax scale",
        lambda: _only("k", lambda scale: scale * scale),
        _is_quantised,
    ),
    Fault(
        "v-scale-twice",
        "scales",
        "outputs are too small by the scale of V",
        "applied when bytes are decoded, and again to the accumulator",
        lambda: _only("v", lambda scale: scale * scale),
        _is_quantised,
    ),
    Fault(
        "scales-swapped",
        "scales",
        "logits and outputs are both off by the quotient of the two scales",
        "two arguments of the same type, side by side",
        lambda: _rescaled(_swapped_scales),
        _is_quantised,
    ),
    Fault(
        "head-scale-read-as-tensor",
        "scales",
        "the first kv head is right, the others are off by a factor of their own",
        "a kernel loads one scalar where a vector was passed",
        lambda: _rescaled(_first_scale),
        _scale_kind(1),
    ),
    Fault(
        "head-scales-in-wrong-order",
        "scales",
        "every kv head is off by a factor of its own",
        "scales indexed by another head than the keys",
        lambda: _rescaled(_reversed_head_scales),
        _scale_kind(1),
    ),
    Fault(
        "token-scale-of-first-slot",
        "scales",
        "only the first token of each page is right",
        "a scale per page is expected where there is one per token",
        lambda: _rescaled(_first_slot_scale),
        _scale_kind(3),
        issues=("AITER: scales per page beside scales per token",),
    ),
    Fault(
        "e4m3fn-read-as-fnuz",
        "formats",
        "everything from the cache is half as large",
        "the flavour of fp8 follows the GPU that runs, not the one that wrote",
        lambda: _as_format("e4m3fnuz"),
        _is("e4m3fn"),
        issues=("vLLM: gfx942 stores fnuz, gfx950 and NVIDIA fn",),
    ),
    Fault(
        "fnuz-read-as-e4m3fn",
        "formats",
        "everything from the cache is twice as large",
        "the flavour of fp8 follows the GPU that runs, not the one that wrote",
        lambda: _as_format("e4m3fn"),
        _is("e4m3fnuz"),
    ),
    Fault(
        "e5m2-read-as-e4m3",
        "formats",
        "numbers keep their sign and little else",
        "'fp8' is taken to mean e4m3",
        lambda: _as_format("e4m3fn"),
        _is("e5m2"),
        issues=("vLLM triton_reshape_and_cache_flash views e5m2 caches as e4m3", "SGLang #18550"),
    ),
    Fault(
        "e4m3-read-as-e5m2",
        "formats",
        "numbers keep their sign and little else",
        "'fp8' is taken to mean e5m2",
        lambda: _as_format("e5m2"),
        _is("e4m3fn", "e4m3fnuz"),
    ),
    Fault(
        "bytes-read-as-int8",
        "formats",
        "numbers keep their order of magnitude only by accident",
        "bytes without a format are taken for whole numbers",
        lambda: _as_format("int8"),
        _is("e4m3fn", "e4m3fnuz", "e5m2"),
    ),
    Fault(
        "fp16-read-as-bf16",
        "formats",
        "numbers of either 16-bit type are read as the other",
        "the cache's type is taken from the query",
        lambda: _decode(
            lambda w, part, raw, page, slot: x.as_numbers(raw, "bf16" if w.call.format == "fp16" else "fp16", w.number)
        ),
        _is("fp16", "bf16"),
    ),
    Fault(
        "x-of-8-read-as-16",
        "layouts",
        "elements of neighbouring slots are mixed",
        "x is 16 bytes, so it doubles when elements halve: somebody kept the old one",
        lambda factor: _other_x(factor),
        lambda call: call.layout in ("vllm_x", "aiter") and call.q.shape[2] % (2 * call.k_pages.shape[-1]) == 0,
        ({"factor": 2},),
        issues=("vLLM test_attention.py re-views an x=16 cache as x=8",),
    ),
    Fault(
        "layout-read-as-another",
        "layouts",
        "slots and heads change places within a page",
        "NHD and HND have the same size, and nothing in a tensor says which it is",
        lambda parts: _transposed(parts),
        _plain_pages,
        ({"parts": "kv"}, {"parts": "k"}, {"parts": "v"}),
        issues=("FlashInfer kv_layout", "AITER's shuffled V is not vLLM's"),
    ),
    Fault(
        "values-not-transposed",
        "layouts",
        "values of a page are scrambled among slots and dims",
        "the values of this layout lie dim by slot",
        lambda: _untransposed_values(),
        lambda call: call.layout == "vllm_x",
    ),
    Fault(
        "k-and-v-swapped",
        "layouts",
        "logits come from values and outputs from keys",
        "two arguments of the same shape, or the two halves of a joint page",
        lambda: _gather(lambda w, row, kv: Values(kv.v, kv.k)),
        lambda call: call.q.shape[2] == call.out.shape[2],
    ),
    Fault(
        "new-tokens-ignored",
        "forms",
        "nothing of k and v is seen; a first prefill gives zeros",
        "a kernel that reads everything from the cache is called before the cache is written",
        _new_ignored,
        _context,
        issues=("vLLM #28490 and its five explanations",),
    ),
    Fault(
        "new-tokens-read-from-cache",
        "forms",
        "slots of the new tokens, not written yet, are read instead of k and v",
        "one call with two contracts: prefill rows take k and v, decode rows take the cache",
        _new_from_cache,
        _context,
        issues=("vLLM chunked_prefill_paged_decode",),
    ),
    Fault(
        "new-tokens-off-by-one",
        "forms",
        "each new token has the key and value of the next",
        "an index into k and v that counts from 1",
        lambda by: _new_rows(by),
        _context,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "new-tokens-quantised",
        "forms",
        "small errors, of the size of the cache's format, in what the new tokens give",
        "k and v are passed through the cache's format although they come beside it",
        _new_quantised,
        lambda call: call.new is not None and call.k_scale is not None and call.k_scale.dim() < 2,
    ),
)


def _store_until_hint(w: Work, row: Row, part: x.Part, into: x.Outcome) -> None:
    n = min(row.q_len, w.call.max_q_len or row.q_len)
    x.store(w, row._replace(q_len=n), x.Part(*(t[:n] for t in part)), into)
