"""Cache writes: checks the call, applies the page copies of copy-on-write, stores the new tokens and records them in the ledger."""

from __future__ import annotations

from typing import Any, NoReturn, overload

import torch

from quire.attend import is_traced
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.cache.latent import Keys, rows_to_write
from quire.contract.call import Call
from quire.contract.check import Level, enforce, warns_of_quantisation
from quire.dispatch.kernel import KernelLauncher
from quire.errors import ArgumentError, describe
from quire.keywords import refuse_unknown
from quire.launch import launcher_for
from quire.rope import Rope
from quire.slot_batch import slots_batch


@overload
def write(
    k: Keys, v: torch.Tensor | None, cache: KVCache, batch: Batch | None = ..., *, slots: torch.Tensor | None = ...,
    rope: Rope | None = ..., q: None = ..., q_out: None = ..., positions: torch.Tensor | None = ...,
    kernel: str | None = ..., check: Level = ...,
) -> None: ...  # fmt: skip
@overload
def write(
    k: Keys, v: torch.Tensor | None, cache: KVCache, batch: Batch | None = ..., *, slots: torch.Tensor | None = ...,
    rope: Rope, q: torch.Tensor, q_out: torch.Tensor | None = ..., positions: torch.Tensor | None = ...,
    kernel: str | None = ..., check: Level = ...,
) -> torch.Tensor: ...  # fmt: skip
def write(
    k: Keys,
    v: torch.Tensor | None,
    cache: KVCache,
    batch: Batch | None = None,
    *,
    slots: torch.Tensor | None = None,
    rope: Rope | None = None,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    kernel: str | None = None,
    check: Level = "auto",
    **unknown: NoReturn,
) -> torch.Tensor | None:
    """Writes the new keys and values of every sequence to their slots in the cache, after the page copies of the batch
    (copy-on-write). A quantised cache quantises them, saturating: `quire.checked(quantisation=True)` warns of what is lost.

    Args:
        k, v: New keys and values `[tokens, kv_heads, dim]` of fp32, fp16 or bf16. Any strides are allowed. If V is a part of K,
            v is None, and k may be a pair of its parts: the first `cache.v_in_k` elements and the others. One launch stores both.
        cache, batch: The cache of the layer, and the sequences. Rows of k and v from `batch.q_starts[-1]` on are padding.
        slots: int32 or int64 `[tokens]`, the slot of each token, -1 to skip it. Default: those of the batch, or computed from its
            page table and lengths. Without a batch they are required; a ledger then records the positions as unknown.
        rope: How keys are normalised and rotated before they are stored; k itself is not changed. Default: not at all.
        q, q_out: With rope: queries `[tokens, q_heads, head_dim]` of the type of k to rotate, too, and where they go: q itself or a
            buffer, whose padding rows are not written. Default: no queries; a new tensor with zeros in padding rows.
        positions: With rope: int32 or int64 `[tokens]`, `[3, tokens]` if rope has sections. Default: those of the batch.
        kernel, check: As in `quire.attend`.

    Returns:
        The rotated queries; None without q.

    Raises:
        ContractError, KernelError: The call violates the contract, or no kernel (or not the one requested) can run it.
        ArgumentError, StaleBatch: An argument has the wrong class, or the pool has changed since the batch was made.

    Example:
        >>> import torch, quire
        >>> pool = quire.PagePool(pages=8, page_size=4)
        >>> cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32)
        >>> k = v = torch.ones(3, 1, 8)
        >>> quire.write(k, v, cache, pool.step({pool.sequence(): 3}))
        >>> cache.k[0, :, 0, 0].tolist()
        [1.0, 1.0, 1.0, 0.0]
    """
    if unknown:
        refuse_unknown(write, unknown)
    (keys, values), known, rotation = rows_to_write(k, v, cache, rope), batch is not None, (rope, q, q_out, positions)
    rotates = any(given is not None for given in rotation)
    batch = _without_batch(keys, slots) if batch is None else batch
    if is_traced(keys):
        from quire import ops

        return ops.write(keys, values, cache, batch, slots, rotation if rotates else None, kernel, check)
    call = Call(cache, batch, k=keys, v=values, slots=slots, positions_known=known)
    if rotates:
        return _rotate(call, rotation, kernel, check)
    store(launcher_for("write", call, kernel, check, checked=False), call)
    return None


def _without_batch(k: torch.Tensor, slots: torch.Tensor | None) -> Batch:
    if not isinstance(slots, torch.Tensor) or not isinstance(k, torch.Tensor) or not k.dim():
        raise ArgumentError("slots", describe(slots), "a tensor [tokens] of int32 or int64, or pass a batch")
    return slots_batch(k.shape[0], slots)


def _rotate(call: Call, rotation: tuple[Any, ...], kernel: str | None, check: Level) -> torch.Tensor | None:
    """A write that rotates keys, and the queries if there are any."""
    call.rope, call.q_in, call.q_out, call.rope_positions = rotation
    enforce("write", call, check)
    if call.q_in is not None and call.q_out is None:
        call.q_out, call.zero_padding = torch.empty(call.q_in.shape, dtype=call.q_in.dtype, device=call.q_in.device), True
    store(launcher_for("write", call, kernel), call)
    return call.q_out


def store(launcher: KernelLauncher, call: Call) -> None:
    """Applies page copies, stores the new tokens, and records them in the ledger."""
    cache, batch = call.cache, call.batch
    if batch.copies:
        cache.copy_pages(batch.copies)
    if warns_of_quantisation():
        # Imported only if requested.
        from quire.contract.quantisation import warn_of_losses

        warn_of_losses(call)
    launcher(call)
    if cache.ledger is not None:
        _record(call)


def _record(call: Call) -> None:
    """Records in the ledger which position of which sequence each slot holds."""
    cache, batch = call.cache, call.batch
    assert call.k is not None
    if not batch.seqs:
        return
    slots = batch.slots_of_tokens(call.k.shape[0], cache.page_size, call.slots)
    if not call.positions_known:
        cache.record(slots)
        return
    seq = batch.sequences_of_tokens(slots.shape[0])
    live = seq < batch.seqs
    seq = seq.clamp(max=batch.seqs - 1)
    at = torch.arange(slots.shape[0], device=slots.device) - batch.q_starts.long()[seq + 1] + batch.kv_lens.long()[seq]
    writers = None
    if batch.sequences is not None:
        writers = torch.tensor([sequence.id for sequence in batch.sequences], device=slots.device)[seq]
    cache.record(torch.where(live, slots, -1), at, writers)
