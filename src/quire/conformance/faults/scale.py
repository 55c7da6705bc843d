"""Faults of logits: the softmax's scale, and softcap."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import has
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.exact import PLAIN, SequenceResult, Stages, Work


def _scaled(scale: Any) -> Stages:
    """Another softmax scale: `scale(w)`."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x.capped(w, x.products(x.factor(w, q, scale(w)), w.rounded(k), heads))

    return PLAIN.replace(score=score)


def _logits(change: Any) -> Stages:
    """Another way from products to logits: `change(w, products)`, the products not scaled yet."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return change(w, x.products(q, w.rounded(k), heads))

    return PLAIN.replace(score=score)


def _tanh(cap: float, logits: torch.Tensor) -> torch.Tensor:
    return cap * torch.tanh(logits / cap)


def _softcap_over_bias() -> Stages:
    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x.products(q * w.call.scale, k, heads)

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        hidden = logits == -torch.inf
        return x.weigh(w, x.capped(w, logits.masked_fill(hidden, 0.0)).masked_fill(hidden, -torch.inf), v, heads)

    return PLAIN.replace(score=score, weigh=weigh)


def _softcap_over_mask() -> Stages:
    """A hidden key's -inf becomes -softcap: every key of the sequence takes part a little."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x.products(q * w.call.scale, k, heads)

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        return x.weigh(w, x.capped(w, logits), v, heads)

    return PLAIN.replace(score=score, weigh=weigh, keep_unseen=True)


DIMS: dict[str, Callable[[KernelCall], float]] = {
    "2 head_dim": lambda call: 2 * call.q.shape[2],
    "head_dim / 2": lambda call: max(call.q.shape[2] / 2, 1),
    "v_head_dim": lambda call: call.out.shape[2],
    "padded head_dim": lambda call: 1 << (call.q.shape[2] - 1).bit_length(),
    "q_heads": lambda call: call.q_heads,
}


def _exp2(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
    ln2 = math.log(2.0)
    sinks = None if w.call.sinks is None else w.call.sinks * ln2
    return x.weigh(Work(dataclasses.replace(w.call, sinks=sinks), w.number, w.factors), logits * ln2, v, heads)


SCALE = (
    Fault(
        "scale-missing",
        "scale",
        "the softmax is far too sharp",
        "the caller was to multiply q, or the kernel was",
        lambda: _scaled(lambda w: 1.0),
        lambda call: call.scale != 1.0,
    ),
    Fault(
        "scale-twice",
        "scale",
        "the softmax is far too flat",
        "q was already multiplied by the scale; vLLM's reference does it in place",
        lambda: _scaled(lambda w: w.call.scale**2),
        lambda call: call.scale != 1.0,
        issues=("vLLM ref_paged_attn: q *= scale",),
    ),
    Fault(
        "scale-doubled",
        "scale",
        "the softmax is too sharp by a factor of two",
        "a factor that belongs to one of two paths is applied on both",
        lambda: _scaled(lambda w: w.call.scale * 2),
    ),
    Fault(
        "scale-of-wrong-dim",
        "scale",
        "the softmax is somewhat too flat or too sharp",
        "1/sqrt of the padded head_dim, of v_head_dim, of q_heads",
        lambda dim: _scaled(lambda w: DIMS[dim](w.call) ** -0.5),
        lambda call: abs(call.scale - call.q.shape[2] ** -0.5) < 1e-9,
        ({"dim": "2 head_dim"}, {"dim": "head_dim / 2"}, {"dim": "v_head_dim"}, {"dim": "padded head_dim"}, {"dim": "q_heads"}),
        issues=("FlashInfer #4014",),
    ),
    Fault(
        "scale-ignored",
        "scale",
        "a scale of the caller's own is replaced by 1/sqrt(head_dim)",
        "a cached plan or graph that leaves the scale out of its key",
        lambda: _scaled(lambda w: w.call.q.shape[2] ** -0.5),
        lambda call: abs(call.scale - call.q.shape[2] ** -0.5) > 1e-9,
        issues=("FlashInfer #4014",),
    ),
    Fault(
        "exp2-without-log2e",
        "scale",
        "the softmax is too flat by ln 2",
        "exp2 is faster than exp; log2(e) must be in the scale, and in whatever is added to logits",
        lambda: PLAIN.replace(weigh=_exp2),
    ),
    Fault(
        "scale-off-by-factor",
        "scale",
        "the softmax is too flat or too sharp by one factor everywhere",
        "some other factor is in the scale",
        lambda factor: _scaled(lambda w: w.call.scale * factor),
        tries=(),
        solve=solve.score_factor,
        lasting=True,
        plant=lambda call: {"factor": 1.25},
    ),
    Fault(
        "q-scale-missing",
        "scale",
        "logits are off by the scale of fp8 queries",
        "the scale is folded into the softmax scale on one path only",
        lambda: _scaled(lambda w: w.call.scale / w.call.q_scale),
        has("q_scale"),
    ),
    Fault(
        "softcap-missing",
        "softcap",
        "large logits are too large",
        "an option that is accepted and never passed on",
        lambda: _logits(lambda w, s: s * w.call.scale),
        has("softcap"),
        issues=("vLLM ROCM_ATTN accepts and drops it",),
    ),
    Fault(
        "softcap-before-scale",
        "softcap",
        "logits are capped too early and then shrunk",
        "the cap is applied to q·k, the scale afterwards",
        lambda: _logits(lambda w, s: _tanh(w.call.softcap, s) * w.call.scale),
        has("softcap"),
    ),
    Fault(
        "softcap-without-factor",
        "softcap",
        "logits stay between -1 and 1",
        "tanh(logit / cap) without multiplying by cap again",
        lambda: _logits(lambda w, s: torch.tanh(s * w.call.scale / w.call.softcap)),
        has("softcap"),
    ),
    Fault(
        "softcap-after-mask",
        "softcap",
        "hidden keys take part a little: their -inf became -softcap",
        "the mask is added before the tanh",
        _softcap_over_mask,
        has("softcap"),
    ),
    Fault(
        "softcap-on-bias",
        "softcap",
        "far keys weigh too much: their bias was capped too",
        "ALiBi is added before the tanh",
        _softcap_over_bias,
        lambda call: call.softcap is not None and call.alibi is not None,
    ),
)
