"""Whether a result is right, by the error budget of the conformance kit. A wrong result gets no speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from quire.bench.case import Q_SCALE, BenchCase
from quire.cache.format import FORMATS, format_of
from quire.cache.hadamard import transformed
from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle.budget import allowed, rounding_losses
from quire.conformance.oracle.exact import Outcome, Values, exact
from quire.conformance.runner.threads import one_thread
from quire.options import NUMBERS, PER_HEAD, PLAIN, Options

HEADS = 3
"""Key heads of each sequence that are compared. float64 is slow, so a result is compared in a sample."""
GROUP = 16
"""The most query heads that are compared of each of these key heads."""
MOST_KEYS = 400_000
"""If there are more keys at all places of all sequences, one key head of each sequence is compared, each time another one."""
PLACES = 5
"""Places of each sequence at which queries are compared."""
QUERIES = 16
"""Neighbouring queries at each place."""

JOBS = 16
"""The most samples that are computed at the same time."""


class ReferenceSample(NamedTuple):
    """Some neighbouring queries of a sequence, some of its heads, and the keys that one of the queries can see."""

    rows: slice
    """Of q and out."""
    q_heads: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spans: torch.Tensor | None = None
    """[queries, 2]: the keys that each query sees, if not those up to its own."""
    positions: torch.Tensor | None = None
    """[queries, 1, n]: the only keys that each query sees of these, or -1."""


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
            self._expected[q_format] = expected(parts, self.case.q.dtype, self.case.options, Q_SCALE if quantised else None)
        return self._expected[q_format]


def worst_of(errors: Iterator[SampleError]) -> SampleError:
    return max(errors, key=lambda error: error.share)


def expected(
    parts: list[ReferenceSample], dtype: torch.dtype, options: Options = PLAIN, q_scale: float | None = None
) -> list[Expected]:
    """What attention must give for some samples of one call, as `dtype`. As in the kit, the loss of a straightforward computation
    is the worst over the call."""

    def compute(part: ReferenceSample) -> tuple[Outcome, float]:
        call = sample_call(part, dtype, options, q_scale)
        right = exact(call)
        return right, rounding_losses(call, right=right)[0]

    # Each sample in one thread, several at the same time.
    with one_thread(), ThreadPoolExecutor(min(JOBS, os.cpu_count() or 1), "reference", torch.set_num_threads, (1,)) as pool:
        found = list(pool.map(compute, parts))
    lost = max((lost for _, lost in found), default=0.0)
    return [
        Expected(part.rows, part.q_heads.cpu(), outcome.out, allowed(lost, outcome.weighted, outcome.out, dtype))
        for part, (outcome, _) in zip(parts, found)
    ]


def sample_call(sample: ReferenceSample, dtype: torch.dtype, options: Options, q_scale: float | None) -> KernelCall:
    """A sample as a call of the kit: one sequence, whose keys are one page."""
    q, k, v = sample.q.cpu(), sample.k.cpu().contiguous(), sample.v.cpu().contiguous()
    # The oracle keeps the keys and values that it gathered. Here they are gathered already, and gathering takes most of its time.
    gathered = {(0, number): Values(k.to(number), v.to(number)) for number in (torch.float64, torch.float32)}
    given: dict[str, Any] = {name: getattr(options, name) for name in NUMBERS}
    for name in PER_HEAD:
        tensor = getattr(options, name)
        given[name] = None if tensor is None else tensor.cpu()[sample.q_heads.cpu()]
    return KernelCall(
        q=q,
        k_pages=k[None],
        v_pages=v[None],
        page_table=torch.zeros(1, 1, dtype=torch.int32, device="cpu"),
        kv_lens=torch.tensor([len(k)], dtype=torch.int32, device="cpu"),
        q_starts=torch.tensor([0, len(q)], dtype=torch.int32, device="cpu"),
        out=torch.empty(len(q), q.shape[1], v.shape[2], dtype=dtype, device="cpu"),
        scale=q.shape[2] ** -0.5 if options.scale is None else options.scale,
        format=format_of(k.dtype).name,
        window=(None, None) if sample.spans is not None else options.sides,
        **given,
        q_scale=q_scale,
        spans=sample.spans,
        select_positions=sample.positions,
        memo=dict(gathered),
    )


def samples(case: BenchCase, q: torch.Tensor) -> Iterator[ReferenceSample]:
    """The same each time: the first queries of every sequence, the last, and some between. With transformed keys, the queries are
    transformed, too, and rounded to their type: no score changes otherwise."""
    token, q = 0, transformed("q", q, case.cache)
    for seq, ((new, _), pages) in enumerate(zip(case.workload.sequences, case.page_lists())):
        heads, q_heads = _heads(case, seq)
        k, v = (x[:, heads] for x in case.keys_and_values(pages))
        count = min(QUERIES, new)
        for first in sorted({(new - count) * place // (PLACES - 1) for place in range(PLACES)}):
            rows = slice(token + first, token + first + count)
            keys, spans, positions = _seen(case, seq, first, rows)
            yield ReferenceSample(rows, q_heads, select(q[rows], q_heads), k[keys], v[keys], spans, positions)
        token += new


def _heads(case: BenchCase, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The key heads of a sequence that are compared, and their query heads."""
    kv_heads, group, device = case.cache.kv_heads, case.q.shape[1] // case.cache.kv_heads, case.q.device
    reach = case.workload.window or max(map(sum, case.workload.sequences))
    keys = sum(min(PLACES, new) * min(new + context, reach) for new, context in case.workload.sequences)
    count = min(HEADS, kv_heads) if keys <= MOST_KEYS else 1
    heads = torch.linspace(0, kv_heads - 1, count, device="cpu").long().to(device)
    heads = heads if keys <= MOST_KEYS else (heads + seq) % kv_heads
    own = torch.linspace(0, group - 1, min(GROUP, group), device="cpu").long().to(device)
    return heads, (heads[:, None] * group + own).flatten()


def _seen(
    case: BenchCase, seq: int, first: int, rows: slice
) -> tuple[slice | torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The keys of a sequence that some neighbouring queries can see, and which of these each query sees, if causality and the
    window do not say so: spans, and positions."""
    w, batch, count = case.workload, case.batch, rows.stop - rows.start
    new, context = w.sequences[seq]
    whole = torch.tensor([[0, new + context]] * count, dtype=torch.int32, device="cpu")
    if batch.spans is not None:
        spans = batch.spans[rows].cpu()
        begin, end = int(spans[:, 0].min()), int(spans[:, 1].max())
        return slice(begin, end), spans - begin, None
    if case.options.mask is not None:
        mask = case.options.mask[rows, :new].cpu()
        positions = torch.where(mask, torch.arange(context, context + new, device="cpu"), -1)
        before = torch.arange(context, device="cpu").expand(count, -1)
        return slice(0, new + context), whole, torch.cat((before, positions), 1)[:, None]
    if w.part_causal and seq % 2:
        return slice(0, new + context), whole, None
    left, end = case.options.sides[0], context + first + count
    if batch.select is not None:
        return _only_selected(_selected(case, seq, rows).long(), context + first)
    return slice(0 if left is None else max(0, context + first - left), end), None, None


def _only_selected(positions: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_seen`, of neighbouring queries from a position on, whose positions are selected: only these keys are compared."""
    own = torch.arange(first, first + len(positions), device=positions.device)[:, None, None]
    keys, places = torch.where(positions <= own, positions, -1).unique(return_inverse=True)
    missing = int((keys == -1).sum())
    whole = torch.tensor([[0, len(keys) - missing]] * len(positions), dtype=torch.int32, device="cpu")
    return keys[missing:], whole, (places - missing).cpu()


def _selected(case: BenchCase, seq: int, rows: slice) -> torch.Tensor:
    """The positions that are selected for some queries of a sequence, `[queries, 1, n]`."""
    select, size = case.batch.select, case.cache.page_size
    assert select is not None
    if select.kind == "positions":
        return select.entries[rows]
    keys = select.entries[seq, :, :, None].long() * size + torch.arange(size, device=select.entries.device)
    return keys.flatten(1).expand(rows.stop - rows.start, 1, -1)


def select(q: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Some heads of queries. torch cannot index 8-bit floats; fp32 holds all of their values."""
    return q.float()[:, heads].to(q.dtype)
