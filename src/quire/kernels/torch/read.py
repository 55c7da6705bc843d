"""Reads consecutive tokens of a sequence from their pages, as fp32 for matrix products.

A reader serves K or V for one call. It owns the two buffers that a tile passes through, so that memory use does not grow with the
context, and the loop does not allocate.

A tile may be divided into parts, one for each thread. Gathering, converting and attending then divide the work in the same way, and
a core reads what it has written. Otherwise half of every tile moves from one core's cache to another's in each step, which takes
twice the time where cores share no cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.cache.format import Format
from quire.cache.groups import split
from quire.cache.layout import Order
from quire.kernels.torch.codec import decode

SLICE_FROM = 64
"""From this page size on, a page is converted directly from the cache; smaller pages are gathered first, many in one operation."""


class Frame(NamedTuple):
    """Views of a reader's buffers for a certain number of pages and parts."""

    raw: torch.Tensor
    """Gathered pages, as they are stored."""
    view: torch.Tensor
    """The same memory as [parts, kv_heads, pages, slot/, slot%, dim/, dim%]."""
    groups: torch.Tensor | None
    """The scales of groups in it, [pages, kv_heads, slot/, slot%, group/, group%]."""
    tile_view: torch.Tensor
    """The tile in that shape."""
    tile: torch.Tensor
    """The tile, [parts, kv_heads, tokens / parts, dim]."""


class Reader:
    """Tokens of one sequence as `[kv_heads, tokens, dim]` in fp32, dequantised."""

    def __init__(self, storage: torch.Tensor, order: Order, format: Format, scale: torch.Tensor | None, tile: int):
        self.order, self.format, self.scale = order, format, scale
        self.storage = storage.view(torch.uint8) if format.itemsize == 1 else storage
        self.view, self.groups = split(order.view(self.storage), format, order)
        _, self.heads, slot_hi, slot_lo, dim_hi, dim_lo = self.view.shape
        self.page_size, self.dim = slot_hi * slot_lo, format.elements_in(dim_hi * dim_lo)
        self.dims = (dim_hi, self.dim // dim_hi)
        self.whole_pages = self.page_size < SLICE_FROM
        count = -(-tile // self.page_size) + 1 if self.whole_pages else 0
        # Buffers for gathered pages and for the tile.
        self.raw = torch.empty((count, *self.storage.shape[1:]), dtype=self.storage.dtype, device=storage.device)
        size = self.heads * max(tile, count * self.page_size) * self.dim
        self.buffer = torch.empty(size, dtype=torch.float32, device=storage.device)
        self.frames: dict[tuple[int, int], Frame] = {}

    def read(
        self, pages: torch.Tensor, start: int, stop: int, new: torch.Tensor | None, context: int, parts: int, shared: bool
    ) -> torch.Tensor:
        """Tokens [start, stop) of the sequence that owns `pages`, `[parts, kv_heads, tokens / parts, dim]`. Those from `context` on
        come from `new` `[q_len, kv_heads, dim]`, if that is given. The result has `parts` parts only if whole pages are read and
        `parts` divides their number, otherwise one. With `shared`, the tile is copied into a contiguous layout because several
        products use it. The buffer is overwritten by the next call."""
        cut = stop if new is None else max(start, min(stop, context))
        pieces = []
        if start < cut:
            first, last = start // self.page_size, -(-cut // self.page_size)
            ids = pages[first:last]
            if ids.shape[0] < last - first:
                # With a tree mask, keys without a column are hidden: any page can be read.
                ids = torch.nn.functional.pad(ids, (0, last - first - ids.shape[0]))
            if self.whole_pages:
                pieces.append(self._gather(ids, start, cut, parts if cut == stop else 1, shared))
            else:
                pieces.append(self._slice(ids.tolist(), start, cut))
        if new is not None and cut < stop:
            pieces.append(new[cut - context : stop - context].transpose(0, 1).contiguous().float()[None])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def _gather(self, ids: torch.Tensor, start: int, stop: int, parts: int, shared: bool) -> torch.Tensor:
        """Gathers many small pages at once. fp32 pages whose layout suits a product are used where they were gathered."""
        whole = start % self.page_size == 0 and stop % self.page_size == 0 and ids.shape[0] % parts == 0
        frame = self._frame(ids.shape[0], parts if whole else 1)
        torch.index_select(self.storage, 0, ids, out=frame.raw)
        if self.format.name == "fp32" and not shared and self.order.names[1] == "slot":
            tile = frame.view.reshape(frame.tile.shape)
        else:
            decode(frame.view, self.format, frame.tile_view, _in_parts(frame))
            tile = frame.tile
        if self.scale is not None:
            self.format.scaled_in_place(tile, self._scale_of(ids, tile.shape[0]))
        offset = start % self.page_size
        return tile if whole else tile[:, :, offset : offset + stop - start]

    def _frame(self, pages: int, parts: int) -> Frame:
        """Views of the buffers for a number of pages and parts. Nearly all tiles of a call have the same: they are made once."""
        if (pages, parts) not in self.frames:
            raw = self.raw[:pages]
            view, groups = split(self.order.view(raw), self.format, self.order)
            view = view.unflatten(0, (parts, -1)).transpose(1, 2)
            tile_view = self.buffer[: view[..., 0, 0].numel() * self.dim].view(*view.shape[:-2], *self.dims)
            self.frames[pages, parts] = Frame(raw, view, groups, tile_view, tile_view.view(parts, self.heads, -1, self.dim))
        return self.frames[pages, parts]

    def _slice(self, ids: list[int], start: int, stop: int) -> torch.Tensor:
        """A few large pages, each converted directly from the cache."""
        out = self.buffer[: self.heads * (stop - start) * self.dim].view(self.heads, stop - start, self.dim)
        at = start
        for page in ids:
            offset = at % self.page_size
            end = min(stop, at - offset + self.page_size)
            slots = torch.arange(offset, offset + end - at, device=self.view.device)
            if self.view.shape[2] == 1:
                piece = self.view[page, :, 0, offset : offset + end - at]
            else:
                piece = self.view[page][:, slots // self.view.shape[3], slots % self.view.shape[3]]
            tile = out[:, at - start : end - start]
            decode(piece, self.format, tile.unflatten(2, self.dims), self._groups_of(page, slots))
            if self.scale is not None:
                scale = self.scale[page, slots].T.unsqueeze(2) if self.scale.dim() == 3 else self.scale.reshape(-1, 1, 1)
                self.format.scaled_in_place(tile, scale)
            at = end
        return out[None]

    def _groups_of(self, page: int, slots: torch.Tensor) -> torch.Tensor | None:
        """The scales of the groups of some slots of a page, `[kv_heads, slots, groups]`."""
        if self.groups is None:
            return None
        part = self.groups.shape[3]
        return self.groups[page][:, slots // part, slots % part].flatten(2)

    def _scale_of(self, ids: torch.Tensor, parts: int) -> torch.Tensor:
        """The scales of whole pages, in a shape that multiplies a tile."""
        assert self.scale is not None
        if self.scale.dim() < 3:
            return self.scale.expand(self.heads).view(1, -1, 1, 1)
        return self.scale.index_select(0, ids).view(parts, -1, self.heads).transpose(1, 2).unsqueeze(3)


def _in_parts(frame: Frame) -> torch.Tensor | None:
    """The scales of the groups of gathered pages in the shape of `frame.view`, `[parts, kv_heads, pages, 1, slots, groups]`."""
    if frame.groups is None:
        return None
    pages, heads = frame.groups.shape[:2]
    by_slot = frame.groups.flatten(4).reshape(pages, heads, *frame.view.shape[3:5], -1)
    return by_slot.unflatten(0, (frame.view.shape[0], -1)).transpose(1, 2)
