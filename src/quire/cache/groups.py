"""Where the scales of groups are: a page of such a format holds the codes of all its tokens and heads, then their scales, both in
the order of the layout. vLLM stores NVFP4 so. The storage has the shape of the layout, its last axis as long as a head's codes and
scales together, but a row of that axis is not one head: only `split` says where a head's bytes are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from quire.cache.format import Format
from quire.cache.layout import Layout, Order
from quire.errors import ArgumentError


def joined(rows: torch.Tensor, format: Format, order: Order) -> torch.Tensor:
    """Storage from rows that have the scales of a head behind its codes, `[pages, page_size, kv_heads, units]`."""
    storage = torch.empty(order.shape(*rows.shape), dtype=rows.dtype, device=rows.device)
    codes, groups = split(order.view(storage), format, order)
    assert groups is not None
    by_head = rows.transpose(1, 2)
    codes.copy_(by_head[..., : codes.shape[5]].reshape(codes.shape))
    groups.copy_(by_head[..., codes.shape[5] :].reshape(groups.shape))
    return storage


class GroupPlaces(NamedTuple):
    """Where a page has the scales of groups, in elements of storage; strides are 0 for axes of length 1."""

    first: int
    """From the start of the page to the first scale."""
    page: int
    head: int
    slot_high: int
    slot_low: int
    group_high: int
    group_low: int
    slot_part: int
    """The length of slot%."""
    group_part: int
    """The length of group%."""
    group: int
    """Elements that share a scale."""


LAYOUTS_OF_GROUPS = ("nhd", "hnd")
SWIZZLE = 4
"""Tokens whose scales are permuted together."""


def split(view: torch.Tensor, format: Format, order: Order) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the codes `[pages, kv_heads, slot/, slot%, dim/, dim%]` and of the scales of groups
    `[pages, kv_heads, slot/, slot%, group/, group%]` in a view of storage; None without such scales."""
    if not format.group:
        return view, None
    pages, heads, _, slots, _, units = view.shape
    count = format.elements_of(units) // format.group
    codes = units - count
    slot, head = (heads, 1) if order.names[1] == "slot" else (1, slots)
    page, first = view.stride(0), view.storage_offset()
    code_view = view.as_strided(
        (pages, heads, 1, slots, 1, codes), (page, head * codes, slots * slot * codes, slot * codes, codes, 1), first
    )
    first += slots * heads * codes
    slot, head = slot * count, head * count
    if not format.swizzled:
        shape, strides = (1, slots, 1, count), (slots * slot, slot, count, 1)
    else:
        # The scale of token t and group g is where, without a permutation, that of token t / 4 * 4 + g / (count / 4) and group
        # g % (count / 4) * 4 + t % 4 would be.
        shape, strides = (slots // SWIZZLE, SWIZZLE, SWIZZLE, count // SWIZZLE), (SWIZZLE * slot, 1, slot, SWIZZLE)
    return code_view, view.as_strided((pages, heads, *shape), (page, head, *strides), first)


def group_places(format: Format, order: Order, page_size: int, heads: int, dim: int, page: int) -> GroupPlaces | None:
    """The places of scales in pages `page` elements of storage apart; None without scales of groups."""
    storage = torch.empty(order.shape(2, page_size, heads, format.units_of(dim)), dtype=format.dtype, device="meta")
    groups = split(order.view(storage), format, order)[1]
    if groups is None:
        return None
    strides = [stride if size > 1 else 0 for size, stride in zip(groups.shape[1:], groups.stride()[1:])]
    head, slot_high, slot_low, high, low = strides
    first, slot_part, part = int(groups.storage_offset()), groups.shape[3], groups.shape[5]
    return GroupPlaces(first, page, head, slot_high, slot_low, high, low, slot_part, part, format.group)


def check_layout(layout: Layout, formats: Iterable[Format]) -> None:
    """Raises ArgumentError for a layout that has no order of the scales of groups."""
    for format in formats:
        if format.group and layout.name not in LAYOUTS_OF_GROUPS:
            raise ArgumentError("layout", repr(layout.name), f"{' or '.join(LAYOUTS_OF_GROUPS)} with {format}")


def check_pages(name: str, view: torch.Tensor, format: Format, layout: Layout, order: Order) -> None:
    """Raises ArgumentError unless pages of a format with scales of groups have no gaps."""
    if not format.group:
        return
    _, heads, _, slots, _, units = view.shape
    if format.swizzled and slots % SWIZZLE:
        raise ArgumentError(name, f"pages of {slots} slots", f"a multiple of {SWIZZLE} slots with {format}")
    steps = (heads * units, units) if order.names[1] == "slot" else (units, slots * units)
    sizes = ((slots, view.stride(3), steps[0]), (heads, view.stride(1), steps[1]), (units, view.stride(5), 1))
    if any(size > 1 and given != wanted for size, given, wanted in sizes):
        given = f"strides {view.stride(3)} of slots, {view.stride(1)} of heads and {view.stride(5)} of bytes"
        allowed = f"{steps[0]}, {steps[1]} and 1: a page of {format} in layout {layout.name!r} has no gaps inside"
        raise ArgumentError(name, given, allowed)
