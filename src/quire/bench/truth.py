"""Whether a result is right: no speed is printed for a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from quire import reference
from quire.bench.case import Q_SCALE, Case
from quire.cache.format import FORMATS
from quire.conformance.budget import allowed, least_loss

HEADS = 3
"""How many key heads of each sequence are compared, in how many places, and how many queries at each: float64 is slow and large,
faults are not shy."""
PLACES = 5
QUERIES = 16
LIFT = {"e4m3fn": 256.0, "e4m3fnuz": 128.0}
"""Kernels that multiply weights in 8 bits lift them first, or small ones would vanish."""


class Sample(NamedTuple):
    """Some neighbouring queries of a sequence, some of its heads, and the keys that one of the queries can see."""

    rows: slice
    q_heads: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Truth:
    """What a case must give, in float64, for a sample of heads and queries of every sequence."""

    def __init__(self, case: Case):
        self.case = case
        window = case.options.sides
        self.budgets: dict[str, float] = {}
        self.want = [(s.rows, s.q_heads, reference.attention(s.q, s.k, s.v, window=window)[0]) for s in samples(case)]

    def error(self, out: torch.Tensor) -> float:
        """The largest difference; NaN if there is one in the sample."""
        worst = [(out[rows][:, q_heads].double() - want).abs().max() for rows, q_heads, want in self.want]
        return float(torch.stack(worst).max())

    def budget(self, q_format: str) -> float:
        """What is allowed: the budget of the conformance kit, for a plain kernel that computes in fp32, rounds queries and weights
        to this format, and rounds its output once."""
        if q_format not in self.budgets:
            step = 0.0 if q_format == "fp32" else torch.finfo(FORMATS[q_format].dtype).eps / 2
            lost, sizes = 0.0, []
            for sample, (_, _, want) in zip(samples(self.case), self.want):
                weighted = reference.attention(sample.q, sample.k, sample.v.abs(), window=self.case.options.sides)[0]
                got = plain(sample, q_format, torch.float32, self.case.options.sides[0])
                off = (got.double() - want).abs() / weighted.clamp(min=1e-30)
                lost = max(lost, float(off.max()), least_loss(largest_logit(sample), step))
                sizes.append((weighted, want))
            self.budgets[q_format] = max(float(allowed(lost, *size, self.case.q.dtype).max()) for size in sizes)
        return self.budgets[q_format]


def largest_logit(sample: Sample) -> float:
    """The largest magnitude of a logit."""
    group = sample.q.shape[1] // sample.k.shape[1]
    k = sample.k.float().repeat_interleave(group, 1)
    return float(torch.einsum("qhd,khd->hqk", sample.q.float(), k).abs().max()) * sample.q.shape[2] ** -0.5


def samples(case: Case) -> Iterator[Sample]:
    """The same each time: the first queries of every sequence, the last, and some between."""
    kv_heads, group = case.cache.kv_heads, case.q.shape[1] // case.cache.kv_heads
    heads = torch.linspace(0, kv_heads - 1, min(HEADS, kv_heads), device="cpu").long().to(case.q.device)
    q_heads = (heads[:, None] * group + torch.arange(group, device=heads.device)).flatten()
    left, token = case.options.sides[0], 0
    for (new, context), pages in zip(case.workload.rows, case.page_lists()):
        k, v = (x[:, heads] for x in case.keys_and_values(pages))
        count = min(QUERIES, new)
        for first in sorted({(new - count) * place // (PLACES - 1) for place in range(PLACES)}):
            rows = slice(token + first, token + first + count)
            keys = slice(0 if left is None else max(0, context + first - left), context + first + count)
            yield Sample(rows, q_heads, case.q[rows][:, q_heads], k[keys], v[keys])
        token += new


def plain(sample: Sample, q_format: str, dtype: torch.dtype, left: int | None) -> torch.Tensor:
    """Causal attention of one sample in fp32, with the roundings of a kernel."""
    format, q, k, v = FORMATS[q_format], sample.q.float(), sample.k.float(), sample.v.float()
    if format.quantised:
        q = format.encode(q / Q_SCALE).float() * Q_SCALE
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    q_at = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
    distance = q_at[:, None] - torch.arange(k.shape[0], device=q.device)
    hidden = distance < 0 if left is None else (distance < 0) | (distance > left)
    logits = logits.masked_fill(hidden, -torch.inf)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    lift = LIFT.get(q_format, 1.0)
    rounded = format.encode(weights * lift).float() / lift
    return (torch.einsum("hqk,khd->qhd", rounded, v) / weights.sum(-1).T[..., None]).to(dtype)
