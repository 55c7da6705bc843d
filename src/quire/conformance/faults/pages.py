"""Faults of pages: the table, ids, offsets, and where a sequence ends."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Values, Work


def _longer(by: int) -> Stages:
    """Sees keys beyond the end, each as a slot of the page it would lie in."""

    def gather(w: Work, s: Stages, at: Indices, sequence: BatchSequence) -> Values:
        return x.gather(w, s, at, sequence._replace(kv_len=sequence.kv_len + by, q_len=sequence.q_len))

    def see(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = x.see(w, sequence, min(keys, sequence.kv_len))
        return torch.cat((visible, torch.ones(sequence.q_len, max(keys - sequence.kv_len, 0), dtype=torch.bool)), 1)

    return PLAIN.replace(gather=gather, see=see, bias=_bias_to_the_end)


def _bias_to_the_end(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
    if w.call.alibi is None:
        return 0.0
    q_at = torch.arange(sequence.context, sequence.context + sequence.q_len)
    return -x.slopes(w) * (q_at[:, None] - torch.arange(keys)[None, :]).abs()


def _up_to(end: Any) -> Stages:
    """Sees every slot up to `end(w, sequence)`, whatever the length says."""

    def gather(w: Work, s: Stages, at: Indices, sequence: BatchSequence) -> Values:
        return x.gather(w, s, at, sequence._replace(kv_len=max(end(w, sequence), sequence.kv_len)))

    return _longer(0).replace(gather=gather)


def _locate(change: Any) -> Stages:
    """Another way to find a key's page: `change(w, at, sequence, positions)`."""
    return PLAIN.replace(locate=change)


def _ids(change: Any) -> Stages:
    def locate(w: Work, at: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, slot = x.locate(w, at, sequence, positions)
        return change(page), slot

    return _locate(locate)


def _table_row(by: int) -> Stages:
    def locate(w: Work, at: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.locate(w, at, sequence._replace(seq=min(max(sequence.seq + by, 0), w.call.seqs - 1)), positions)

    return _locate(locate)


def _table_column(by: int) -> Stages:
    def locate(w: Work, at: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = w.call.page_size
        column = (positions // size + by).clamp(0, at.table.shape[1] - 1)
        return at.table[sequence.seq, column], positions % size

    return _locate(locate)


def _contiguous(w: Work, at: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = w.call.page_size
    return at.table[sequence.seq, 0] + positions // size, positions % size


def _slot(by: int) -> Stages:
    def locate(w: Work, at: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, slot = x.locate(w, at, sequence, positions)
        return page, (slot + by) % w.call.page_size

    return _locate(locate)


def _page_size(factor: float) -> Stages:
    """The table is read as if pages had another size."""

    def locate(w: Work, at: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(int(w.call.page_size * factor), 1)
        column = (positions // size).clamp(max=at.table.shape[1] - 1)
        slot = positions % size
        return at.table[sequence.seq, column] + slot // w.call.page_size, slot % w.call.page_size

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

    def plant(call: KernelCall) -> dict[str, Any]:
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


def _has_cells(call: KernelCall) -> bool:
    lens = call.kv_lens.cpu().long() - (0 if call.new is None else call.q_starts.cpu().long().diff())
    return bool((lens > 0).sum() > 1) and call.case is not None and call.case.table not in ("shared",)


def _address(change: Any) -> Stages:
    return PLAIN.replace(address=lambda w, part, page, slot: change(x.address(w, part, page, slot)))


def _signed(offset: torch.Tensor) -> torch.Tensor:
    return (offset + 2**31) % 2**32 - 2**31


def _is_high(call: KernelCall) -> bool:
    return call.pages > 2**16


def _elements(call: KernelCall) -> int:
    return call.pages * int(call.k_pages.stride(0))


PAGES = (
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
        "everything comes from a page further on, or back; at the table's end from what lies beside it",
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
        symptom=True,
        plant=_last_cell(spare=True),
        issues=("vLLM #42494", "vLLM #42273"),
    ),
    Fault(
        "neighbour-page",
        "pages",
        "the slots of one page hold tokens of another page that is in use, mostly another sequence's",
        "two sequences were given the same page, or a column was read from the neighbouring row of the table",
        lambda cells: _cells(cells),
        _has_cells,
        tries=(),
        solve=solve.cells(owned=True),
        symptom=True,
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
        "only the first id of a table row is read; most tests have tables in order and cannot see it",
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
        lambda: _up_to(lambda w, sequence: -(-sequence.kv_len // w.call.page_size) * w.call.page_size),
        lambda call: call.new is None and call.mask is None and bool((call.kv_lens % call.page_size != 0).any()),
        issues=("vLLM #35219", "vLLM #43990"),
    ),
    Fault(
        "table-tail-read",
        "lengths",
        "pages behind a sequence's end take part",
        "the loop runs over the table's width, or one page too far",
        lambda pages: _up_to(
            lambda w, sequence: (
                (-(-sequence.kv_len // w.call.page_size) + pages if pages else w.call.page_table.shape[1]) * w.call.page_size
            )
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
)
