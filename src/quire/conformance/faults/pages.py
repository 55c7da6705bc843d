"""Faults of pages: the page table, page ids, addresses, and the end of a sequence."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Values, Work


def _longer(by: int) -> Stages:
    """The `by` slots after the end of a sequence are visible too."""

    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        return oracle.gather(w, s, indices, sequence._replace(kv_len=sequence.kv_len + by, q_len=sequence.q_len))

    def visibility(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = oracle.visibility(w, sequence, min(keys, sequence.kv_len))
        return torch.cat((visible, torch.ones(sequence.q_len, max(keys - sequence.kv_len, 0), dtype=torch.bool)), 1)

    return PLAIN.replace(gather=gather, visibility=visibility, bias=_bias_to_the_end)


def _bias_to_the_end(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
    if w.call.alibi is None:
        return 0.0
    q_pos = torch.arange(sequence.context, sequence.context + sequence.q_len)
    return -oracle.slopes(w) * (q_pos[:, None] - torch.arange(keys)[None, :]).abs()


def _up_to(end: Any) -> Stages:
    """All slots up to `end(w, sequence)` are visible, also those after the end of the sequence."""

    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        return oracle.gather(w, s, indices, sequence._replace(kv_len=max(end(w, sequence), sequence.kv_len)))

    return _longer(0).replace(gather=gather)


def _locate(change: Any) -> Stages:
    """Replaces the page and the offset of keys by `change(w, indices, sequence, positions)`."""
    return PLAIN.replace(locate=change)


def _ids(change: Any) -> Stages:
    def locate(w: Work, indices: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, offset = oracle.locate(w, indices, sequence, positions)
        return change(page), offset

    return _locate(locate)


def _table_row(by: int) -> Stages:
    def locate(w: Work, indices: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return oracle.locate(w, indices, sequence._replace(seq=min(max(sequence.seq + by, 0), w.call.seqs - 1)), positions)

    return _locate(locate)


def _table_column(by: int) -> Stages:
    def locate(w: Work, indices: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = w.call.page_size
        column = (positions // size + by).clamp(0, indices.table.shape[1] - 1)
        return indices.table[sequence.seq, column], positions % size

    return _locate(locate)


def _contiguous(w: Work, indices: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = w.call.page_size
    return indices.table[sequence.seq, 0] + positions // size, positions % size


def _offset(by: int) -> Stages:
    def locate(w: Work, indices: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, offset = oracle.locate(w, indices, sequence, positions)
        return page, (offset + by) % w.call.page_size

    return _locate(locate)


def _page_size(factor: float) -> Stages:
    """The page table is read as if pages had another size."""

    def locate(w: Work, indices: Indices, sequence: BatchSequence, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(int(w.call.page_size * factor), 1)
        column = (positions // size).clamp(max=indices.table.shape[1] - 1)
        offset = positions % size
        return indices.table[sequence.seq, column] + offset // w.call.page_size, offset % w.call.page_size

    return _locate(locate)


def _cells(cells: dict[tuple[int, int], int]) -> Stages:
    """Some entries of the page table are replaced by other page ids."""

    def read(w: Work) -> Indices:
        indices = oracle.read(w)
        table = indices.table.clone()
        for (seq, column), page in cells.items():
            table[seq, column] = page
        return indices._replace(table=table)

    return PLAIN.replace(read=read)


def _last_cell(spare: bool) -> Any:
    """Parameters that replace the last page of the longest sequence by a free page, or by a page of another sequence."""

    def inject(call: KernelCall) -> dict[str, Any]:
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

    return inject


def _has_cells(call: KernelCall) -> bool:
    lens = call.kv_lens.cpu().long() - (0 if call.new is None else call.q_starts.cpu().long().diff())
    return bool((lens > 0).sum() > 1) and call.case is not None and call.case.table not in ("shared", "partly")


def _address(change: Any) -> Stages:
    return PLAIN.replace(address=lambda w, part, page, offset: change(oracle.address(w, part, page, offset)))


def _signed(address: torch.Tensor) -> torch.Tensor:
    return (address + 2**31) % 2**32 - 2**31


def _is_high(call: KernelCall) -> bool:
    return call.pages > 2**16


def _elements(call: KernelCall) -> int:
    return call.pages * int(call.k_pages.stride(0))


PAGES = (
    Fault(
        "table-row-off-by-one",
        "pages",
        "a sequence reads the pages of another sequence",
        "a row index that starts at 1, a sliced table, or padding rows at the top",
        lambda by: _table_row(by),
        lambda call: call.seqs > 1,
        ({"by": 1}, {"by": -1}),
        issues=("vLLM #39120",),
    ),
    Fault(
        "table-column-off-by-one",
        "pages",
        "keys come from the next or the previous page of the sequence",
        "the column index is derived from the length instead of the position, or starts at 1",
        lambda by: _table_column(by),
        lambda call: int(call.kv_lens.max() if call.seqs else 0) > 0,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "stale-page",
        "pages",
        "one page holds tokens of a freed sequence",
        "the table was not updated after the page was freed and reallocated",
        lambda cells: _cells(cells),
        _has_cells,
        tries=(),
        solve=solve.cells(owned=False),
        symptom=True,
        inject=_last_cell(spare=True),
        issues=("vLLM #42494", "vLLM #42273"),
    ),
    Fault(
        "neighbour-page",
        "pages",
        "one page holds tokens of another page in use, usually of another sequence",
        "a page was allocated to two sequences, or a column was read from an adjacent row of the table",
        lambda cells: _cells(cells),
        _has_cells,
        tries=(),
        solve=solve.cells(owned=True),
        symptom=True,
        inject=_last_cell(spare=False),
        issues=("vLLM #42273", "tt-plugin #103"),
    ),
    Fault(
        "page-ids-shifted",
        "pages",
        "every page id is wrong by the same number",
        "a reserved null page that one side counts and the other does not",
        lambda by: _ids(lambda page: page + by),
        tries=({"by": 1}, {"by": -1}, {"by": 2}, {"by": -2}),
        issues=("vLLM reserves page 0 as NULL_BLOCK_ID",),
    ),
    Fault(
        "pages-taken-as-contiguous",
        "pages",
        "only the first page of a sequence is correct, unless its page ids are consecutive",
        "only the first id of a table row is read; tests whose tables hold consecutive ids do not detect it",
        lambda: _locate(_contiguous),
        lambda call: bool((call.kv_lens > call.page_size).any()),
        issues=("FlashInfer #3219",),
    ),
    Fault(
        "page-ids-wrapped-at-2^16",
        "pages",
        "pages with ids of 65536 or more are read from the start of the pool",
        "page ids are stored in 16 bits",
        lambda: _ids(lambda page: page % 2**16),
        _is_high,
        issues=("AITER #3062", "AITER #3211"),
    ),
    Fault(
        "page-ids-wrapped-at-2^15",
        "pages",
        "pages with ids of 32768 or more are read from other pages",
        "page ids are stored in signed 16-bit integers, and the sign is dropped",
        lambda: _ids(lambda page: page % 2**15),
        _is_high,
    ),
    Fault(
        "offset-wrapped-at-2^31",
        "pages",
        "tokens deep in a large cache are read from addresses before its start",
        "page * stride is computed in a signed 32-bit integer",
        lambda: _address(_signed),
        lambda call: _elements(call) > 2**31,
        issues=("vLLM #50427", "vLLM #50483", "SGLang #20389"),
    ),
    Fault(
        "offset-wrapped-at-2^32",
        "pages",
        "tokens deep in a very large cache are read from its start",
        "page * stride is computed in an unsigned 32-bit integer",
        lambda: _address(lambda address: address % 2**32),
        lambda call: _elements(call) > 2**32,
        issues=("vLLM #50427", "SGLang #20389"),
    ),
    Fault(
        "page-size-mistaken",
        "pages",
        "tokens beyond the first part of a page come from another page",
        "the kernel was compiled for another page size, or its virtual page is a multiple of the actual one",
        lambda factor: _page_size(factor),
        lambda call: call.page_size > 1 and call.page_size % 2 == 0,
        ({"factor": 2}, {"factor": 0.5}, {"factor": 4}),
        issues=("FlashInfer #4347", "vLLM #57614"),
    ),
    Fault(
        "slots-rotated",
        "pages",
        "tokens are read from the next or the previous slot of their page",
        "an offset within the page that starts at 1",
        lambda by: _offset(by),
        lambda call: call.page_size > 1,
        ({"by": 1}, {"by": -1}),
    ),
    Fault(
        "last-page-read-whole",
        "lengths",
        "the unused slots of the last page contribute",
        "the loop runs over whole pages and does not mask the last one",
        lambda: _up_to(lambda w, sequence: -(-sequence.kv_len // w.call.page_size) * w.call.page_size),
        lambda call: call.new is None and call.mask is None and bool((call.kv_lens % call.page_size != 0).any()),
        issues=("vLLM #35219", "vLLM #43990"),
    ),
    Fault(
        "table-tail-read",
        "lengths",
        "pages after the end of a sequence contribute",
        "the loop runs over the width of the table, or one page too far",
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
        "slots just after the end contribute",
        "<= instead of <, or a length that was already incremented",
        lambda by: _longer(by),
        lambda call: call.new is None and call.mask is None,
        ({"by": 1}, {"by": 2}, {"by": 3}),
    ),
)
