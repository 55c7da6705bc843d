"""Validation of the values of a call in host memory: native code in one pass, or the rules if the library is not built.

A batch remembers for which calls it was found legal, so that the layers of a model validate it once. The result is valid while the
batch has the same tensors with the same `_version`. Inference tensors have no version and are validated in every call. A write
that does not change the version (through a numpy alias) is not seen here: kernels check every index before they use it, and
the output of that sequence is NaN."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.contract import values
from quire.contract.call import Call
from quire.errors import KernelError
from quire.kernels.native.call import ABSENT, CHECK, UNBOUNDED, batch_of, index, select_of
from quire.kernels.native.library import FILE, Library, library

COVERED = frozenset(
    (
        values.starts,
        values.lengths,
        values.spans,
        values.hints,
        values.table,
        values.slots,
        values.scales,
        values.written_once,
        values.selection,
        values.prefixes,
        values.residency,
        values.rope_positions,
    )
)
"""The value checks that this module covers. All others run in every call."""

_MOST = 16
"""The number of different calls that a batch remembers, for example of layers with and without a window."""
_NO_SCALES = (0,) * 6


class ValidationMemo(NamedTuple):
    """The calls for which a batch was found legal. Valid while `stamp` is unchanged."""

    stamp: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    """References, so that the ids in the stamp are not reused."""
    calls: dict[Any, tuple[torch.Tensor, ...]]
    """Keys of the calls, each with the tensors of its options."""


def are_certainly_legal(call: Call, trust: bool) -> bool:
    """Whether the values of a call in host memory break no rule. False: run the rules. Without `trust` the memo is not used."""
    batch = call.batch
    if call.cache.ledger is not None:
        return False
    stamp = _stamp(batch) if trust else None
    key = None if stamp is None else _key(call)
    memo = batch.validated
    if key is not None and memo is not None and memo.stamp == stamp and key in memo.calls:
        return not _depends_on_other_values(call) or _is_legal(call, False)
    if not _is_legal(call, True):
        return False
    if stamp is not None and key is not None:
        _remember(batch, stamp, key, call)
    return True


def _stamp(batch: Batch) -> tuple[int, ...] | None:
    """Identity, version and address of the tensors of a batch; None if one of them has no version."""
    table, lens, starts = batch.page_table, batch.kv_lens, batch.q_starts
    if table.is_inference() or lens.is_inference() or starts.is_inference():
        return None
    return (
        id(table), table._version, table.data_ptr(),
        id(lens), lens._version, lens.data_ptr(),
        id(starts), starts._version, starts.data_ptr(),
    )  # fmt: skip


def _key(call: Call) -> Any:
    """Everything else that the validation of a batch depends on; None if a tensor of the options has no version."""
    cache, q, options = call.cache, call.q, call.options
    own_slots = call.k is not None and call.slots is None and call.batch.given_slots is None
    rows = call.k if q is None else q
    assert rows is not None
    facts: tuple[Any, ...] = (cache.pages, cache.page_size, rows.size(0), call.k is None, own_slots, call.batch.shard)
    if call.rope is not None:
        facts = (*facts, call.rope.max_positions if call.rope_positions is None else None)
    if q is None:
        return facts
    facts = (*facts, call.new is None, call.context_from, call.only)
    select = call.batch.select
    if select is not None:
        entries = select.entries
        if entries.is_inference():
            return None
        facts = (*facts, select.kind, id(entries), entries._version, entries.data_ptr())
    for tensor in () if call.batch.prefixes is None else call.batch.prefixes.tensors.values():
        if tensor.is_inference():
            return None
        facts = (*facts, id(tensor), tensor._version, tensor.data_ptr())
    causal, mask, positions, spans = options.causal, options.mask, options.positions, call.batch.spans
    if spans is mask is None and (causal is True or causal is False):
        return (*facts, options.window, causal)
    state: list[Any] = [*facts, options.window]
    for value in (causal, mask, positions, spans):
        if isinstance(value, torch.Tensor):
            if value.is_inference():
                return None
            state += (id(value), value._version, value.data_ptr())
        else:
            state.append(value)
    return tuple(state)


def _remember(batch: Batch, stamp: tuple[int, ...], key: Any, call: Call) -> None:
    """The stamp was taken before the values were read, so a concurrent change makes it outdated."""
    options = call.options
    entries = None if batch.select is None else batch.select.entries
    shared = () if batch.prefixes is None else batch.prefixes.tensors.values()
    read = (options.causal, options.mask, options.positions, batch.spans, entries, *shared)
    held = tuple(x for x in read if isinstance(x, torch.Tensor))
    memo = batch.validated
    calls = {} if memo is None or memo.stamp != stamp else memo.calls
    # One assignment of an object that is never modified: threads may share a batch.
    calls = {key: held} if len(calls) >= _MOST else {**calls, key: held}
    batch.validated = ValidationMemo(stamp, (batch.page_table, batch.kv_lens, batch.q_starts), calls)


def _depends_on_other_values(call: Call) -> bool:
    """Whether the call also depends on values outside of the batch: scales, given slots, holders of pages."""
    cache, options = call.cache, call.options
    scaled = cache.k_scale is not None or cache.v_scale is not None
    if scaled or isinstance(options.q_scale, torch.Tensor) or isinstance(options.out_scale, torch.Tensor):
        return True
    if call.rope_positions is not None:
        return True
    return call.k is not None and (cache.pool is not None or call.slots is not None or call.batch.given_slots is not None)


def _is_legal(call: Call, whole: bool) -> bool:
    # Positions of the batch are validated with it; others are values outside of it.
    if call.rope is not None and (whole or call.rope_positions is not None) and any(values.rope_positions(call)):
        return False
    if whole and call.may_share and any(values.prefixes(call)):
        return False
    native = _native()
    if native is None:
        return _rules_hold(call, whole)
    packed = _packed(call, whole)
    return packed is not None and native.is_legal(packed)


_loaded: list[Library | None] = []


def _native() -> Library | None:
    """The library; None if it is not built or does not load. The rules then validate."""
    if not _loaded:
        try:
            _loaded.append(library() if FILE.exists() else None)
        except KernelError:
            _loaded.append(None)
    return _loaded[0]


def _rules_hold(call: Call, whole: bool) -> bool:
    """The Python version of the native validation."""
    if whole:
        checks = [values.starts, values.lengths, values.spans, values.selection, values.table, values.slots, values.scales]
    else:
        checks = [values.scales] if call.k is None else [values.slots, values.scales]
    return not any(not violation.harmless for check in checks for violation in check(call))


def _packed(call: Call, whole: bool) -> bytes | None:
    """The call as `Check` of `call.h`; None if it cannot be expressed: the rules then decide."""
    cache, batch, q, options = call.cache, call.batch, call.q, call.options
    causal, mask, positions, spans = options.causal, options.mask, options.positions, batch.spans
    left, right = options.sides
    holders: torch.Tensor | None = None
    slots = None
    if call.k is not None:
        slots = call.given_slots
        if cache.pool is not None:
            holders = cache.pool.holders
            if holders.dtype is not torch.int32 or not holders.is_cpu or holders.shape != (cache.pages,):
                return None
            holders = holders.contiguous()
    scales = []
    for scale in (options.q_scale, options.out_scale):
        is_tensor = q is not None and isinstance(scale, torch.Tensor)
        if is_tensor and not scale.is_cpu:  # type: ignore[union-attr]
            return None
        scales.append(scale.data_ptr() if is_tensor else 0)  # type: ignore[union-attr]
    return CHECK.pack(
        *batch_of(batch),
        cache.pages,
        cache.page_size,
        cache.kv_heads,
        call.tokens,
        whole,
        q is not None,
        call.new is not None,
        call.context_from,
        *call.only,
        UNBOUNDED if left is None else left,
        UNBOUNDED if right is None else right,
        *((0, 0, causal) if isinstance(causal, bool) else (causal.data_ptr(), causal.stride(0), 0)),
        *(ABSENT if mask is None else (mask.data_ptr(), *mask.stride(), mask.shape[1])),
        *(ABSENT if positions is None else index(positions)),
        *(ABSENT if spans is None or q is None else index(spans)),
        *select_of(batch, q),
        call.k is not None,
        *(ABSENT if slots is None else index(slots)),
        0 if holders is None else holders.data_ptr(),
        *_scales(cache.k_scale),
        *_scales(cache.v_scale),
        *scales,
    )


def _scales(scale: torch.Tensor | None) -> tuple[int, ...]:
    if scale is None:
        return _NO_SCALES
    if scale.dim() == 3:
        return scale.data_ptr(), 0, scale.shape[2], *scale.stride()
    return scale.data_ptr(), scale.numel(), 0, 0, 0, scale.stride(0) if scale.dim() else 0
