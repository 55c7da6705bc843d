"""Faults to inject into a run, to show what a failure looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import quire


def drop_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: quire.KVCache, batch: quire.Batch, options: quire.Options
) -> torch.Tensor:
    """The last token of the batch is not written."""
    slots = batch.slots_of_tokens(k.shape[0], cache.page_size)
    slots[-1] = -1
    quire.write(k, v, cache, batch, slots=slots)
    return quire.attend(q, cache, batch, options)


def stale_page(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: quire.KVCache, batch: quire.Batch, options: quire.Options
) -> torch.Tensor:
    """The page table of the last sequence contains a page that was released."""
    batch.page_table[-1, 1] = _stale_pages(cache)[0]
    out = quire.step(q, k, v, cache, batch, options)
    assert isinstance(out, torch.Tensor)
    return out


def swap_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: quire.KVCache, batch: quire.Batch, options: quire.Options
) -> torch.Tensor:
    """Keys and values are written to each other's heads. No rule of the contract detects it, because
    every token is in its slot."""
    out = quire.step(q, k.flip(1), v.flip(1), cache, batch, options)
    assert isinstance(out, torch.Tensor)
    return out


def _stale_pages(cache: quire.KVCache) -> list[int]:
    """The free pages that were written before."""
    assert cache.pool is not None and cache.ledger is not None
    written = (cache.ledger.position.view(cache.pages, cache.page_size) >= 0).all(1).cpu()
    return (written & (cache.pool.holders == 0)).nonzero().flatten().tolist()


class InjectedFault(NamedTuple):
    """A fault to inject: a wrong attention function, which one call uses instead of `quire.step`."""

    summary: str
    layer: int
    attention: Callable[..., torch.Tensor]

    def ready(self, step: int, layer: int, cache: quire.KVCache) -> bool:
        """Whether to inject it in this call: from step 12 on, in its layer, and for `stale_page` if some page was released."""
        return step >= 12 and layer == self.layer and bool(_stale_pages(cache) or self.attention is not stale_page)


INJECTED_FAULTS = {
    "drop-token": InjectedFault("one token is never written", 2, drop_token),
    "stale-page": InjectedFault("a page table contains a page that was released", 0, stale_page),
    "swap-heads": InjectedFault("keys and values are written to each other's heads", 3, swap_heads),
}
