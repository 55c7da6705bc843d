"""Faults of indices: index types, lengths that mean something else, host maxima."""

from __future__ import annotations

from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Work


def _reinterpreted(tensor: torch.Tensor) -> torch.Tensor:
    """int64 memory read as int32: each number becomes its low half and its high half, and half of them are never reached."""
    flat = tensor.contiguous().cpu().view(torch.int32).reshape(-1)[: tensor.numel()]
    return flat.reshape(tensor.shape).long()


def _read(name: str) -> Stages:
    def read(w: Work) -> Indices:
        at = x.read(w)
        source = {"starts": w.call.q_starts, "lens": w.call.kv_lens, "table": w.call.page_table}[name]
        return at._replace(**{name: _reinterpreted(source)})

    return PLAIN.replace(read=read)


def _starts(kernel: str = "both") -> Stages:
    """q_starts reinterpreted in all sequences, or by one of two kernels that share the batch: the one for sequences of one new
    token ('decode'), or the one for longer ones ('prefill'). That one takes the sequences that look like its own."""
    if kernel == "both":
        return _read("starts")

    def shared(w: Work, at: Indices) -> list[BatchSequence]:
        theirs = x.sequences(w, at._replace(starts=_reinterpreted(w.call.q_starts)))
        return [
            *(sequence for sequence in x.sequences(w, at) if (sequence.q_len == 1) != (kernel == "decode")),
            *(sequence for sequence in theirs if (sequence.q_len == 1) == (kernel == "decode")),
        ]

    return PLAIN.replace(sequences=shared)


def _is_long(name: str) -> Any:
    return lambda call: getattr(call, name).dtype is torch.int64 and call.seqs > 1


def _sequences(change: Any) -> Stages:
    """Every sequence, changed."""
    return PLAIN.replace(sequences=lambda w, at: [change(w, sequence) for sequence in x.sequences(w, at)])


def _kv_cut(call: KernelCall) -> bool:
    return call.max_kv_len is not None and call.kv_lens.numel() > 0 and call.max_kv_len < int(call.kv_lens.max())


def _q_cut(call: KernelCall) -> bool:
    return call.max_q_len is not None and call.seqs > 0 and call.max_q_len < int(call.q_starts.diff().max())


def _see_until(end: Any) -> Stages:
    """Keys from `end(w, sequence)` on are not seen."""

    def see(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = x.see(w, sequence, keys)
        visible[:, max(end(w, sequence), 0) :] = False
        return visible

    return PLAIN.replace(see=see)


def _shifted_lengths(change: Any) -> Stages:
    """Positions follow from another length: the queries sit elsewhere, and more keys or fewer are read."""
    return _sequences(lambda w, sequence: sequence._replace(kv_len=max(change(sequence), 0)))


def _full(call: KernelCall) -> bool:
    return call.new is None and call.positions is None and call.mask is None


ISSUE_INT64 = ("vLLM #28905", "FlashInfer #1654", "FlashInfer #725")


def _store_until_hint(w: Work, sequence: BatchSequence, part: x.SequenceResult, into: x.Outcome) -> None:
    n = min(sequence.q_len, w.call.max_q_len or sequence.q_len)
    x.store(w, sequence._replace(q_len=n), x.SequenceResult(*(t[:n] for t in part)), into)


INDICES = (
    Fault(
        "q-starts-int64-as-int32",
        "indices",
        "every other sequence looks empty or negatively long, and its rows are never written",
        "torch.cumsum of int32 gives int64; a kernel casts the pointer without looking at the type",
        _starts,
        _is_long("q_starts"),
        tries=({}, {"kernel": "decode"}, {"kernel": "prefill"}),
        issues=ISSUE_INT64,
    ),
    Fault(
        "kv-lens-int64-as-int32",
        "indices",
        "every other sequence has length 0, the rest have a neighbour's",
        "an unchecked pointer cast of an int64 tensor",
        lambda: _read("lens"),
        _is_long("kv_lens"),
        issues=ISSUE_INT64,
    ),
    Fault(
        "table-int64-as-int32",
        "indices",
        "every other page is page 0, and rows of the table run into each other",
        "an unchecked pointer cast of an int64 tensor",
        lambda: _read("table"),
        _is_long("page_table"),
        issues=("FlashInfer #1654", "vLLM #50427"),
    ),
    Fault(
        "kv-lens-taken-as-context",
        "indices",
        "queries sit q_len too far right and see as many slots too many",
        "one API counts all tokens, the next only those before the call; the kernel adds the new ones again",
        lambda: _shifted_lengths(lambda sequence: sequence.kv_len + sequence.q_len),
        _full,
        issues=("FlashAttention: cache_seqlens with and without k, v",),
    ),
    Fault(
        "context-taken-as-kv-lens",
        "indices",
        "queries sit q_len too far left; decode queries miss their own token",
        "a caller's total length is treated as one that still counts the new tokens separately",
        lambda: _shifted_lengths(lambda sequence: sequence.kv_len - sequence.q_len),
        _full,
        issues=("transformers: varlen and decode paths count differently",),
    ),
    Fault(
        "max-kv-len-truncates",
        "indices",
        "keys beyond a host maximum are missing from long sequences",
        "the number of tiles or splits comes from max_seq_len, and the caller's hint was too low",
        lambda: _see_until(lambda w, sequence: w.call.max_kv_len),
        _kv_cut,
        issues=("vLLM test_prefix_prefill passes max_seq_len 1024 for lengths up to 1792",),
    ),
    Fault(
        "max-q-len-truncates",
        "indices",
        "rows of a long prefill beyond a host maximum are never written",
        "the grid is sized by max_query_len",
        lambda: PLAIN.replace(store=_store_until_hint),
        _q_cut,
    ),
)
