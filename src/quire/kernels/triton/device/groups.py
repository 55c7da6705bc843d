"""The scales of groups of elements in a page (`quire.cache.groups`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_at(page, head, slot, group, G: tl.constexpr):
    """The offset of a scale in the storage of K or V; `G` is a `GroupPlaces`."""
    base = G.first + page * G.page + head * G.head
    in_slot = (slot // G.slot_part) * G.slot_high + (slot % G.slot_part) * G.slot_low
    return base + in_slot + (group // G.group_part) * G.group_high + (group % G.group_part) * G.group_low


@triton.jit
def load_groups(start, page, head, slot, inside, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, G: tl.constexpr):
    """The scales of the groups of a tile, bytes `[keys, groups]`; zeros where no query sees the key. The places broadcast against
    groups."""
    group = tl.arange(0, WIDTH // G.group)[None, :]
    at = group_at(page, head, slot, group, G)
    if MASKED:
        return tl.load(start + at, mask=inside & (group < DIM // G.group), other=0)
    elif WIDTH != DIM:
        return tl.load(start + at, mask=group < DIM // G.group, other=0)
    else:
        return tl.load(start + at)
