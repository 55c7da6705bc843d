"""Flash attention as torch calls it, computed by `quire.attend`: keys in pages, ragged keys, and dense batches."""

from __future__ import annotations

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.format import format_of
from quire.cache.kv_cache import KVCache
from quire.cache.layout import LAYOUTS
from quire.cache.memory import overlaps_itself
from quire.integrations.pytorch.flash_call import FlashCall
from quire.options import Options

PAGE_SIZE = 16
"""Of the cache without content that a call in context form has."""
LARGEST_PAGE = 64
"""Of a dense batch. Kernels are compiled for a page size, so there are only powers of two."""

New = tuple[torch.Tensor, torch.Tensor] | None


def flash_attention(call: FlashCall, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[..., q_heads, head_dim]` and LSE, `[q_heads, tokens]` or `[seqs, q_heads, q_len]`, as torch's own kernel has them.
    A query that sees no key gives zeros and an LSE of -inf."""
    query = call.query
    dense = call.cum_seq_q is None
    cache, batch, new = _dense(call) if dense else _ragged(call)
    options = _options(call)
    if not dense:
        made, lse = attend(query, cache, batch, options, new=new, out=out, lse=True)
        return made, lse.transpose(0, 1).contiguous()
    made, lse = attend(query.flatten(0, 1), cache, batch, options, new=new, lse=True)
    made = made.view(query.shape)
    # Sequence and token of `out` may not merge into one axis.
    return made if out is None else out.copy_(made), lse.unflatten(0, query.shape[:2]).transpose(1, 2).contiguous()


def _options(call: FlashCall) -> Options:
    """torch's window has -1 or None for an unbounded side. Causality is a window without keys to the right: unlike `causal`, it is
    defined for sequences with more queries than keys, whose first queries see nothing. Kernels are the same for both."""
    left, right = (None if side is None or side < 0 else side for side in (call.window_size_left, call.window_size_right))
    right = 0 if call.is_causal else right
    return Options(
        window=None if left is right is None else (left, right),
        causal=False,
        scale=call.scale,
        alibi=call.alibi_slopes,
        batch_invariant=call.num_splits == 1,
    )


def _ragged(call: FlashCall) -> tuple[KVCache, Batch, New]:
    """Keys in pages, or ragged keys: each key is then a page of its own, unless the keys are those of the queries' own tokens."""
    q_starts, k_starts = call.cum_seq_q, call.cum_seq_k
    assert q_starts is not None
    if call.block_table is not None:
        cache = _read_only(call.key, call.value)
        return cache, Batch(call.block_table, _lengths(call), q_starts, max_q_len=call.max_q, max_kv_len=call.max_k), None
    assert k_starts is not None
    if call.seqused_k is None and _is_same(q_starts, k_starts) and call.key.shape[0] == call.query.shape[0]:
        return _without_context(call, q_starts, call.key, call.value)
    cache = _read_only(call.key.unsqueeze(1), call.value.unsqueeze(1))
    table = k_starts[:-1, None] + torch.arange(max(call.max_k, 1), dtype=k_starts.dtype, device=k_starts.device)
    return cache, Batch(table, _lengths(call), q_starts, max_q_len=call.max_q, max_kv_len=call.max_k), None


def _dense(call: FlashCall) -> tuple[KVCache, Batch, New]:
    """Sequences of equal lengths. Keys are copied if sequence and token do not merge into one axis."""
    seqs, q_len = call.query.shape[:2]
    kv_len, device = call.key.shape[1], call.query.device
    q_starts = torch.arange(seqs + 1, dtype=torch.int32, device=device) * q_len
    key, value = call.key.reshape(seqs * kv_len, *call.key.shape[2:]), call.value.reshape(seqs * kv_len, *call.value.shape[2:])
    if q_len == kv_len:
        return _without_context(call, q_starts, key, value)
    size = min(kv_len & -kv_len, LARGEST_PAGE) or 1
    table = torch.arange(seqs * kv_len // size, dtype=torch.int32, device=device).view(seqs, -1)
    cache = _read_only(key.unflatten(0, (-1, size)), value.unflatten(0, (-1, size)))
    lengths = torch.full((seqs,), kv_len, dtype=torch.int32, device=device)
    return cache, Batch(table, lengths, q_starts, max_q_len=q_len, max_kv_len=kv_len), None


def _without_context(call: FlashCall, q_starts: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[KVCache, Batch, New]:
    """Context form without a context: the keys are those of the queries' own tokens, and no page is read."""
    pages = (key.new_empty(1, PAGE_SIZE, *key.shape[1:]) for _ in range(2))
    table = q_starts.new_zeros(q_starts.shape[0] - 1, 1)
    batch = Batch(table, q_starts.diff(), q_starts, max_q_len=call.max_q, max_kv_len=call.max_k)
    return KVCache.wrap(*pages, layout="nhd"), batch, (key, value)


def _read_only(key: torch.Tensor, value: torch.Tensor) -> KVCache:
    """A cache over `[pages, page_size, kv_heads, head_dim]` that nothing writes, so that K and V may be the same memory:
    `KVCache.wrap` rejects that. Keys that are expanded over an axis are copied: not every kernel reads an axis with stride 0."""
    key, value = (t.contiguous() if overlaps_itself(t) else t for t in (key, value))
    return KVCache(key, value, LAYOUTS["nhd"], format_of(key.dtype, None), None, None, None, False)


def _lengths(call: FlashCall) -> torch.Tensor:
    lengths = call.k_lengths
    assert lengths is not None
    return lengths


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two index tensors are certainly equal. Nothing is read from a GPU: there they are equal if they are one memory."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return a.device.type == "cpu" and torch.equal(a, b)
