"""Faults of terms added to the logits: ALiBi and sinks."""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.conformance.cases.build import alibi_slopes
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import ORDERS, has, with_sink, without_sink
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, BatchSequence, SequenceResult, Stages, Work

LN2 = math.log(2)


def _alibi(change: Any) -> Stages:
    """Replaces the ALiBi bias by `change(w, q_pos [queries, 1], k_pos [1, keys])`."""

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        q_pos, k_pos = oracle.token_positions(w, sequence, keys)
        return change(w, q_pos[:, None], k_pos[None, :])

    return PLAIN.replace(bias=bias)


def _local_slopes(heads: Any) -> Stages:
    def change(w: Work, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        return -alibi_slopes(heads(w.call))[: w.call.q_heads].to(w.number)[:, None, None] * (q_pos - k_pos).abs()

    return _alibi(change)


def _valued_sink(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
    """The weight of the sink goes to the value of the first key."""
    extra = oracle.sink(w)
    assert extra is not None
    first = v[:1] if v.shape[0] else v.new_zeros(1, *v.shape[1:])
    return oracle.softmax(
        without_sink(w), torch.cat((logits, extra.expand(*logits.shape[:2], 1)), -1), torch.cat((v, first)), heads
    )


def _sink_per_split(splits: int | None = None, size: int | None = None) -> Stages:
    """Each split adds the sink; there are `splits` of them, or one per `size` keys of a sequence."""
    return with_sink(lambda w, sinks, logits: sinks + math.log(splits or max(-(-logits.shape[-1] // (size or 1)), 1)))


BIAS = (
    Fault(
        "alibi-missing",
        "alibi",
        "distant keys have too much weight",
        "the kernel does not support ALiBi and does not report it",
        lambda: _alibi(lambda w, q_pos, k_pos: 0.0),
        has("alibi"),
        issues=("vLLM #57614",),
    ),
    Fault(
        "alibi-sign",
        "alibi",
        "distant keys have more weight than near ones",
        "slope * distance is added instead of subtracted",
        lambda: _alibi(lambda w, q_pos, k_pos: oracle.slopes(w) * (q_pos - k_pos).abs()),
        has("alibi"),
    ),
    Fault(
        "alibi-slopes-of-local-heads",
        "alibi",
        "each head has the slope of another head",
        "slopes are derived from the number of heads on this GPU",
        lambda times: _local_slopes(lambda call: call.q_heads * times),
        has("alibi"),
        ({"times": 1}, {"times": 2}),
        issues=("FlashInfer #1606", "FlashInfer #5101"),
    ),
    Fault(
        "alibi-from-wrong-end",
        "alibi",
        "early keys have more weight than late ones",
        "the bias is computed from the position of the key instead of its distance",
        lambda: _alibi(lambda w, q_pos, k_pos: -oracle.slopes(w) * k_pos),
        has("alibi"),
    ),
    Fault(
        "alibi-scaled",
        "alibi",
        "distant keys have too much weight",
        "the bias is added before the scale is applied",
        lambda: _alibi(lambda w, q_pos, k_pos: -oracle.slopes(w) * w.call.scale * (q_pos - k_pos).abs()),
        has("alibi"),
    ),
    Fault(
        "alibi-not-relative",
        "alibi",
        "the LSE, and outputs with a sink, are wrong",
        "slope * k_pos without q_pos: a constant per row, which cancels in the softmax but not in the LSE or with a sink",
        lambda to: _alibi(lambda w, q_pos, k_pos: oracle.slopes(w) * (k_pos - (0 if to == "first key" else q_pos[:1]))),
        lambda call: call.alibi is not None and (call.sinks is not None or call.lse is not None),
        ({"to": "first key"}, {"to": "first new token"}),
        issues=("vLLM 0.24.0 unified_attention: slope * (k_pos - context)",),
    ),
    Fault(
        "sink-missing",
        "sinks",
        "outputs are too large",
        "the option is not passed",
        lambda: with_sink(lambda w, sinks, logits: torch.full_like(sinks, -torch.inf)),
        has("sinks"),
    ),
    Fault(
        "sink-scaled",
        "sinks",
        "the sink has too little or too much weight",
        "the sink is added before the scale is applied, or in another base",
        lambda by: with_sink(lambda w, sinks, logits: sinks * {"scale": w.call.scale, "ln 2": LN2, "1 / ln 2": 1 / LN2}[by]),
        has("sinks"),
        tuple({"by": factor} for factor in ("scale", "ln 2", "1 / ln 2")),
    ),
    Fault(
        "sink-with-value",
        "sinks",
        "the value of the first token is mixed into the output",
        "the sink is treated as a token",
        lambda: PLAIN.replace(softmax=_valued_sink),
        has("sinks"),
    ),
    Fault(
        "sink-in-every-split",
        "sinks",
        "outputs are too small, and more so with more splits",
        "each split adds the sink, and the merge adds them up",
        _sink_per_split,
        has("sinks"),
        (*({"splits": n} for n in (2, 4, 8, 16, 3)), *({"size": n} for n in (256, 512, 128, 64))),
    ),
    Fault(
        "sink-of-another-head",
        "sinks",
        "each head has the sink of another head",
        "sinks are indexed within the group, or in another order",
        lambda order: with_sink(lambda w, sinks, logits: sinks[ORDERS[order](w.call)]),
        has("sinks"),
        ({"order": "kv head"}, {"order": "within group"}, {"order": "reversed"}, {"order": "first"}),
    ),
)
