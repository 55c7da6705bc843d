"""Whether a result is right, by the error budget of the conformance kit. A wrong result gets no speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from quire.bench.case import Q_SCALE, BenchCase
from quire.cache.format import FORMATS, format_of
from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.budget import allowed, rounding_losses
from quire.conformance.oracle.exact import Values, exact
from quire.conformance.runner.threads import one_thread

HEADS = 3
"""Key heads of each sequence that are compared. float64 is slow, so a result is compared in a sample."""
PLACES = 5
"""Places of each sequence at which queries are compared."""
QUERIES = 16
"""Neighbouring queries at each place."""


class ReferenceSample(NamedTuple):
    """Some neighbouring queries of a sequence, some of its heads, and the keys that one of the queries can see."""

    rows: slice
    """Of q and out."""
    q_heads: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class SampleError(NamedTuple):
    """The error of the element that is farthest beyond its budget, or nearest to it. NaN if an element is not a number."""

    error: float
    budget: float

    @property
    def right(self) -> bool:
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """The error as a share of the budget; NaN counts as infinite."""
        return self.error / self.budget if self.error == self.error else float("inf")


class Expected(NamedTuple):
    """The exact output of a sample, and how far from it each element may be."""

    rows: slice
    q_heads: torch.Tensor
    out: torch.Tensor
    budget: torch.Tensor

    def compare(self, got: torch.Tensor) -> SampleError:
        error = (got[self.rows][:, self.q_heads.to(got.device)].cpu().double() - self.out).abs()
        worst = int((error / self.budget).nan_to_num(torch.inf, torch.inf).argmax())
        return SampleError(float(error.flatten()[worst]), float(self.budget.flatten()[worst]))


class BenchReference:
    """The exact output of a case for a sample of heads and queries of every sequence."""

    def __init__(self, case: BenchCase):
        self.case = case
        self._expected: dict[str, list[Expected]] = {}

    def check(self, out: torch.Tensor, q_format: str) -> SampleError:
        """Compares the output of an implementation whose queries have this format."""
        return worst_of(part.compare(out) for part in self._for(q_format))

    def largest_budget(self, q_format: str) -> float:
        """The largest error that is allowed for an element of the sample."""
        return max(float(part.budget.max()) for part in self._for(q_format))

    def _for(self, q_format: str) -> list[Expected]:
        if q_format not in self._expected:
            quantised = FORMATS[q_format].quantised
            parts = list(samples(self.case, self.case.query(q_format)))
            self._expected[q_format] = expected(parts, self.case.q.dtype, self.case.options.sides, Q_SCALE if quantised else None)
        return self._expected[q_format]


def worst_of(errors: Iterator[SampleError]) -> SampleError:
    return max(errors, key=lambda error: error.share)


def expected(
    parts: list[ReferenceSample],
    dtype: torch.dtype,
    window: tuple[int | None, int | None] = (None, None),
    q_scale: float | None = None,
) -> list[Expected]:
    """What causal attention must give for some samples of one call, as `dtype`. As in the kit, the loss of a
    straightforward computation is the worst over the call."""
    calls = [sample_call(part, dtype, window, q_scale) for part in parts]
    with one_thread():
        lost = max(rounding_losses(call)[0] for call in calls)
        outcomes = [exact(call) for call in calls]
    return [
        Expected(part.rows, part.q_heads.cpu(), outcome.out, allowed(lost, outcome.weighted, outcome.out, dtype))
        for part, outcome in zip(parts, outcomes)
    ]


def sample_call(
    sample: ReferenceSample, dtype: torch.dtype, window: tuple[int | None, int | None], q_scale: float | None
) -> KernelCall:
    """A sample as a call of the kit: one sequence, whose keys are one page."""
    q, k, v = sample.q.cpu(), sample.k.cpu().contiguous(), sample.v.cpu().contiguous()
    # The oracle keeps the keys and values that it gathered. Here they are gathered already, and gathering takes most of its time.
    gathered = {(0, number): Values(k.to(number), v.to(number)) for number in (torch.float64, torch.float32)}
    return KernelCall(
        q=q,
        k_pages=k[None],
        v_pages=v[None],
        page_table=torch.zeros(1, 1, dtype=torch.int32, device="cpu"),
        kv_lens=torch.tensor([len(k)], dtype=torch.int32, device="cpu"),
        q_starts=torch.tensor([0, len(q)], dtype=torch.int32, device="cpu"),
        out=torch.empty(len(q), q.shape[1], v.shape[2], dtype=dtype, device="cpu"),
        scale=q.shape[2] ** -0.5,
        format=format_of(k.dtype).name,
        window=window,
        q_scale=q_scale,
        memo=dict(gathered),
    )


def samples(case: BenchCase, q: torch.Tensor) -> Iterator[ReferenceSample]:
    """The same each time: the first queries of every sequence, the last, and some between."""
    kv_heads, group = case.cache.kv_heads, q.shape[1] // case.cache.kv_heads
    heads = torch.linspace(0, kv_heads - 1, min(HEADS, kv_heads), device="cpu").long().to(q.device)
    q_heads = (heads[:, None] * group + torch.arange(group, device=heads.device)).flatten()
    left, token = case.options.sides[0], 0
    for (new, context), pages in zip(case.workload.sequences, case.page_lists()):
        k, v = (x[:, heads] for x in case.keys_and_values(pages))
        count = min(QUERIES, new)
        for first in sorted({(new - count) * place // (PLACES - 1) for place in range(PLACES)}):
            rows = slice(token + first, token + first + count)
            keys = slice(0 if left is None else max(0, context + first - left), context + first + count)
            yield ReferenceSample(rows, q_heads, select(q[rows], q_heads), k[keys], v[keys])
        token += new


def select(q: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Some heads of queries. torch cannot index 8-bit floats; fp32 holds all of their values."""
    return q.float()[:, heads].to(q.dtype)
