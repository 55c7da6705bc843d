"""A fast static check that accepts common legal calls in a few microseconds. If it returns False, the rules decide.

The rules collect every argument by name for their messages, which takes tens of microseconds, longer than a short decode."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from quire.batch import Batch
from quire.cache.format import FP8_TYPES
from quire.cache.kv_cache import KVCache
from quire.cache.prefixes import Prefixes
from quire.cache.select import Select
from quire.contract import static
from quire.contract.call import Call
from quire.options import PLAIN, Options
from quire.problem import is_fp8
from quire.rope import Rope

COVERED = frozenset(
    (
        static.index_types,
        static.batch_shapes,
        static.query_shapes,
        static.key_value_shapes,
        static.one_device,
        static.copies_applied,
        static.output,
        static.quantisation,
        static.own_memory,
        static.rotation,
        static.spans,
        static.selection,
        static.prefixes,
        static.latent,
    )
)
"""The static checks that this module covers. All others run in every call."""

_INDEX = frozenset((torch.int32, torch.int64))
_FLOATS = frozenset(static.FLOATS)
_QUERIES = frozenset((dtype, True) for dtype in _FLOATS) | {(dtype, False) for dtype in FP8_TYPES}
"""The types of queries, each with whether `q_scale` must be absent."""
_CLASSES = (KVCache, Batch, Options)
_Tensor, _Strided = torch.Tensor, torch.strided
_TENSORS = (_Tensor, _Tensor, _Tensor)


def is_certainly_legal(call: Call) -> bool:
    """Whether classes, shapes, types, devices, strides and options violate none of the rules covered here. False: run the rules.

    This runs in every call, so it is one function, and related properties are compared as tuples."""
    cache, batch, q, options = call.cache, call.batch, call.q, call.options
    if (type(cache), type(batch), type(options)) != _CLASSES:
        return False
    if batch.copies or batch.pool_state.now != batch.state_number:
        return False
    table, lens, starts, device = batch.page_table, batch.kv_lens, batch.q_starts, cache.k_view.device
    if (type(table), type(lens), type(starts)) != _TENSORS:
        return False
    places = (table.device, lens.device, starts.device, table.layout, lens.layout, starts.layout)
    if places != (device, device, device, _Strided, _Strided, _Strided) or not _INDEX.issuperset(
        (table.dtype, lens.dtype, starts.dtype)
    ):
        return False
    seqs = starts.numel() - 1
    if (table.dim(), table.shape[:1], lens.shape, starts.shape) != (2, (seqs,), (seqs,), (seqs + 1,)):
        return False
    if q is not None:
        if type(q) is not _Tensor or (q.layout, q.dim(), q.device) != (_Strided, 3, device):
            return False
        if (q.is_neg(), q.requires_grad, (q.dtype, options.q_scale is None) in _QUERIES) != (False, False, True):
            return False
        heads = q.size(1)
        if (q.size(2), heads % cache.kv_heads, heads > 0) != (cache.head_dim, 0, True):
            return False
        plain = options is PLAIN, batch.spans is None, batch.select is None, batch.prefixes is None
        if plain != (True, True, True, True) and not _options_are_legal(call, q, seqs, device):
            return False
    if call.new is not None and not _new_is_legal(call, device):
        return False
    if not (call.k is call.v is None) and not _write_is_legal(call, device):
        return False
    return call.out is call.lse is None or _results_are_legal(call, device)


def _options_are_legal(call: Call, q: torch.Tensor, seqs: int, device: torch.device) -> bool:
    options, spans, select, prefixes = call.options, call.batch.spans, call.batch.select, call.batch.prefixes
    if prefixes is not None and not _prefixes_are_legal(prefixes, seqs, device):
        return False
    if spans is not None and not _spans_are_legal(spans, q, options, device):
        return False
    if select is not None and not _selection_is_legal(call, q, seqs, device):
        return False
    sizes, causal = {"tokens": q.size(0), "q_heads": q.size(1)}, options.causal
    for tensor, axis in options.first_axes:
        if tensor.size(0) != sizes[axis] or tensor.device != device:
            return False
    return causal is True or causal is False or (causal.size(0) == seqs and causal.device == device)


def _spans_are_legal(spans: torch.Tensor, q: torch.Tensor, options: Options, device: torch.device) -> bool:
    if type(spans) is not _Tensor or (spans.layout, spans.device, spans.shape) != (_Strided, device, (q.size(0), 2)):
        return False
    return spans.dtype in _INDEX and options.causal is True and options.window is None and options.mask is None


def _selection_is_legal(call: Call, q: torch.Tensor, seqs: int, device: torch.device) -> bool:
    select = call.batch.select
    if type(select) is not Select or type(select.entries) is not _Tensor:
        return False
    entries, rows = select.entries, q.size(0) if select.kind == "positions" else seqs
    if entries.dim() != 3 or (entries.size(0), entries.device, entries.dtype in _INDEX) != (rows, device, True):
        return False
    if entries.size(2) * select.keys_per_entry(call.cache.page_size) >= 2**31:
        return False
    if not (call.new is None and call.options.mask is None and call.batch.shard is None and call.batch.spans is None):
        return False
    return entries.size(1) in (1, call.cache.kv_heads)


def _prefixes_are_legal(prefixes: Prefixes, seqs: int, device: torch.device) -> bool:
    if type(prefixes) is not Prefixes or prefixes.chains.size(0) != seqs:
        return False
    parts = (prefixes.groups, prefixes.members, prefixes.chains)
    return all((type(x), x.dtype, x.device, x.is_contiguous()) == (_Tensor, torch.int32, device, True) for x in parts)


def _new_is_legal(call: Call, device: torch.device) -> bool:
    cache, q, new = call.cache, call.q, call.new
    if type(new) is not tuple or len(new) != 2:
        return False
    if q is None or (call.options.batch_invariant and cache.quantised):
        return False
    return _pair_is_legal(new[0], new[1], cache, (cache.head_dim, cache.v_head_dim), q.size(0), device)


def _pair_is_legal(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, dims: tuple[int, int], tokens: int, device: torch.device
) -> bool:
    return (
        type(k) is _Tensor
        and type(v) is _Tensor
        and k.layout is _Strided
        and v.layout is _Strided
        and not k.is_neg()
        and not v.is_neg()
        and k.shape == (tokens, cache.kv_heads, dims[0])
        and v.shape == (tokens, cache.kv_heads, dims[1])
        and k.dtype in _FLOATS
        and v.dtype is k.dtype
        and k.device == device
        and v.device == device
    )


def _write_is_legal(call: Call, device: torch.device) -> bool:
    cache, k, v = call.cache, call.k, call.v
    if type(k) is not _Tensor or type(v) is not _Tensor or k.dim() != 3:
        return False
    tokens = k.size(0) if call.q is None else call.q.size(0)
    if not _pair_is_legal(k, v, cache, cache.written_dims, tokens, device):
        return False
    slots = call.batch.given_slots if call.slots is None else call.slots
    if slots is not None and not (
        type(slots) is _Tensor
        and slots.dtype in _INDEX
        and slots.layout is _Strided
        and slots.dim() == 1
        and slots.size(0) == tokens
        and slots.device == device
    ):
        return False
    written = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    if not (_are_disjoint(k, *written) and _are_disjoint(v, *written)):
        return False
    if call.rope is None:
        return call.rope_positions is None and call.q_in is None and call.q_out is None
    return _rope_is_legal(call, k, device)


def _rope_is_legal(call: Call, k: torch.Tensor, device: torch.device) -> bool:
    """A rotation of keys, and of queries. The rules decide about a tree mask."""
    rope, positions, dim, first = call.rope, call.rope_positions, call.cache.head_dim, call.cache.v_in_k
    if type(rope) is not Rope or rope.cos.device != device or call.options.mask is not None:
        return False
    if rope.rotary_dim > dim - (first or 0) or (first is not None and rope.q_norm is not None):
        return False
    dim = dim if first is None else first
    for weight in (rope.q_norm, rope.k_norm):
        if weight is not None and (weight.size(0), weight.device) != (dim, device):
            return False
    if positions is None:
        return rope.sections is None and call.positions_known and _turned_queries_are_legal(call, k, device)
    if type(positions) is not _Tensor or (positions.layout, positions.dtype in _INDEX, positions.device) != (
        _Strided,
        True,
        device,
    ):
        return False
    shape = (k.size(0),) if rope.sections is None else (3, k.size(0))
    return positions.shape == shape and _turned_queries_are_legal(call, k, device)


def _turned_queries_are_legal(call: Call, k: torch.Tensor, device: torch.device) -> bool:
    """The queries that a write rotates, into contiguous memory of their own or in place."""
    q, out = call.q_in, call.q_out
    if q is None:
        return out is None
    if type(q) is not _Tensor or (q.layout, q.dim(), q.device, q.dtype) != (_Strided, 3, device, k.dtype):
        return False
    heads = q.size(1)
    shape = (k.size(0), call.cache.head_dim)
    if (q.is_neg(), q.requires_grad, q.size(0), q.size(2), heads > 0) != (False, False, *shape, True):
        return False
    if heads % k.size(1) or out is None:
        return heads % k.size(1) == 0
    if out is q:
        own = (q, k, call.v)
        others = [x for x in _read(call) if not any(x is mine for mine in own)]
        return _are_columns(*own) and _are_disjoint(q, *others)
    if type(out) is not _Tensor or (out.layout, out.shape, out.dtype, out.device) != (_Strided, q.shape, q.dtype, device):
        return False
    return not out.is_neg() and out.is_contiguous() and _are_disjoint(out, q, *_read(call))


def _results_are_legal(call: Call, device: torch.device) -> bool:
    """Buffers for the output and the LSE. Contiguous buffers do not overlap themselves; the rules decide about other strides."""
    q, out, lse = call.q, call.out, call.lse
    if q is None:
        return False
    for tensor in (out, lse):
        if tensor is not None and (type(tensor) is not _Tensor or tensor.layout is not _Strided):
            return False
        if tensor is not None and (tensor.is_neg() or tensor.device != device or not tensor.is_contiguous()):
            return False
    read = _read(call)
    if lse is not None and (lse.dtype is not torch.float32 or lse.shape != q.shape[:2] or not _are_disjoint(lse, out, *read)):
        return False
    if out is None:
        return True
    if out.shape != (q.size(0), q.size(1), call.cache.v_head_dim):
        return False
    if not is_fp8(out.dtype) if call.options.out_scale is not None else out.dtype not in _FLOATS:
        return False
    return _are_disjoint(out, *read)


def _read(call: Call) -> list[torch.Tensor]:
    """Every tensor that an attend or a step reads."""
    options, cache, batch = call.options, call.cache, call.batch
    entries = None if batch.select is None else batch.select.entries
    shared = () if batch.prefixes is None else batch.prefixes.tensors.values()
    indices = (batch.page_table, batch.kv_lens, batch.q_starts, batch.given_slots, batch.spans, call.slots, entries, *shared)
    features = (*(tensor for tensor, _ in options.first_axes), options.causal, options.q_scale, options.out_scale)
    if call.rope is not None:
        rope = call.rope
        features = (*features, rope.cos, rope.sin, rope.q_norm, rope.k_norm, call.rope_positions)
    data = (call.q, call.k, call.v, *(call.new or ()), cache.k, cache.v, cache.k_scale, cache.v_scale)
    return [x for x in (*data, *indices, *features) if isinstance(x, _Tensor)]


def _are_disjoint(mine: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the address range of the first tensor overlaps none of the others. Tensors with overlapping ranges may still use
    different bytes; the rules decide about them."""
    first, end = _extent(mine)
    for other in others:
        if other is not None:
            begin, stop = _extent(other)
            if begin < end and first < stop:
                return False
    return True


def _are_columns(*rows: Any) -> bool:
    """Whether tensors `[tokens, heads, dim]` are in different columns of one matrix, as views of a fused projection are, or in
    memory apart; and no elements of the first overlap."""
    first = rows[0]
    if first.stride(2) != 1 or not first.size(2) <= first.stride(1) <= first.stride(0) // first.size(1):
        return False
    if _are_disjoint(first, *rows[1:]):
        return True
    if any((x.stride(0), x.stride(2), x.dtype) != (first.stride(0), 1, first.dtype) or x.stride(1) < 0 for x in rows):
        return False
    size = first.element_size()
    spans = sorted((x.data_ptr(), x.data_ptr() + ((x.size(1) - 1) * x.stride(1) + x.size(2)) * size) for x in rows)
    disjoint = all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    return disjoint and spans[-1][1] - spans[0][0] <= first.stride(0) * size


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first element to the end of its last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    length = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        length += (size - 1) * stride
    return first, first + max(0, length) * tensor.element_size()
