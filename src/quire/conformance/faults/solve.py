"""Solvers: they compute parameters of a fault from the output of a kernel, such as a missing token, a page, a head or a factor.

A solver examines a few wrong rows and returns proposals. The whole call is then predicted with each proposal, and one that does not
explain the output is rejected. So a solver may guess, but must be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.budget import ratios
from quire.conformance.oracle.exact import PLAIN, BatchSequence, Indices, Work

if TYPE_CHECKING:
    from quire.conformance.faults.fault import Observation

Proposals = Sequence[dict[str, Any]]
MOST_KEYS = 4096
"""Rows with more keys than this are not searched."""
OPEN = 1 << 40
"""The end of a range of keys without an end."""


class SequenceWeights:
    """The correct logits, weights and values of one sequence."""

    def __init__(self, call: KernelCall, sequence: BatchSequence, indices: Indices, w: Work):
        self.sequence = sequence
        k, self.v = oracle.gather(w, PLAIN, indices, sequence)
        self.heads = oracle.kv_head(w)
        keys = k.shape[0]
        visible = oracle.visibility(w, sequence, keys)
        seen = visible.any(0)[:, None, None]
        k, self.v = torch.where(seen, k, 0.0), torch.where(seen, self.v, 0.0)
        self.q = w.call.q[sequence.first : sequence.first + sequence.q_len].cpu().double() * (w.call.q_scale or 1.0)
        self.raw, self.work = oracle.products(self.q * call.scale, k, self.heads), w
        self.added = torch.zeros(()).masked_fill(~visible, -torch.inf) + oracle.bias(w, sequence, keys)
        self.logits = oracle.capped(w, self.raw) + self.added
        self.visible = visible
        self.sinks = None if call.sinks is None else call.sinks.cpu().double()

    def weights(self, query: int, head: int, factor: float = 1.0) -> tuple[torch.Tensor, float]:
        """Unnormalised weights of the keys for one query and head, and that of the sink; scores are multiplied by `factor`."""
        logits = self.logits[head, query]
        if factor != 1.0:
            raw = self.raw[head, query] * factor
            logits = oracle.capped(self.work, raw) + (self.added[head, query] if self.added.dim() == 3 else self.added[query])
        top = logits.max()
        if self.sinks is not None:
            top = torch.maximum(top, self.sinks[head])
        return torch.exp(logits - top), 0.0 if self.sinks is None else float(torch.exp(self.sinks[head] - top))

    def values(self, head: int) -> torch.Tensor:
        return self.v[:, int(self.heads[head])]


def wrong_rows(observed: Observation) -> torch.Tensor:
    """Rows with an element beyond its budget, the largest error first."""
    live = observed.call.live
    if not live:
        return torch.zeros(0, dtype=torch.long)
    worst = observed.error_ratios.amax((1, 2))
    order = worst.argsort(descending=True)
    return order[worst[order] > 1]


def wrong_heads(observed: Observation, row: int) -> torch.Tensor:
    worst = observed.error_ratios[row].amax(-1)
    return worst.argsort(descending=True)


def sequences(call: KernelCall) -> tuple[list[BatchSequence], Indices, Work]:
    w = Work(call)
    indices = oracle.read(w)
    return oracle.sequences(w, indices), indices, w


def weights_of_row(observed: Observation, row: int) -> tuple[SequenceWeights, int] | None:
    """The sequence of a row of q, and the index of the query in it; None if it has too many keys."""
    known: dict[int, SequenceWeights] = observed.call.memo.setdefault("sequence weights", {})
    for r in sequences(observed.call)[0]:
        if r.first <= row < r.first + r.q_len:
            if r.kv_len > MOST_KEYS:
                return None
            if r.seq not in known:
                _, indices, w = sequences(observed.call)
                known[r.seq] = SequenceWeights(observed.call, r, indices, w)
            return known[r.seq], row - r.first
    return None


def _output(observed: Observation, row: int, head: int) -> torch.Tensor:
    """The output of one head, in the units of the values."""
    return observed.call.out[row, head].cpu().double() * (observed.call.out_scale or 1.0)


def _budget(observed: Observation, row: int, head: int) -> torch.Tensor:
    return observed.expected.budget[row, head] * (observed.call.out_scale or 1.0)


def _single_missing_keys(observed: Observation, row: int, head: int) -> list[int]:
    """Keys whose absence explains the output of one head, the best first."""
    found = weights_of_row(observed, row)
    if found is None:
        return []
    sequence_weights, query = found
    e, extra = sequence_weights.weights(query, head)
    v = sequence_weights.values(head)
    total = e.sum() + extra
    whole = e @ v
    without = (whole[None, :] - e[:, None] * v) / (total - e)[:, None]
    off = ((without - _output(observed, row, head)) / _budget(observed, row, head)).abs().amax(-1).nan_to_num(torch.inf, torch.inf)
    off = off.masked_fill(e == 0, torch.inf)
    order = off.argsort()[:3]
    return [int(j) for j in order if float(off[j]) <= 4]


def _missing(observed: Observation) -> list[tuple[BatchSequence, int, int]]:
    """(sequence, query, key) for some wrong rows whose output is explained by one missing key."""
    found = []
    for row in wrong_rows(observed)[:6].tolist():
        for head in wrong_heads(observed, row)[:2].tolist():
            place = weights_of_row(observed, row)
            for key in _single_missing_keys(observed, row, head)[:2]:
                assert place is not None
                found.append((place[0].sequence, place[1], key))
    return found


def missing_token(observed: Observation) -> Proposals:
    return [{"position": j} for j in dict.fromkeys(key for _, _, key in _missing(observed))]


def missing_from_end(observed: Observation) -> Proposals:
    return [{"back": n} for n in dict.fromkeys(row.kv_len - key for row, _, key in _missing(observed)) if n > 1]


def missing_at_distance(observed: Observation) -> Proposals:
    return [{"distance": n} for n in dict.fromkeys(row.context + query - key for row, query, key in _missing(observed)) if n > 0]


def _runs(observed: Observation, sign: float) -> Proposals:
    """Ranges of keys whose weight is missing (sign -1) or doubled (+1), from the rows with the largest errors."""
    found: dict[tuple[int, int], None] = {}
    for row in wrong_rows(observed)[:4].tolist():
        place = weights_of_row(observed, row)
        if place is None:
            continue
        sequence_weights, query = place
        head = int(wrong_heads(observed, row)[0])
        e, extra = sequence_weights.weights(query, head)
        v = sequence_weights.values(head)
        n, size = e.numel(), observed.call.page_size
        sums = torch.cat((torch.zeros(1, v.shape[1], dtype=v.dtype), (e[:, None] * v).cumsum(0)))
        mass = torch.cat((torch.zeros(1, dtype=e.dtype), e.cumsum(0)))
        edges = sorted({*range(0, n, size), *(range(0, n, 16) if n <= 1024 else ()), n, *(range(n + 1) if n <= 160 else ())})
        ends = torch.tensor(edges)
        if ends.numel() > 400:
            ends = torch.tensor([edge for edge in edges if edge % max(size, 64) == 0 or edge == n])
        first, last = torch.triu_indices(ends.numel(), ends.numel(), 1)
        lo, hi = ends[first], ends[last]
        left = (mass[-1] + extra + sign * (mass[hi] - mass[lo]))[:, None]
        # A row without keys is zero.
        out = torch.where(left > 1e-12 * mass[-1], (sums[-1] + sign * (sums[hi] - sums[lo])) / left, 0.0)
        off = ((out - _output(observed, row, head)) / _budget(observed, row, head)).abs().amax(-1).nan_to_num(torch.inf, torch.inf)
        order = off.argsort()[:200]
        good = [int(i) for i in order if float(off[i]) <= 2]
        if not good:
            continue
        # Keys without weight leave the ends undetermined: whole pages first, then the shortest and the longest range.
        pairs = [(int(lo[i]), int(hi[i])) for i in good]
        # A range that ends with this sequence may extend further in longer ones.
        pairs += [(a, OPEN) for a, b in pairs if b == n]
        pairs.sort(key=lambda p: (p[0] % size != 0, p[1] % size != 0 and p[1] < OPEN, p[1] - p[0]))
        for pair in [*pairs[:4], min(pairs, key=lambda p: p[1] - p[0]), max(pairs, key=lambda p: p[1] - p[0])]:
            found[pair] = None
    return [{"first": a, "last": b} for a, b in found]


def missing_keys(observed: Observation) -> Proposals:
    return _runs(observed, -1.0)


def doubled_keys(observed: Observation) -> Proposals:
    return _runs(observed, 1.0)


def score_factor(observed: Observation) -> Proposals:
    """One factor of all scores, fitted to one head of one wrong row."""
    rows = wrong_rows(observed)
    place = weights_of_row(observed, int(rows[0])) if rows.numel() else None
    if place is None:
        return []
    row, (sequence_weights, query) = int(rows[0]), place
    head = int(wrong_heads(observed, row)[0])
    v, got = sequence_weights.values(head), _output(observed, row, head)

    def off(factor: float) -> float:
        e, extra = sequence_weights.weights(query, head, factor)
        return float(((e @ v) / (e.sum() + extra) - got).abs().sum().nan_to_num(torch.inf))

    best = min((2.0 ** (n / 4) for n in range(-24, 25)), key=off)
    low, high = best / 1.25, best * 1.25
    for _ in range(40):
        a, b = low + (high - low) * 0.382, low + (high - low) * 0.618
        low, high = (low, b) if off(a) < off(b) else (a, high)
    return [{"factor": round((low + high) / 2, 5)}]


def head_map(observed: Observation) -> Proposals:
    """The kv head that best explains each query head."""
    call = observed.call
    if call.kv_heads > 16:
        return []
    from quire.conformance.oracle.budget import truth

    off = []
    live = call.live
    for g in range(call.kv_heads):
        stages = PLAIN.replace(kv_head=lambda w, g=g: torch.full((call.q_heads,), g))
        off.append(ratios(call.out.cpu(), call.unwritten().cpu(), truth(call, stages, (1e-9, 0.0)), live).amax((0, 2)))
    # Relative distances are sufficient to choose; the whole call is predicted afterwards.
    return [{"heads": torch.stack(off).argmin(0).tolist()}] if live else []


def pool(call: KernelCall) -> list[int]:
    """Pages with contents."""
    if call.pages <= 4096:
        return list(range(call.pages))
    return sorted({int(page) for page in call.page_table.flatten() if 0 <= int(page) < call.pages})


def cells(owned: bool) -> Callable[[Observation], Proposals]:
    """Entries of the page table that were read as another page: one of a sequence (`owned`), or a free one."""

    def solve(observed: Observation) -> Proposals:
        call = observed.call
        rows, indices, w = sequences(call)
        used: set[int] = set()
        for r in rows:
            used |= {int(p) for p in indices.table[r.seq, : -(-r.kv_len // call.page_size)]}
        pages = [p for p in pool(call) if (p in used) == owned]
        if not pages or len(pages) > 512:
            return []
        found: dict[tuple[int, int], int] = {}
        wrong = wrong_rows(observed)
        for r in rows:
            wrong_rows_of_sequence = [row for row in wrong.tolist() if r.first <= row < r.first + r.q_len]
            if not wrong_rows_of_sequence:
                continue
            best = _cell(observed, wrong_rows_of_sequence[0], pages, w)
            if best is None:
                return []
            found[(r.seq, best[0])] = best[1]
        return [{"cells": found}] if found else []

    return solve


def _cell(observed: Observation, row: int, pages: list[int], w: Work) -> tuple[int, int] | None:
    """The column of the table, and the page read there, that explain one wrong row."""
    place = weights_of_row(observed, row)
    if place is None or observed.call.mask is not None:
        return None
    for head in wrong_heads(observed, row)[:4].tolist():
        found = _cell_of_head(observed, row, head, *place, pages, w)
        if found is None:
            return None
        # If missing keys of the correct page explain the output as well, there is no evidence for another page.
        column, page, needed = found
        if needed:
            return column, page
    return None


def _cell_of_head(
    observed: Observation, row: int, head: int, sequence_weights: SequenceWeights, query: int, pages: list[int], w: Work
) -> tuple[int, int, bool] | None:
    """The column and the page that explain one head of a row, and whether missing keys do not explain it as well."""
    size, n = observed.call.page_size, sequence_weights.logits.shape[-1]
    cached = n if observed.call.new is None else max(sequence_weights.sequence.context, 0)
    page = torch.tensor(pages).repeat_interleave(size)
    offset = torch.arange(size).repeat(len(pages))
    k = oracle.decode(w, "k", oracle.load(w, "k", oracle.address(w, "k", page, offset)), page, offset)
    v = oracle.decode(w, "v", oracle.load(w, "v", oracle.address(w, "v", page, offset)), page, offset)[
        :, int(sequence_weights.heads[head])
    ]
    logit = oracle.score(w, sequence_weights.q[query : query + 1], k, sequence_weights.heads)[head, 0].view(len(pages), size)
    logits = sequence_weights.logits[head, query]
    top = max(float(logits.max()), float(logit.nan_to_num(-1e30).max()))
    extra = 0.0 if sequence_weights.sinks is None else float(torch.exp(sequence_weights.sinks[head] - top))
    e = torch.exp(logits - top)
    added = sequence_weights.added[head, query] if sequence_weights.added.dim() == 3 else sequence_weights.added[query]
    values = sequence_weights.values(head)
    got, budget = _output(observed, row, head), _budget(observed, row, head)
    best: tuple[float, int, int, bool] | None = None
    for column in range(-(-cached // size)):
        keys = slice(column * size, min((column + 1) * size, cached))
        visible = sequence_weights.visible[query, keys]
        count = visible.numel()
        if not bool(visible.any()):
            continue
        weight = torch.exp(logit[:, :count] + added[keys] - top)
        rest, left = e @ values - e[keys] @ values[keys], e.sum() - e[keys].sum() + extra
        out = rest + torch.einsum("ps,psd->pd", weight, v.view(len(pages), size, -1)[:, :count])
        # The last candidate is no page at all.
        out = torch.cat((out / (left + weight.sum(1))[:, None], (rest / left)[None]))
        off = ((out - got) / budget).abs().amax(-1).nan_to_num(torch.inf, torch.inf)
        i = int(off[:-1].argmin())
        if best is None or float(off[i]) < best[0]:
            best = float(off[i]), column, pages[i], float(off[-1]) > 4
    return None if best is None or best[0] > 4 else best[1:]


def unwritten_rows(observed: Observation) -> Proposals:
    bare = observed.call.unwritten()[: observed.call.live].all(-1).all(-1)
    return [{"rows": bare.nonzero().flatten().tolist()}] if bool(bare.any()) else []


def unwritten_elements(observed: Observation) -> Proposals:
    """Heads or dims that were not written."""
    bare = observed.call.unwritten()[: observed.call.live].cpu()
    found: list[dict[str, Any]] = []
    for name, axes in (("heads", (0, 2)), ("dims", (0, 1))):
        some = bare.any(axes[1]).any(axes[0]).nonzero().flatten().tolist()
        if 0 < len(some) < bare.shape[1 if name == "heads" else 2]:
            found.append({"heads": some, "dims": None} if name == "heads" else {"heads": None, "dims": some})
    return found


def zero_rows(observed: Observation) -> Proposals:
    out = observed.call.out[: observed.call.live].cpu().double()
    wrong = wrong_rows(observed)
    rows = [row for row in sorted(wrong.tolist()) if bool((out[row] == 0).all())]
    return [{"rows": rows}] if rows else []


def row_map(observed: Observation) -> Proposals:
    """For each wrong row the row whose result it contains, if most of those rows are wrong too; otherwise nothing was exchanged."""
    out, right = observed.call.out[: observed.call.live].cpu().double(), observed.expected
    if out.shape[0] > 512:
        return []
    rows = list(range(out.shape[0]))
    wrong = wrong_rows(observed).tolist()
    for row in wrong:
        off = ((right.outcome.out[: out.shape[0]] - out[row]) / right.budget[: out.shape[0]]).abs().amax((1, 2))
        best = int(off.nan_to_num(torch.inf).argmin())
        if not float(off[best]) <= 2:
            return []
        rows[row] = best
    lost = sum(rows[row] in wrong for row in wrong)
    return [{"rows": rows}] if rows != list(range(len(rows))) and 2 * lost > len(wrong) else []


def head_order(observed: Observation) -> Proposals:
    """For each head the head whose result it contains."""
    live = observed.call.live
    out, right = observed.call.out[:live].cpu().double(), observed.expected
    heads = []
    for h in range(out.shape[1]):
        off = ((right.outcome.out[:live] - out[:, h : h + 1]) / right.budget[:live]).abs().amax((0, 2)).nan_to_num(torch.inf)
        heads.append(int(off.argmin()))
    return [{"heads": heads}] if heads != list(range(len(heads))) else []


def dim_order(observed: Observation) -> Proposals:
    live = observed.call.live
    out, right = observed.call.out[:live].cpu().double(), observed.expected.outcome.out[:live]
    if not live or out.shape[2] > 256:
        return []
    spread = [(right - out[..., d : d + 1]).abs().nan_to_num(1e30).mean((0, 1)) for d in range(out.shape[2])]
    dims = [int(s.argmin()) for s in spread]
    return [{"dims": dims}] if dims != list(range(len(dims))) else []


def out_factor(observed: Observation) -> Proposals:
    live = observed.call.live
    out, right = observed.call.out[:live].cpu().double(), observed.expected.outcome.out[:live]
    keep = observed.expected.outcome.written[:live]
    fits = float((out * right)[keep].nan_to_num(0.0, 0.0, 0.0).sum() / (right * right)[keep].sum().clamp(min=1e-30))
    found = [{"factor": round(fits, 6)}]
    # If some outputs overflowed, the factor follows from the others.
    plain = (out / right)[keep & (right.abs() > observed.expected.budget[:live] * 8)]
    if plain.numel():
        found.append({"factor": float(f"{float(plain.nan_to_num(0.0).median()):.4g}")})
    return [p for p in found if p["factor"] not in (0.0, 1.0)]


def head_factors(observed: Observation) -> Proposals:
    live = observed.call.live
    out, right = observed.call.out[:live].cpu().double(), observed.expected.outcome.out[:live]
    fits = (out * right).nan_to_num(0.0, 0.0, 0.0).sum((0, 2)) / (right * right).sum((0, 2)).clamp(min=1e-30)
    return [{"factors": [round(float(f), 6) for f in fits]}]
