"""Faults of what is added: ALiBi and sinks."""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.conformance.cases.build import alibi_slopes
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import ORDERS, has, with_sink, without_sink
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, BatchSequence, SequenceResult, Stages, Work

LN2 = math.log(2)


def _alibi(change: Any) -> Stages:
    """Another bias: `change(w, q_at [queries, 1], k_at [1, keys])`, with slopes."""

    def bias(w: Work, sequence: BatchSequence, keys: int) -> torch.Tensor | float:
        q_at, k_at = x.places(w, sequence, keys)
        return change(w, q_at[:, None], k_at[None, :])

    return PLAIN.replace(bias=bias)


def _local_slopes(heads: Any) -> Stages:
    def change(w: Work, q_at: torch.Tensor, k_at: torch.Tensor) -> torch.Tensor:
        return -alibi_slopes(heads(w.call))[: w.call.q_heads].to(w.number)[:, None, None] * (q_at - k_at).abs()

    return _alibi(change)


def _valued_sink(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
    """The sink's weight falls on the first key's value."""
    extra = x.sink(w)
    assert extra is not None
    first = v[:1] if v.shape[0] else v.new_zeros(1, *v.shape[1:])
    return x.weigh(without_sink(w), torch.cat((logits, extra.expand(*logits.shape[:2], 1)), -1), torch.cat((v, first)), heads)


def _sink_per_split(splits: int | None = None, size: int | None = None) -> Stages:
    """Each split adds the sink: so many splits, or one for each `size` keys of a sequence."""
    return with_sink(lambda w, sinks, logits: sinks + math.log(splits or max(-(-logits.shape[-1] // (size or 1)), 1)))


BIAS = (
    Fault(
        "alibi-missing",
        "alibi",
        "far keys weigh too much",
        "a kernel that does not know ALiBi and does not say so",
        lambda: _alibi(lambda w, q_at, k_at: 0.0),
        has("alibi"),
        issues=("vLLM #57614",),
    ),
    Fault(
        "alibi-sign",
        "alibi",
        "far keys weigh more than near ones",
        "slope * (q - k) added instead of subtracted",
        lambda: _alibi(lambda w, q_at, k_at: x.slopes(w) * (q_at - k_at).abs()),
        has("alibi"),
    ),
    Fault(
        "alibi-slopes-of-local-heads",
        "alibi",
        "every head has the slope of another",
        "slopes are derived from the number of heads on this GPU",
        lambda times: _local_slopes(lambda call: call.q_heads * times),
        has("alibi"),
        ({"times": 1}, {"times": 2}),
        issues=("FlashInfer #1606", "FlashInfer #5101"),
    ),
    Fault(
        "alibi-from-wrong-end",
        "alibi",
        "early keys weigh more than late ones",
        "the bias is taken from the key's own position instead of its distance",
        lambda: _alibi(lambda w, q_at, k_at: -x.slopes(w) * k_at),
        has("alibi"),
    ),
    Fault(
        "alibi-scaled",
        "alibi",
        "far keys weigh too much",
        "the bias is added before the scale is applied",
        lambda: _alibi(lambda w, q_at, k_at: -x.slopes(w) * w.call.scale * (q_at - k_at).abs()),
        has("alibi"),
    ),
    Fault(
        "alibi-not-relative",
        "alibi",
        "only rows with a sink, and every LSE, are off",
        "slope * k_pos without the query's position: a constant for each row, until something else is in the sum",
        lambda to: _alibi(lambda w, q_at, k_at: x.slopes(w) * (k_at - (0 if to == "first key" else q_at[:1]))),
        lambda call: call.alibi is not None and (call.sinks is not None or call.lse is not None),
        ({"to": "first key"}, {"to": "first new token"}),
        issues=("vLLM 0.24.0 unified_attention: slope * (k_pos - context)",),
    ),
    Fault(
        "sink-missing",
        "sinks",
        "outputs are too large",
        "an option that is not passed",
        lambda: with_sink(lambda w, sinks, logits: torch.full_like(sinks, -torch.inf)),
        has("sinks"),
    ),
    Fault(
        "sink-scaled",
        "sinks",
        "outputs are off by the weight of a sink that is too small or too large",
        "the sink is put in before the scale is applied, or in the other base",
        lambda by: with_sink(lambda w, sinks, logits: sinks * {"scale": w.call.scale, "ln 2": LN2, "1 / ln 2": 1 / LN2}[by]),
        has("sinks"),
        tuple({"by": factor} for factor in ("scale", "ln 2", "1 / ln 2")),
    ),
    Fault(
        "sink-with-value",
        "sinks",
        "some of the first token's value is mixed in",
        "the sink is taken for a token",
        lambda: PLAIN.replace(weigh=_valued_sink),
        has("sinks"),
    ),
    Fault(
        "sink-in-every-split",
        "sinks",
        "outputs are too small, the more so the more splits there are",
        "each split adds the sink, and the combination adds them up",
        _sink_per_split,
        has("sinks"),
        (*({"splits": n} for n in (2, 4, 8, 16, 3)), *({"size": n} for n in (256, 512, 128, 64))),
    ),
    Fault(
        "sink-of-another-head",
        "sinks",
        "each head has the sink of another",
        "sinks indexed within the group, or in another order",
        lambda order: with_sink(lambda w, sinks, logits: sinks[ORDERS[order](w.call)]),
        has("sinks"),
        ({"order": "kv head"}, {"order": "within group"}, {"order": "reversed"}, {"order": "first"}),
    ),
)
