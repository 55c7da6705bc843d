"""Faults of behaviour: they show in how a kernel behaves, not in one answer."""

from __future__ import annotations

import torch

from quire.conformance.faults.fault import Fault
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Stages, Values, Work


def nan_leak() -> Stages:
    """Slots of the last page beyond the end get weight 0, and 0 times NaN is NaN."""

    def gather(w: Work, s: Stages, at: Indices, sequence: BatchSequence) -> Values:
        if w.call.new is not None:
            return x.gather(w, s, at, sequence)
        whole = -(-sequence.kv_len // w.call.page_size) * w.call.page_size
        return x.gather(w, s, at, sequence._replace(kv_len=whole))

    def see(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor:
        visible = x.see(w, sequence, min(keys, sequence.kv_len))
        return torch.cat((visible, torch.zeros(sequence.q_len, max(keys - sequence.kv_len, 0), dtype=torch.bool)), 1)

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        if w.call.alibi is None:
            return 0.0
        q_at = torch.arange(sequence.context, sequence.kv_len)
        return -x.slopes(w) * (q_at[:, None] - torch.arange(keys)[None, :]).abs()

    return PLAIN.replace(gather=gather, see=see, bias=bias, keep_unseen=True)


BEHAVIOUR = (
    Fault(
        "nan-leak",
        "behaviour",
        "NaN where a don't-care slot held NaN, right where it held a number",
        "weight 0 times whatever lies there: masked scores, values that are not",
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
        "the same call gives other bits the second time",
        "a race, an atomic sum, memory that was not initialised",
        None,
        issues=("vLLM #39146", "vLLM 0.24.0 kernel_paged_attention_2d stores rows of no new tokens where the next row is"),
    ),
    Fault(
        "state-leaks",
        "behaviour",
        "a call gives other bits after another call",
        "a workspace, a counter or a cached plan that one call leaves for the next",
        None,
        issues=("FlashInfer #4014", "TRT-LLM #18769", "rtp-llm #1084"),
    ),
    Fault(
        "depends-on-batch",
        "behaviour",
        "a sequence alone gives other bits than in a batch, although batch_invariant was asked for",
        "the number of splits, or the tile, is chosen from the whole batch",
        None,
    ),
    Fault(
        "writes-outside-output",
        "behaviour",
        "memory before or behind the output changes",
        "a store without a mask",
        None,
        issues=("FlashInfer #3978", "vLLM 0.24.0 kernel_paged_attention_2d, a last row of no new tokens"),
    ),
    Fault(
        "writes-padding-rows",
        "behaviour",
        "rows of the output that belong to no sequence change",
        "a row that is empty or padding is written all the same",
        None,
        issues=("vLLM Triton decode writes a row for query_len 0", "vLLM 0.24.0 reduce_segments runs over all rows"),
    ),
    Fault(
        "changes-inputs",
        "behaviour",
        "a tensor that is only to be read changes",
        "scaling in place, or a cache that is written",
        None,
        issues=("vLLM ref_paged_attn: q *= scale",),
    ),
    Fault(
        "raises",
        "behaviour",
        "an error where an answer was due",
        "a limit that is not declared",
        None,
        issues=("vLLM #39065",),
    ),
)
