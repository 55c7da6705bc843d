"""Faults of logits: the softmax scale and softcap."""

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
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, SequenceResult, Stages, Work


def _scaled(scale: Any) -> Stages:
    """Replaces the softmax scale by `scale(w)`."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return oracle.capped(w, oracle.products(oracle.scaled_queries(w, q, scale(w)), w.rounded_for_logits(k), heads))

    return PLAIN.replace(score=score)


def _logits(change: Any) -> Stages:
    """Replaces logits by `change(w, products)`, where products are q·k without the scale."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return change(w, oracle.products(q, w.rounded_for_logits(k), heads))

    return PLAIN.replace(score=score)


def _tanh(cap: float, logits: torch.Tensor) -> torch.Tensor:
    return cap * torch.tanh(logits / cap)


def _softcap_over_bias() -> Stages:
    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return oracle.products(q * w.call.scale, k, heads)

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        hidden = logits == -torch.inf
        return oracle.softmax(w, oracle.capped(w, logits.masked_fill(hidden, 0.0)).masked_fill(hidden, -torch.inf), v, heads)

    return PLAIN.replace(score=score, softmax=softmax)


def _softcap_over_mask() -> Stages:
    """The -inf of a masked key becomes -softcap: every key of the sequence contributes."""

    def score(w: Work, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return oracle.products(q * w.call.scale, k, heads)

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        return oracle.softmax(w, oracle.capped(w, logits), v, heads)

    return PLAIN.replace(score=score, softmax=softmax, keep_unseen=True)


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
    return oracle.softmax(Work(dataclasses.replace(w.call, sinks=sinks), w.number, w.factors), logits * ln2, v, heads)


SCALE = (
    Fault(
        "scale-missing",
        "scale",
        "the softmax is far too sharp",
        "caller and kernel each assume that the other one multiplies by the scale",
        lambda: _scaled(lambda w: 1.0),
        lambda call: call.scale != 1.0,
    ),
    Fault(
        "scale-twice",
        "scale",
        "the softmax is far too flat",
        "q was already multiplied by the scale",
        lambda: _scaled(lambda w: w.call.scale**2),
        lambda call: call.scale != 1.0,
        issues=("vLLM ref_paged_attn: q *= scale",),
    ),
    Fault(
        "scale-doubled",
        "scale",
        "logits are twice as large",
        "a factor of one code path is applied on two",
        lambda: _scaled(lambda w: w.call.scale * 2),
    ),
    Fault(
        "scale-of-wrong-dim",
        "scale",
        "the softmax is slightly too flat or too sharp",
        "1/sqrt of the padded head_dim, of v_head_dim or of q_heads",
        lambda dim: _scaled(lambda w: DIMS[dim](w.call) ** -0.5),
        lambda call: abs(call.scale - call.q.shape[2] ** -0.5) < 1e-9,
        ({"dim": "2 head_dim"}, {"dim": "head_dim / 2"}, {"dim": "v_head_dim"}, {"dim": "padded head_dim"}, {"dim": "q_heads"}),
        issues=("FlashInfer #4014",),
    ),
    Fault(
        "scale-ignored",
        "scale",
        "the scale is 1/sqrt(head_dim), whatever the caller passes",
        "the key of a cached plan or graph does not include the scale",
        lambda: _scaled(lambda w: w.call.q.shape[2] ** -0.5),
        lambda call: abs(call.scale - call.q.shape[2] ** -0.5) > 1e-9,
        issues=("FlashInfer #4014",),
    ),
    Fault(
        "exp2-without-log2e",
        "scale",
        "logits are too small by the factor ln 2",
        "exp2 replaces exp, but log2(e) is missing in the scale and in the terms that are added to logits",
        lambda: PLAIN.replace(softmax=_exp2),
    ),
    Fault(
        "scale-off-by-factor",
        "scale",
        "all logits are wrong by one factor",
        "the scale contains an additional factor",
        lambda factor: _scaled(lambda w: w.call.scale * factor),
        tries=(),
        solve=solve.score_factor,
        lasting=True,
        inject=lambda call: {"factor": 1.25},
    ),
    Fault(
        "q-scale-missing",
        "scale",
        "logits lack the factor q_scale of fp8 queries",
        "the scale is folded into the softmax scale on one code path only",
        lambda: _scaled(lambda w: w.call.scale / w.call.q_scale),
        has("q_scale"),
    ),
    Fault(
        "softcap-missing",
        "softcap",
        "large logits are not capped",
        "the option is accepted but not passed on",
        lambda: _logits(lambda w, s: s * w.call.scale),
        has("softcap"),
        issues=("vLLM ROCM_ATTN accepts and drops it",),
    ),
    Fault(
        "softcap-before-scale",
        "softcap",
        "logits are capped before they are scaled",
        "the cap is applied to q·k, and the scale afterwards",
        lambda: _logits(lambda w, s: _tanh(w.call.softcap, s) * w.call.scale),
        has("softcap"),
    ),
    Fault(
        "softcap-without-factor",
        "softcap",
        "logits lie between -1 and 1",
        "tanh(logit / softcap) is not multiplied by softcap",
        lambda: _logits(lambda w, s: torch.tanh(s * w.call.scale / w.call.softcap)),
        has("softcap"),
    ),
    Fault(
        "softcap-after-mask",
        "softcap",
        "masked keys keep a small weight: their -inf becomes -softcap",
        "the mask is added before the tanh",
        _softcap_over_mask,
        has("softcap"),
    ),
    Fault(
        "softcap-on-bias",
        "softcap",
        "distant keys have too much weight: their bias is capped too",
        "ALiBi is added before the tanh",
        _softcap_over_bias,
        lambda call: call.softcap is not None and call.alibi is not None,
    ),
)
