"""Packs a call into the C structures of `call.h`: pointers, strides and numbers.

The part that describes a cache is packed once and kept with it: filling a ctypes structure of that size takes longer than a short
decode.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache.format import FORMATS, Format
from quire.cache.kv_cache import KVCache

_CODECS = tuple(dict.fromkeys(format.codec for format in FORMATS.values()))
TYPES = {name: _CODECS.index(format.codec) for name, format in FORMATS.items()}
"""The values of the enum `Type` of call.h, which has the codecs in the same order."""
TYPE_OF = {format.dtype: TYPES[name] for name, format in FORMATS.items() if format.uniform}
UNBOUNDED = 2**63 - 1
Words = tuple[int, ...]
ABSENT: Words = (0, 0, 0, 0)
"""An absent index tensor."""
NO_SHARD: Words = (0, 1, 1)
"""One rank, which holds every key."""
NO_SELECT: Words = (0,) * 7
"""No selection."""
NO_PREFIXES: Words = (0,) * 4
"""Every sequence is read by itself."""

_ARRAYS, _INDEX, _BATCH, _SELECT, _PAGES = 4 * 5, 4, 3 * 4 + 2 + 3, 7, 23
ATTEND = struct.Struct(f"{_ARRAYS}q 5q {_BATCH}q 3d 11q {2 * _INDEX}q {_SELECT}q 4q 7q")
"""The fields of `Attend` before its cache."""
WRITE = struct.Struct(f"10q {_BATCH}q {_INDEX}q 4q")
"""The fields of `Write` before its cache."""
ROPE = struct.Struct("6q 4q q 10q q 4q d 3q")
"""The fields of `Rope`, which a `RopeWrite` begins with."""
CACHE = struct.Struct(f"{2 * _PAGES}q 3q")
CHECK = struct.Struct(f"{_BATCH}q 12q 3q 4q {2 * _INDEX}q {_SELECT}q q {_INDEX}q q 12q 2q")
SIZES = {"attend": ATTEND.size + CACHE.size, "write": WRITE.size + CACHE.size, "check": CHECK.size}
SIZES["rope_write"] = ROPE.size + SIZES["write"]
"""Bytes of each structure. The library reports its own sizes, and `Library` compares them."""


class Packed(NamedTuple):
    """A packed cache, and the tensors and addresses it was packed from."""

    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    places: tuple[int, ...]
    content: bytes
    written: bytes
    """The same for a write: with the two parts of K, where V is one of them, in place of K and V."""


def array(tensor: torch.Tensor) -> Words:
    """[tokens, heads, dim]."""
    return tensor.data_ptr(), *tensor.stride(), TYPE_OF[tensor.dtype]


def index(tensor: torch.Tensor) -> Words:
    """An int32 or int64 tensor of one axis or two."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1) if tensor.dim() > 1 else 0, tensor.dtype is torch.int64


def batch_of(batch: Batch) -> Words:
    table, kv_lens, q_starts = batch.page_table, batch.kv_lens, batch.q_starts
    wide = torch.int64
    return (
        table.data_ptr(), *table.stride(), table.dtype is wide,
        kv_lens.data_ptr(), kv_lens.stride(0), 0, kv_lens.dtype is wide,
        q_starts.data_ptr(), q_starts.stride(0), 0, q_starts.dtype is wide,
        *table.shape, *(batch.shard or NO_SHARD),
    )  # fmt: skip


def rope_of(call: Any) -> bytes:
    """The rotation of a write."""
    rope, positions, q, out = call.rope, call.rope_positions, call.q_in, call.q_out
    given = ABSENT
    if positions is not None:
        axis, token = (0, *positions.stride())[-2:]
        given = (positions.data_ptr(), axis, token, positions.dtype is torch.int64)
    norms = (None if q is None else rope.q_norm, rope.k_norm)
    return ROPE.pack(
        rope.cos.data_ptr(), rope.sin.data_ptr(), rope.cos.stride(0), rope.max_positions, rope.rotary_dim // 2, rope.interleaved,
        *given,
        0 if rope.sections is None else rope.axes.data_ptr(),
        *((0,) * 11 if q is None else (*array(q), *array(out), q.shape[1])),
        *(word for norm in norms for word in ((0, 0) if norm is None else (norm.data_ptr(), TYPE_OF[norm.dtype]))),
        rope.eps,
        rope.unit_offset,
        call.zero_padding and q is not None,
        call.cache.v_in_k or 0,
    )  # fmt: skip


def select_of(batch: Batch, q: torch.Tensor | None) -> Words:
    """The selection of a batch; none in a write. Heads that share their entries have stride 0."""
    select = batch.select
    if select is None or q is None:
        return NO_SELECT
    entries = select.entries
    row, head, step = entries.stride()
    head = 0 if entries.shape[1] == 1 else head
    kind = 1 + (select.kind == "columns")
    return entries.data_ptr(), row, head, step, entries.dtype is torch.int64, entries.shape[2], kind


def prefixes_of(batch: Batch) -> Words:
    """The shared prefixes of a batch. Their tensors are contiguous."""
    shared = batch.prefixes
    if shared is None:
        return NO_PREFIXES
    return shared.groups.data_ptr(), shared.members.data_ptr(), len(shared.groups), len(shared.members)


def cache_of(cache: KVCache) -> bytes:
    """The pages and scales of a cache."""
    return _packed(cache).content


def written_cache_of(cache: KVCache) -> bytes:
    """The same for a write."""
    return _packed(cache).written


def _packed(cache: KVCache) -> Packed:
    """A cache is packed again if scales were assigned or memory has moved."""
    known: Packed | None = cache.packed
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if known is not None and known.k_scale is k_scale and known.v_scale is v_scale and known.places == _places(cache):
        return known
    contents = [
        CACHE.pack(
            *_pages(views[0], cache.k_groups, formats[0], k_scale),
            *_pages(views[1], cache.v_groups, formats[1], v_scale),
            cache.pages,
            cache.page_size,
            cache.kv_heads,
        )
        for views, formats in (
            ((cache.k_view, cache.v_view), (cache.k_format, cache.v_format)),
            (cache.written_views, cache.written_formats),
        )
    ]
    cache.packed = packed = Packed(k_scale, v_scale, _places(cache), *contents)
    return packed


def _places(cache: KVCache) -> tuple[int, ...]:
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if k_scale is None and v_scale is None:
        return cache.k_view.data_ptr(), cache.v_view.data_ptr()
    k_place, v_place = (0 if scale is None else scale.data_ptr() for scale in (k_scale, v_scale))
    return cache.k_view.data_ptr(), cache.v_view.data_ptr(), k_place, v_place


def _pages(view: torch.Tensor, groups: torch.Tensor | None, format: Format, scale: torch.Tensor | None) -> Words:
    _, _, _, slot_part, dim_high, dim_part = view.shape
    strides: Words = (0, 0, 0)
    if scale is not None:
        strides = {0: (0, 0, 0), 1: (0, 0, *scale.stride()), 3: scale.stride()}[scale.dim()]
    pointer = 0 if scale is None else scale.data_ptr()
    dim = format.elements_in(dim_high * dim_part)
    own = (view.data_ptr(), *view.stride(), slot_part, dim_part, dim, TYPES[format.name], pointer, *strides)
    if groups is None:
        return *own, *(0,) * 8
    return *own, groups.data_ptr(), *groups.stride()[1:], groups.shape[3], groups.shape[5]
