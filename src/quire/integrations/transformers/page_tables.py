"""Page tables and slots of a step, from the indices that transformers prepares for its gather. Nothing is read on the host.

transformers counts tokens of its cache in rows: row `block * stride + offset` holds a token's key, for the first layer of an
allocator; `stride` rows hold a block of `page` tokens for all layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quire.batch import Batch


class PagedStep(NamedTuple):
    """The batch of one allocator in one forward pass."""

    batch: Batch
    slots: torch.Tensor | None
    """Where new tokens are written, -1 for those that no later query sees; None if the batch says it."""
    context_first: bool = False
    """Whether to attend before writing, with pages of one token."""
    is_ring: bool = False
    """Whether the pages hold exactly the window, in the order of a ring."""


def step_of(allocator: Any, arguments: dict[str, Any]) -> PagedStep:
    """The batch of an allocator's layers."""
    kind = allocator.layer_type
    q_starts, k_starts = arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"][kind]
    longest_q, longest_k = int(arguments["max_length_q"]), int(arguments["max_length_k"][kind])
    table, lens = arguments.get("block_table"), k_starts[1:] - k_starts[:-1]
    page, stride = allocator.tokens_per_page, allocator.block_physical_stride
    if table is not None:
        # The maximum lengths are not known here: transformers passes 1.
        return PagedStep(Batch(table[allocator.index] // (stride // page), lens, q_starts, page_size=page), None)
    read, rows = arguments["read_index"][allocator.index], arguments["write_index"][allocator.index]
    slots = torch.where(rows == allocator.write_trash_index, -1, rows // stride * page + rows % stride)
    hints: dict[str, Any] = {"max_q_len": longest_q, "max_kv_len": longest_k}
    window = getattr(allocator, "sliding_window", None)
    if window is None:
        source, starts = (read, k_starts) if read.numel() else (rows, q_starts)
        table = _taken(source, starts, torch.arange(0, longest_k, page, device=read.device)) // stride
        return PagedStep(Batch(table, lens, q_starts, slots=slots, **hints), slots)
    positions = arguments.get("position_ids")
    if longest_q == 1 and read.numel() and positions is not None and positions.dim() == 2:
        table = _ring(read, rows, k_starts, lens, positions[0][q_starts[:-1]], (window, page)) // stride
        return PagedStep(Batch(table, lens, q_starts, slots=slots, **hints), slots, is_ring=True)
    context = torch.arange(max(1, min(longest_k, window)), device=rows.device)
    table = _taken(read, k_starts, context) if read.numel() else torch.zeros_like(lens)[:, None]
    return PagedStep(Batch(table, lens, q_starts, **hints), slots, context_first=True)


def _taken(source: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`source` at `offsets` from the start of each sequence, [seqs, offsets]; behind its end any value."""
    return source[(starts[:-1, None] + offsets).clamp(max=source.numel() - 1)]


def _ring(
    read: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    sizes: tuple[int, int],
) -> torch.Tensor:
    """The first row of each page of a ring, `[seqs, pages]`. The token at position `p` is in place `p % window` of the ring.

    `read` has the context in the order of positions, so it begins anywhere in the ring; `rows` has the place of the new token."""
    window, page = sizes
    oldest = torch.where(positions < window, 0, (positions + 1) % window)[:, None]
    places = torch.arange(0, window, page, device=read.device)
    since_oldest = (places - oldest) % window
    is_new = since_oldest >= (lens - 1)[:, None]
    found = read[(starts[:-1, None] + since_oldest).clamp(max=read.numel() - 1)]
    return torch.where(is_new, rows[: lens.shape[0], None], found)
