"""The memory of captured CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from quire.batch import Batch
from quire.errors import ArgumentError
from quire.integrations.sglang.metadata import PassMetadata, RequestTable, draft_tokens, kv_lens_of, new_tokens, tree_mask


class GraphBuffers:
    """The memory that captured graphs read: filled inside the graph from the request table, and before each replay."""

    def __init__(self, table: RequestTable, max_seqs: int, max_tokens: int):
        self.table, width = table, table.width(None)
        self.max_tokens = max_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=table.device)

        self.full = zeros(max_seqs, width)
        self.window = self.full if table.window_pool is None else zeros(max_seqs, width)
        self.kv_lens = zeros(max_seqs, dtype=torch.int64)
        self.window_slots = None if table.window_pool is None else zeros(max_tokens, dtype=torch.int64)
        self.q_starts: dict[int, torch.Tensor] = {}
        """By new tokens of a sequence, for the largest batch. Graphs of all sizes read it, so it is never made again."""
        self.masks: dict[int, torch.Tensor] = {}
        """By draft tokens."""
        self.with_mask: set[tuple[int, int]] = set()
        """Sizes that were captured with a mask: (sequences, draft tokens)."""

    def metadata(self, forward_batch: Any) -> PassMetadata:
        """Metadata over the buffers, for a batch of this size."""
        if forward_batch.encoder_lens is not None:
            raise ArgumentError("encoder_lens", "a tensor, in a CUDA graph", "None: disable CUDA graphs for encoder-decoder models")
        seqs, max_q = forward_batch.seq_lens.shape[0], new_tokens(forward_batch)
        if max_q is None:
            raise ArgumentError("forward_mode", forward_batch.forward_mode.name, "DECODE or TARGET_VERIFY, in a CUDA graph")
        if max_q not in self.q_starts:
            self.q_starts[max_q] = torch.arange(self.kv_lens.shape[0] + 1, device=self.table.device) * max_q
        q_starts, lens = self.q_starts[max_q][: seqs + 1], self.kv_lens[:seqs]
        made = PassMetadata(
            Batch(self.full[:seqs], lens, q_starts, max_q_len=max_q), Batch(self.window[:seqs], lens, q_starts, max_q_len=max_q)
        )
        if self.window_slots is not None and forward_batch.out_cache_loc is not None:
            made.window_slots = self.window_slots[: forward_batch.out_cache_loc.shape[0]]
        if forward_batch.forward_mode.is_target_verify() and forward_batch.spec_info.custom_mask is not None:
            tokens = draft_tokens(forward_batch)
            if tokens not in self.masks:
                self.masks[tokens] = torch.zeros(self.max_tokens, tokens, dtype=torch.bool, device=self.table.device)
            self.with_mask.add((seqs, tokens))
            made.mask = self.masks[tokens][: seqs * tokens]
        return made

    def fill_outside(self, forward_batch: Any, window_slots: torch.Tensor | None) -> None:
        """Copies what depends on sizes that are known on the host only: the mask of a verification and the slots of windows."""
        if self.window_slots is not None:
            tokens = 0 if window_slots is None else window_slots.shape[0]
            self.window_slots[tokens:].zero_()
            if window_slots is not None:
                self.window_slots[:tokens].copy_(window_slots)
        if not forward_batch.forward_mode.is_target_verify():
            return
        tokens, seqs = draft_tokens(forward_batch), forward_batch.seq_lens.shape[0]
        mask = tree_mask(forward_batch)
        if (mask is not None) != ((seqs, tokens) in self.with_mask):
            given, allowed = ("no mask", "one") if mask is None else ("a mask", "none")
            raise ArgumentError("custom_mask", given, f"{allowed}, as when the graph of {seqs} sequences was captured")
        if mask is not None:
            self.masks[tokens][: mask.shape[0]].copy_(mask)

    def fill_inside(self, forward_batch: Any) -> None:
        """Fills page tables and lengths, by operations on the device that a graph records."""
        lens = kv_lens_of(forward_batch)
        seqs = lens.shape[0]
        full, window = self.table.pages(forward_batch.req_pool_indices[:seqs], self.full.shape[1])
        self.full[:seqs].copy_(full)
        if self.window is not self.full:
            self.window[:seqs].copy_(window)
        self.kv_lens[:seqs].copy_(lens)
