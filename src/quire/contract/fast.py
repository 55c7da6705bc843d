"""A fast static check: it accepts a usual legal call in a few microseconds. False means that it is not sure: the rules then
decide.

The rules collect every argument by name for their messages, which takes tens of microseconds, longer than a short decode."""

from __future__ import annotations

import torch

from quire.cache.kv_cache import KVCache
from quire.contract import static
from quire.contract.call import Call
from quire.options import Options
from quire.problem import is_fp8

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
    )
)
"""The static checks that this module covers. All others run in every call."""

_INDEX = frozenset((torch.int32, torch.int64))
_FLOATS = frozenset(static.FLOATS)
_QUERIES = _FLOATS | {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2}
_Tensor, _Strided = torch.Tensor, torch.strided


def is_certainly_legal(call: Call) -> bool:
    """Whether shapes, types, devices, strides and options break none of the rules that it covers. False: run the rules."""
    cache, batch, q, k, options = call.cache, call.batch, call.q, call.k, call.options
    table, lens, starts = batch.page_table, batch.kv_lens, batch.q_starts
    device = cache.k_view.device
    if (
        batch.copies
        or not (type(table) is _Tensor and type(lens) is _Tensor and type(starts) is _Tensor)
        or not (table.dtype in _INDEX and lens.dtype in _INDEX and starts.dtype in _INDEX)
        or not (table.layout is _Strided and lens.layout is _Strided and starts.layout is _Strided)
        or not (table.device == device and lens.device == device and starts.device == device)
        or not (table.dim() == 2 and lens.dim() == 1 and starts.dim() == 1)
    ):
        return False
    seqs = lens.size(0)
    if table.size(0) != seqs or starts.size(0) != seqs + 1:
        return False
    if q is not None and not _query_is_legal(q, cache, options, seqs, device):
        return False
    if call.new is not None and not _new_is_legal(call, device):
        return False
    if k is not None and not _write_is_legal(call, device):
        return False
    if call.lse is not None and (q is None or not _lse_is_legal(call, q, call.lse, device)):
        return False
    return call.out is None or (q is not None and _output_is_legal(call, q, call.out, device))


def _query_is_legal(q: torch.Tensor, cache: KVCache, options: Options, seqs: int, device: torch.device) -> bool:
    dtype = q.dtype
    if type(q) is not _Tensor or q.dim() != 3 or dtype not in _QUERIES or q.device != device or q.requires_grad:
        return False
    tokens, heads, dim = q.shape
    if dim != cache.head_dim or heads == 0 or heads % cache.kv_heads:
        return False
    if (options.q_scale is None) is not (dtype in _FLOATS):
        return False
    alibi, sinks, causal, mask, positions = options.alibi, options.sinks, options.causal, options.mask, options.positions
    if alibi is not None and (alibi.size(0) != heads or alibi.device != device):
        return False
    if sinks is not None and (sinks.size(0) != heads or sinks.device != device):
        return False
    if causal is not True and causal is not False and (causal.size(0) != seqs or causal.device != device):
        return False
    if mask is None:
        return True
    if mask.size(0) != tokens or mask.device != device:
        return False
    return positions is None or (positions.size(0) == tokens and positions.device == device)


def _new_is_legal(call: Call, device: torch.device) -> bool:
    cache, q, new = call.cache, call.q, call.new
    if q is None or new is None or (call.options.batch_invariant and cache.format.quantised):
        return False
    return _pair_is_legal(new[0], new[1], cache, q.size(0), device)


def _pair_is_legal(k: torch.Tensor, v: torch.Tensor, cache: KVCache, tokens: int, device: torch.device) -> bool:
    return (
        type(k) is _Tensor
        and type(v) is _Tensor
        and k.shape == (tokens, cache.kv_heads, cache.head_dim)
        and v.shape == (tokens, cache.kv_heads, cache.v_head_dim)
        and k.dtype in _FLOATS
        and v.dtype is k.dtype
        and k.device == device
        and v.device == device
    )


def _write_is_legal(call: Call, device: torch.device) -> bool:
    cache, k, v = call.cache, call.k, call.v
    if k is None or v is None or k.dim() != 3:
        return False
    tokens = k.size(0) if call.q is None else call.q.size(0)
    if not _pair_is_legal(k, v, cache, tokens, device):
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
    written = (cache.k, cache.v) if cache.k_scale is None else (cache.k, cache.v, cache.k_scale, cache.v_scale)
    return _are_apart(k, *written) and _are_apart(v, *written)


def _lse_is_legal(call: Call, q: torch.Tensor, lse: torch.Tensor, device: torch.device) -> bool:
    if lse.dtype is not torch.float32 or lse.shape != q.shape[:2] or lse.device != device or not lse.is_contiguous():
        return False
    return _are_apart(lse, call.out, *_read(call))


def _output_is_legal(call: Call, q: torch.Tensor, out: torch.Tensor, device: torch.device) -> bool:
    dtype = out.dtype
    if type(out) is not _Tensor or out.shape != (q.size(0), q.size(1), call.cache.v_head_dim) or out.device != device:
        return False
    # Elements side by side do not overlap; other strides are the rule's.
    if not out.is_contiguous():
        return False
    if not is_fp8(dtype) if call.options.out_scale is not None else dtype not in _FLOATS:
        return False
    return _are_apart(out, call.lse, *_read(call))


def _read(call: Call) -> list[torch.Tensor]:
    """Every tensor that an attend or a step reads."""
    options, cache, batch = call.options, call.cache, call.batch
    indices = (batch.page_table, batch.kv_lens, batch.q_starts, batch.given_slots, call.slots)
    features = (options.alibi, options.sinks, options.causal, options.mask, options.positions, options.q_scale, options.out_scale)
    data = (call.q, call.k, call.v, *(call.new or ()), cache.k, cache.v, cache.k_scale, cache.v_scale)
    return [x for x in (*data, *indices, *features) if isinstance(x, _Tensor)]


def _are_apart(mine: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the address range of the first tensor overlaps none of the others. Tensors with overlapping ranges may still use
    different bytes: the rules decide."""
    first, end = _extent(mine)
    for other in others:
        if other is not None:
            begin, stop = _extent(other)
            if begin < end and first < stop:
                return False
    return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first element to the end of its last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    length = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        length += (size - 1) * stride
    return first, first + max(0, length) * tensor.element_size()
