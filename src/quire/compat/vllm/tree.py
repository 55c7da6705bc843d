"""The query-query bias and the multimodal ranges of `unified_attention` as Quire's tree mask.

A tree mask replaces causality among the new tokens and does not affect the context. It can express a query-query bias of 0 and
-inf, and multimodal ranges, unless a range extends beyond the left edge of a window.
"""

from __future__ import annotations

import math

import torch

from quire.batch import Batch
from quire.errors import ArgumentError, describe


def tree_mask(
    batch: Batch,
    tokens: int,
    causal: bool | torch.Tensor,
    window: int | None,
    qq_bias: torch.Tensor | None,
    mm_prefix_range: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which new tokens of its sequence each new token sees, bool `[tokens, tokens]`, and the tokens' positions. Nothing is read on
    the host, so the mask has a column for every token."""
    device = batch.device
    seq = batch.sequences_of_tokens(tokens).clamp(max=max(batch.seqs - 1, 0))
    starts = batch.q_starts.long()
    context = (batch.kv_lens.long() - starts.diff())[seq]
    column = torch.arange(tokens, device=device)
    at = column - starts[seq]  # of each token among the new ones of its sequence, [tokens]
    ahead = column > at[:, None]
    visible = ~ahead
    if isinstance(causal, torch.Tensor) or not causal:
        both_sides = ahead if window is None else ahead & (column < (at + window)[:, None])
        visible |= both_sides & (~causal[seq, None] if isinstance(causal, torch.Tensor) else True)
    if mm_prefix_range is not None:
        ranges = mm_prefix_range.long()[seq] - context[:, None, None]
        for first, last in (pair.unbind(1) for pair in ranges.unbind(1)):
            inside = (at >= first) & (at <= last)
            visible |= inside[:, None] & (column >= first[:, None]) & (column <= last[:, None])
    if qq_bias is not None:
        size = qq_bias.shape[0]
        biased = (at < size)[:, None] & (column < size)
        hidden = (qq_bias == -math.inf)[at.clamp(0, size - 1)][:, column.clamp(max=size - 1)]
        visible &= ~(biased & hidden)
    return visible, context + at


def check_bias(qq_bias: torch.Tensor, batch: Batch) -> Batch:
    """Rejects a bias with other values than 0 and -inf. On a GPU, where values are not read, such a bias replaces the page table by
    invalid pages, so that the output is NaN."""
    if not isinstance(qq_bias, torch.Tensor) or qq_bias.dim() != 2 or qq_bias.shape[0] != qq_bias.shape[1] or not len(qq_bias):
        raise ArgumentError("qq_bias", describe(qq_bias), "a tensor [queries, queries]")
    other = ((qq_bias != 0) & (qq_bias != -math.inf)).any()
    if qq_bias.device.type == "cpu":
        if bool(other):
            raise ArgumentError(
                "qq_bias", "a bias with other finite values than 0", "0 where a token is visible and -inf where it is not"
            )
        return batch
    pages = torch.where(other, -1, batch.page_table)
    return Batch(pages, batch.kv_lens, batch.q_starts, max_q_len=batch.max_q_len, max_kv_len=batch.max_kv_len)
