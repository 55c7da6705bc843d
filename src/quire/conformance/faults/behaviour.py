"""Behavioural faults: they are detected by how a kernel behaves, not by comparing one output."""

from __future__ import annotations

import torch

from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Values, Work


def nan_leak() -> Stages:
    """Unused slots of the last page get weight 0, but 0 times NaN is NaN."""

    def gather(w: Work, s: Stages, indices: Indices, sequence: BatchSequence) -> Values:
        if w.call.new is not None:
            return oracle.gather(w, s, indices, sequence)
        whole = -(-sequence.kv_len // w.call.page_size) * w.call.page_size
        return oracle.gather(w, s, indices, sequence._replace(kv_len=whole))

    def visibility(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = oracle.visibility(w, sequence, min(keys, sequence.kv_len))
        return torch.cat((visible, torch.zeros(sequence.q_len, max(keys - sequence.kv_len, 0), dtype=torch.bool)), 1)

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        if w.call.alibi is None:
            return 0.0
        q_pos = torch.arange(sequence.context, sequence.kv_len)
        return -oracle.slopes(w) * (q_pos[:, None] - torch.arange(keys)[None, :]).abs()

    return PLAIN.replace(gather=gather, visibility=visibility, bias=bias, keep_unseen=True)


BEHAVIOUR = (
    Fault(
        "nan-leak",
        "behaviour",
        "NaN where a slot that must not be read holds NaN; correct where it holds a number",
        "scores of unused slots are masked but their values are not: weight 0 times NaN is NaN",
        None,
        issues=(
            "FlashAttention #1745",
            "FlashAttention #2374",
            "FlashInfer #941",
            "AITER #5401",
            "vLLM 0.24.0 kernel_paged_attention_2d loads values unmasked",
        ),
    ),
    Fault(
        "two-runs-differ",
        "behaviour",
        "two identical calls give different bits",
        "a race, an atomic sum, or uninitialised memory",
        None,
        issues=("vLLM #39146", "vLLM 0.24.0 kernel_paged_attention_2d: a sequence without new tokens overwrites the next row"),
    ),
    Fault(
        "state-leaks",
        "behaviour",
        "a call gives different bits after another call",
        "a workspace, a counter or a cached plan keeps the state of an earlier call",
        None,
        issues=("FlashInfer #4014", "TRT-LLM #18769", "rtp-llm #1084"),
    ),
    Fault(
        "depends-on-batch",
        "behaviour",
        "a sequence gives different bits alone than in a batch, although batch_invariant is set",
        "the number of splits, or the tile, depends on the whole batch",
        None,
    ),
    Fault(
        "writes-outside-output",
        "behaviour",
        "memory before or after the output changes",
        "a store without a mask",
        None,
        issues=("FlashInfer #3978", "vLLM 0.24.0 kernel_paged_attention_2d, last sequence without new tokens"),
    ),
    Fault(
        "writes-padding-rows",
        "behaviour",
        "rows of the output that belong to no sequence change",
        "an empty row or a padding row is written anyway",
        None,
        issues=("vLLM Triton decode writes a row for query_len 0", "vLLM 0.24.0 reduce_segments runs over all rows"),
    ),
    Fault(
        "changes-inputs",
        "behaviour",
        "an input tensor changes",
        "in-place scaling, or a write to the cache",
        None,
        issues=("vLLM ref_paged_attn: q *= scale",),
    ),
    Fault(
        "raises",
        "behaviour",
        "raises for a supported call",
        "an undeclared limit",
        None,
        issues=("vLLM #39065",),
    ),
)
