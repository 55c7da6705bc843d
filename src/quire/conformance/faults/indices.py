"""Faults of index tensors: their dtype, the meaning of lengths, and the host maxima max_q_len and max_kv_len."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Work


def _reinterpreted(tensor: torch.Tensor) -> torch.Tensor:
    """int64 memory read as int32: each number becomes two, its low and its high half, and only the first half of them is read."""
    flat = tensor.contiguous().cpu().view(torch.int32).reshape(-1)[: tensor.numel()]
    return flat.reshape(tensor.shape).long()


def _read(name: str) -> Stages:
    def read(w: Work) -> Indices:
        indices = oracle.read(w)
        source = {"starts": w.call.q_starts, "lens": w.call.kv_lens, "table": w.call.page_table}[name]
        return indices._replace(**{name: _reinterpreted(source)})

    return PLAIN.replace(read=read)


def _starts(kernel: str = "both") -> Stages:
    """q_starts is reinterpreted for all sequences, or by one of two kernels that share the batch: the kernel for sequences of one
    new token ('decode') or the kernel for longer ones ('prefill'), which then selects its sequences by the wrong lengths."""
    if kernel == "both":
        return _read("starts")

    def shared(w: Work, indices: Indices) -> list[BatchSequence]:
        theirs = oracle.sequences(w, indices._replace(starts=_reinterpreted(w.call.q_starts)))
        return [
            *(sequence for sequence in oracle.sequences(w, indices) if (sequence.q_len == 1) != (kernel == "decode")),
            *(sequence for sequence in theirs if (sequence.q_len == 1) == (kernel == "decode")),
        ]

    return PLAIN.replace(sequences=shared)


def _is_long(name: str) -> Any:
    return lambda call: getattr(call, name).dtype is torch.int64 and call.seqs > 1


def _sequences(change: Any) -> Stages:
    """Replaces each sequence by `change(w, sequence)`."""
    return PLAIN.replace(sequences=lambda w, indices: [change(w, sequence) for sequence in oracle.sequences(w, indices)])


def _kv_cut(call: KernelCall) -> bool:
    return call.max_kv_len is not None and call.kv_lens.numel() > 0 and call.max_kv_len < int(call.kv_lens.max())


def _q_cut(call: KernelCall) -> bool:
    return call.max_q_len is not None and call.seqs > 0 and call.max_q_len < int(call.q_starts.diff().max())


def _visible_until(end: Any) -> Stages:
    """Keys from `end(w, sequence)` on are not visible."""

    def visibility(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = oracle.visibility(w, sequence, keys)
        visible[:, max(end(w, sequence), 0) :] = False
        return visible

    return PLAIN.replace(visibility=visibility)


def _shifted_lengths(change: Any) -> Stages:
    """Another kv_len: query positions change, and more or fewer keys are read."""
    return _sequences(lambda w, sequence: sequence._replace(kv_len=max(change(sequence), 0)))


def _full(call: KernelCall) -> bool:
    return call.new is None and call.positions is None and call.mask is None


ISSUE_INT64 = ("vLLM #28905", "FlashInfer #1654", "FlashInfer #725")


def _store_until_hint(w: Work, sequence: BatchSequence, part: oracle.SequenceResult, into: oracle.Outcome) -> None:
    n = min(sequence.q_len, w.call.max_q_len or sequence.q_len)
    oracle.store(w, sequence._replace(q_len=n), oracle.SequenceResult(*(t[:n] for t in part)), into)


INDICES = (
    Fault(
        "q-starts-int64-as-int32",
        "indices",
        "every other sequence appears empty or has a negative length, and its rows are never written",
        "torch.cumsum of an int32 tensor returns int64, and the kernel casts the pointer without checking the dtype",
        _starts,
        _is_long("q_starts"),
        tries=({}, {"kernel": "decode"}, {"kernel": "prefill"}),
        issues=ISSUE_INT64,
    ),
    Fault(
        "kv-lens-int64-as-int32",
        "indices",
        "every other sequence has length 0; the others have the length of another sequence",
        "an unchecked pointer cast of an int64 tensor",
        lambda: _read("lens"),
        _is_long("kv_lens"),
        issues=ISSUE_INT64,
    ),
    Fault(
        "table-int64-as-int32",
        "indices",
        "every other page id is read as 0, and ids are taken from other rows of the table",
        "an unchecked pointer cast of an int64 tensor",
        lambda: _read("table"),
        _is_long("page_table"),
        issues=("FlashInfer #1654", "vLLM #50427"),
    ),
    Fault(
        "kv-lens-taken-as-context",
        "indices",
        "query positions are q_len too large, and q_len slots after the end are visible",
        "some APIs count all tokens, others only those before the call; the kernel adds the new tokens again",
        lambda: _shifted_lengths(lambda sequence: sequence.kv_len + sequence.q_len),
        _full,
        issues=("FlashAttention: cache_seqlens with and without k, v",),
    ),
    Fault(
        "context-taken-as-kv-lens",
        "indices",
        "query positions are q_len too small; decode queries do not see their own token",
        "the kernel subtracts the new tokens from kv_len and uses the result as the total length",
        lambda: _shifted_lengths(lambda sequence: sequence.kv_len - sequence.q_len),
        _full,
        issues=("transformers: varlen and decode paths count differently",),
    ),
    Fault(
        "max-kv-len-truncates",
        "indices",
        "keys beyond max_kv_len are missing in longer sequences",
        "the number of tiles or splits is derived from max_kv_len, and the caller's hint is too low",
        lambda: _visible_until(lambda w, sequence: w.call.max_kv_len),
        _kv_cut,
        issues=("vLLM test_prefix_prefill passes max_seq_len 1024 for lengths up to 1792",),
    ),
    Fault(
        "max-q-len-truncates",
        "indices",
        "rows of a prefill beyond max_q_len are never written",
        "the grid is sized by max_q_len",
        lambda: PLAIN.replace(store=_store_until_hint),
        _q_cut,
    ),
)
