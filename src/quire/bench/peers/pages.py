"""The keys of a case as pages for libraries without selections: where every sequence has one new token, the selected keys are a
page table of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.batch import Batch
from quire.bench.case import BenchCase


class PeerPages(NamedTuple):
    """K and V `[pages, page_size, kv_heads, dim]`, and the sequences over them."""

    k: torch.Tensor
    v: torch.Tensor
    batch: Batch

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def csr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The page table in FlashInfer's form: offsets, page ids and lengths of last pages."""
        table, lens, size = self.batch.page_table, self.batch.kv_lens.tolist(), self.page_size
        lists = [row[: -(-n // size)] for row, n in zip(table, lens)]
        counts = torch.tensor([0, *map(len, lists)], device="cpu").cumsum(0).int().to(table.device)
        return counts, torch.cat(lists), (self.batch.kv_lens - 1) % size + 1


def pages_of(case: BenchCase) -> PeerPages | None:
    """The pages of a case; None if its selection cannot be a page table."""
    cache, batch, select = case.cache, case.batch, case.batch.select
    if select is None:
        return PeerPages(cache.k, cache.v, batch)
    if case.workload.tokens != batch.seqs or select.entries.shape[1] != 1:
        return None
    entries, table, size = select.entries[:, 0].long(), batch.page_table, cache.page_size
    if select.kind == "columns":
        # Only the last column of a sequence, which comes last, may be a page that is not full.
        unused = (batch.kv_lens[:, None] - 1) // size + 1
        lens = entries.shape[1] * size - (unused[:, 0] * size - batch.kv_lens)
        chosen = table.gather(1, entries)
        return PeerPages(cache.k, cache.v, _over(batch, chosen, lens))
    chosen = table.gather(1, entries // size) * size + entries % size
    lens = torch.full_like(batch.kv_lens, entries.shape[1])
    k, v = (x.flatten(0, 1)[:, None] for x in (cache.k, cache.v))
    return PeerPages(k, v, _over(batch, chosen, lens))


def _over(batch: Batch, table: torch.Tensor, lens: torch.Tensor) -> Batch:
    """The sequences of a batch over other pages."""
    padded = torch.nn.functional.pad(table.int(), (0, -table.shape[1] % 8))
    return Batch(padded, lens.int(), batch.q_starts, max_q_len=batch.max_q_len, max_kv_len=int(lens.max()))
