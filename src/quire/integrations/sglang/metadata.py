"""The batch of a forward pass, from SGLang's request table and lengths. Nothing is read from a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.batch import Batch


@dataclass
class PassMetadata:
    """What the layers of one forward pass share."""

    full: Batch
    """For layers whose keys are all of the sequence's."""
    window: Batch
    """For layers with a sliding window: the same, unless their tokens are in a pool of their own."""
    cross: Batch | None = None
    """For layers that attend to an encoder's tokens."""
    mask: torch.Tensor | None = None
    """The tree mask of a speculative verification, bool `[tokens, draft tokens]`."""
    window_slots: torch.Tensor | None = None
    """Where layers with a sliding window store the new tokens, if they have a pool of their own."""


class RequestTable:
    """SGLang's table of slots, read as page tables."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int, window_pool: Any | None):
        self.req_to_token, self.page_size, self.window_pool = req_to_token, page_size, window_pool
        self.device = req_to_token.device

    def width(self, max_len: int | None) -> int:
        """Columns of a page table for sequences of up to `max_len` tokens; None: of any length."""
        tokens = self.req_to_token.shape[1]
        return -(-(tokens if max_len is None else min(max_len, tokens)) // self.page_size)

    def pages(self, requests: torch.Tensor, width: int, starts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Page tables `[seqs, width]` for full attention and for sliding windows. Entries after a sequence's last page are
        whatever the request table holds. `starts` are the positions at which the sequences begin, for pages of one slot."""
        columns = torch.arange(width, device=self.device) * self.page_size
        if starts is None:
            slots = self.req_to_token[requests[:, None], columns]
        else:
            columns = (columns + starts[:, None]).clamp(max=self.req_to_token.shape[1] - 1)
            slots = self.req_to_token[requests[:, None], columns]
        full = slots if self.page_size == 1 else slots // self.page_size
        if self.window_pool is None:
            return full, full
        in_window = self.window_pool.translate_loc_from_full_to_swa(slots)
        return full, in_window if self.page_size == 1 else in_window // self.page_size


def starts_of(lens: torch.Tensor) -> torch.Tensor:
    """Where rows of these lengths start, `[seqs + 1]`."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int64), (1, 0))


def draft_tokens(forward_batch: Any) -> int:
    """New tokens of each sequence in a speculative verification."""
    spec = forward_batch.spec_info
    return int(getattr(spec, "draft_token_num", 0) or spec.num_tokens_per_req)


def new_tokens(forward_batch: Any) -> int | None:
    """New tokens of each sequence where all have as many: in decode and verification; None in prefill."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        return draft_tokens(forward_batch)
    return 1 if mode.is_decode_or_idle() else None


def kv_lens_of(forward_batch: Any) -> torch.Tensor:
    """The length of each sequence with its new tokens. A verification's lengths are without them."""
    lens: torch.Tensor = forward_batch.seq_lens
    return lens + draft_tokens(forward_batch) if forward_batch.forward_mode.is_target_verify() else lens


def q_starts_of(forward_batch: Any) -> tuple[torch.Tensor, int | None]:
    """Where the new tokens of each sequence start, and the most of one sequence where the host knows it."""
    tokens = new_tokens(forward_batch)
    if tokens is not None:
        seqs, device = forward_batch.seq_lens.shape[0], forward_batch.seq_lens.device
        return torch.arange(seqs + 1, dtype=torch.int64, device=device) * tokens, tokens
    known = forward_batch.extend_seq_lens_cpu
    return starts_of(forward_batch.extend_seq_lens), max(known) if known else None


def longest_of(forward_batch: Any) -> int | None:
    """The longest sequence of a batch with its new tokens, where the host knows it."""
    known = forward_batch.seq_lens_cpu
    if known is None or not known.numel():
        return None
    return int(known.max()) + (draft_tokens(forward_batch) if forward_batch.forward_mode.is_target_verify() else 0)


def build(forward_batch: Any, table: RequestTable) -> PassMetadata:
    """The metadata of a pass outside of CUDA graphs."""
    kv_lens, max_kv = kv_lens_of(forward_batch), longest_of(forward_batch)
    q_starts, max_q = q_starts_of(forward_batch)
    requests, encoder_lens = forward_batch.req_pool_indices, forward_batch.encoder_lens
    full, window = table.pages(requests, table.width(max_kv), encoder_lens)
    metadata = PassMetadata(
        Batch(full, kv_lens, q_starts, max_q_len=max_q, max_kv_len=max_kv),
        Batch(window, kv_lens, q_starts, max_q_len=max_q, max_kv_len=max_kv),
    )
    if encoder_lens is not None:
        known = forward_batch.encoder_lens_cpu
        longest = None if known is None or not len(known) else int(max(known))
        cross, _ = table.pages(requests, max(table.width(longest), 1))
        metadata.cross = Batch(cross, encoder_lens, q_starts, max_q_len=max_q, max_kv_len=longest)
    if forward_batch.forward_mode.is_target_verify():
        metadata.mask = tree_mask(forward_batch)
    return metadata


def tree_mask(forward_batch: Any) -> torch.Tensor | None:
    """The part of a verification's mask that concerns the draft tokens among themselves, bool `[tokens, draft tokens]`; None if
    every draft is a chain. SGLang's mask has, for each sequence, a row of context and draft tokens for each draft token, or the
    draft tokens alone."""
    given = forward_batch.spec_info.custom_mask
    if given is None:
        return None
    tokens, lens = draft_tokens(forward_batch), forward_batch.seq_lens
    seqs = lens.shape[0]
    if given.numel() == seqs * tokens * tokens:
        return given.view(seqs * tokens, tokens).bool()
    row = lens.to(torch.int64) + tokens
    begin = starts_of(row * tokens)[:-1]
    at = torch.arange(tokens, device=lens.device)
    # [seqs, draft token, draft token]: skip the rows of earlier tokens, then the context.
    index = begin[:, None, None] + at[:, None] * row[:, None, None] + lens.to(torch.int64)[:, None, None] + at
    return given[index.view(-1)].view(seqs * tokens, tokens).bool()
