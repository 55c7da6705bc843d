"""Faults of the softmax: normalisation, the maximum, splits, accumulation and the LSE."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import TILES, finished
from quire.conformance.oracle import exact as oracle
from quire.conformance.oracle.exact import PLAIN, Outcome, SequenceResult, Stages, Work


def _with_softmax(change: Any) -> Stages:
    return PLAIN.replace(softmax=change)


def _not_normalised(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
    part = oracle.softmax(w, logits, v, heads)
    top = logits.amax(-1) if logits.shape[-1] else logits.new_zeros(logits.shape[:2])
    total = torch.exp(part.lse - top.T).unsqueeze(-1).nan_to_num(0.0)
    return SequenceResult(part.out * total, part.lse, part.weighted * total)


def _uniform(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
    return oracle.softmax(w, torch.where(logits == -torch.inf, logits, 0.0), v, heads)


def _nothing_seen(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
    """Without a visible key the sum of the weights is 0, and 0 / 0 is NaN."""
    part = oracle.softmax(w, logits, v, heads)
    empty = torch.isneginf(logits).all(-1).T.unsqueeze(-1) if oracle.sink(w) is None else torch.zeros(())
    return SequenceResult(torch.where(empty > 0, torch.nan, part.out), part.lse, part.weighted)


def _has_query_without_keys(call: KernelCall) -> bool:
    """Whether some query has neither a visible key nor a sink."""
    if call.sinks is not None:
        return False
    w = Work(call)
    return any(
        sequence.q_len > 0 and not bool(oracle.visibility(w, sequence, max(sequence.kv_len, 0)).any(1).all())
        for sequence in oracle.sequences(w, oracle.read(w))
    )


SPLITS: tuple[dict[str, int], ...] = (*({"splits": n} for n in (2, 4, 8, 16, 3)), *({"size": n} for n in (256, 512, 128, 64)))
"""How kernels split the keys of a sequence: into a fixed number of splits, or into splits of a fixed size."""


def _splits(keys: int, splits: int | None, size: int | None) -> list[slice]:
    """The ranges of keys of the splits: `splits` of them, or of `size` keys each."""
    size = size or max(-(-keys // (splits or 1)), 1)
    return [slice(a, min(a + size, keys)) for a in range(0, max(keys, 1), size)]


def _parts(
    logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor, splits: int | None, size: int | None
) -> list[tuple[Any, Any, Any, Any]]:
    """For each split: the maximum, the sum, the weighted values and the weighted magnitudes, not normalised."""
    found = []
    for keys in _splits(logits.shape[-1], splits, size):
        s = logits[..., keys]
        top = s.amax(-1, keepdim=True).masked_fill(s.amax(-1, keepdim=True) == -torch.inf, 0.0)
        e = torch.exp(s - top)
        out, weighted = oracle.weighted_sums(e, v[keys], heads)
        found.append((top, e.sum(-1, keepdim=True), out, weighted))
    return found


def _without_max(splits: int | None = None, size: int | None = None) -> Stages:
    """Splits are added as if all had the same maximum."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        right = oracle.softmax(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        parts = _parts(logits, v, heads, splits, size)
        extra = oracle.sink(w)
        total = sum((p[1] for p in parts), torch.zeros(()))
        if extra is not None:
            total = total + torch.exp(extra - parts[0][0])
        share = torch.where(total > 0, 1.0 / total, 0.0).transpose(0, 1)
        out = sum((p[2] for p in parts), torch.zeros(())) * share
        weighted = sum((p[3] for p in parts), torch.zeros(())) * share
        return SequenceResult(out, (parts[0][0] + total.log()).squeeze(-1).T, weighted)

    return _with_softmax(softmax)


def _averaged(splits: int | None = None, size: int | None = None) -> Stages:
    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        right = oracle.softmax(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        parts = _parts(logits, v, heads, splits, size)
        outs = [torch.where(p[1] > 0, 1.0 / p[1], 0.0).transpose(0, 1) for p in parts]
        out = sum((p[2] * o for p, o in zip(parts, outs)), torch.zeros(())) / len(parts)
        weighted = sum((p[3] * o for p, o in zip(parts, outs)), torch.zeros(())) / len(parts)
        return SequenceResult(out, right.lse, weighted)

    return _with_softmax(softmax)


def _dropped(split: int, splits: int | None = None, size: int | None = None) -> Stages:
    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        parts = _splits(logits.shape[-1], splits, size)
        at = split if split >= 0 else len(parts) + split
        if len(parts) > 1 and at < len(parts):
            logits = logits.clone()
            logits[..., parts[at]] = -torch.inf
        return oracle.softmax(w, logits, v, heads)

    return _with_softmax(softmax)


def _empty_counted(count: int) -> Stages:
    """Each empty split contributes a maximum of 0 and a sum of 1."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        extra = logits.new_full((*logits.shape[:2], 1), math.log(count))
        return oracle.softmax(w, torch.cat((logits, extra), -1), torch.cat((v, v.new_zeros(1, *v.shape[1:]))), heads)

    return _with_softmax(softmax)


def _other_base(splits: int | None = None, size: int | None = None) -> Stages:
    """Splits are weighted by powers of 2 of their maxima, which are natural logits."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        right = oracle.softmax(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        parts = _parts(logits, v, heads, splits, size)
        if len(parts) == 1:
            return right  # without a merge, a wrong LSE has another cause
        top = torch.stack([p[0] for p in parts]).amax(0)
        shares = [torch.exp2(p[0] - top) for p in parts]
        total = sum((s * p[1] for s, p in zip(shares, parts)), torch.zeros(()))
        extra = oracle.sink(w)
        if extra is not None:
            total = total + torch.exp2(extra - top)
        share = torch.where(total > 0, 1.0 / total, 0.0).transpose(0, 1)
        out, weighted = (sum((s.transpose(0, 1) * p[i] for s, p in zip(shares, parts)), torch.zeros(())) * share for i in (2, 3))
        # Where the merge has an effect, the LSE may be in either base, or computed separately: it is not predicted there. Parts
        # with the same maximum have the same weight in every base.
        tops = [torch.where(p[1] > 0, p[0], torch.nan) for p in parts] + ([] if extra is None else [extra.expand(top.shape)])
        changed = (torch.stack(tops).nan_to_num(-torch.inf).amax(0) > torch.stack(tops).nan_to_num(torch.inf).amin(0))[..., 0].T
        return SequenceResult(out, right.lse.masked_fill(changed, torch.nan), weighted)

    return _with_softmax(softmax)


def _not_rescaled(of: str, tile: int, size: int | None = None) -> Stages:
    """When a tile raises the maximum, the accumulator (or the sum) is not rescaled. Each split starts with its own maximum."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        right = oracle.softmax(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        parts = []
        for keys in _splits(logits.shape[-1], None if size else 1, size):
            running = torch.full_like(logits[..., :1], -torch.inf)
            acc, sums = torch.zeros_like(right.out), torch.zeros_like(running)
            for a in range(keys.start, keys.stop, tile):
                part = slice(a, min(a + tile, keys.stop))
                new = torch.maximum(running, logits[..., part].amax(-1, keepdim=True))
                safe = new.masked_fill(new == -torch.inf, 0.0)
                decay, e = torch.exp(running - safe), torch.exp(logits[..., part] - safe)
                acc = acc * (1.0 if of == "accumulator" else decay.transpose(0, 1)) + oracle.weighted_sums(e, v[part], heads)[0]
                sums = sums * (decay if of == "accumulator" else 1.0) + e.sum(-1, keepdim=True)
                running = new
            parts.append((running, sums, acc))
        extra = oracle.sink(w)
        if extra is not None:
            parts.append((extra.expand(parts[0][0].shape), torch.ones_like(parts[0][1]), torch.zeros_like(right.out)))
        top = torch.stack([p[0] for p in parts]).amax(0)
        top = top.masked_fill(top == -torch.inf, 0.0)
        total = sum((torch.exp(p[0] - top) * p[1] for p in parts), torch.zeros(()))
        out = sum((torch.exp(p[0] - top).transpose(0, 1) * p[2] for p in parts), torch.zeros(()))
        share = torch.where(total > 0, 1.0 / total, 0.0)
        lse = (top + total.log()).squeeze(-1).T
        return SequenceResult(out * share.transpose(0, 1), lse, right.weighted.clamp(min=1e-30))

    return _with_softmax(softmax)


def coarse(tile: int, online: bool, type: torch.dtype | None = None) -> Stages:
    """The accumulator is rounded after every tile of keys: to the dtype of the queries, or to another 16-bit type."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        right = oracle.softmax(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        accumulator_type = type or w.call.q.dtype
        acc = torch.zeros_like(right.out)
        total = torch.zeros(*logits.shape[:2], 1, dtype=logits.dtype)
        top = logits.amax(-1, keepdim=True).masked_fill(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
        running = torch.full_like(top, -torch.inf)
        for a in range(0, logits.shape[-1], tile):
            s = logits[..., a : a + tile]
            if online:
                now = torch.maximum(running, s.amax(-1, keepdim=True))
                safe = now.masked_fill(now == -torch.inf, 0.0)
                decay = torch.exp(running - safe)
                acc, total, running = acc * decay.transpose(0, 1), total * decay, now
                e = torch.exp(s - safe)
            else:
                e = torch.exp(s - top)
            acc = (acc + oracle.weighted_sums(e, v[a : a + tile], heads)[0]).to(accumulator_type).to(acc.dtype)
            total = total + e.sum(-1, keepdim=True)
        extra = oracle.sink(w)
        if extra is not None:
            total = total + torch.exp(extra - (running if online else top))
        return SequenceResult(acc * torch.where(total > 0, 1.0 / total, 0.0).transpose(0, 1), right.lse, right.weighted)

    return _with_softmax(softmax)


def _with_maximum(tops: Any) -> Stages:
    """fp32 exponentials relative to `tops(logits [q_heads, queries, keys], sink)` instead of the maximum."""

    def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
        right = oracle.softmax(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        extra = oracle.sink(w)
        top = tops(logits, logits.new_tensor(-torch.inf) if extra is None else extra)
        top = top.masked_fill(top == -torch.inf, 0.0)
        e = torch.exp(logits - top).float().to(w.number)
        total = e.sum(-1, keepdim=True)
        if extra is not None:
            total = total + torch.exp(extra - top).float().to(w.number)
        share = torch.where(total > 0, 1.0 / total, 0.0).transpose(0, 1)
        out = oracle.weighted_sums(w.rounded(e), w.rounded(v), heads)[0] * share
        # Without a finite sum, the LSE is not predicted.
        lse = torch.where(total.isfinite() & (total > 0), top + total.log(), torch.nan).squeeze(-1).T
        return SequenceResult(torch.where(total.transpose(0, 1).isfinite(), out, torch.nan), lse, right.weighted)

    return _with_softmax(softmax)


def _first_tile(tile: int) -> Stages:
    return _with_maximum(lambda logits, extra: torch.maximum(logits[..., :tile].amax(-1, keepdim=True), extra))


BEYOND = 110.0
"""The exponential of a logit farther from 0 than this overflows, or is 0 even with subnormal numbers, in fp32."""


def _extremes(call: KernelCall) -> dict[str, float]:
    """Over all queries: the highest maximum, the lowest maximum, and the largest rise from the first tile's maximum to it."""
    if "extremes" not in call.memo:
        found = {"high": 0.0, "low": 0.0, "rise": 0.0}

        def softmax(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> SequenceResult:
            extra = oracle.sink(w)
            if extra is not None:
                logits = torch.cat((extra.expand(*logits.shape[:2], 1), logits), -1)
            if logits.shape[-1]:
                top, first = (part.amax(-1) for part in (logits, logits[..., : TILES[0]]))
                for name, value in (("high", top), ("low", -top), ("rise", top - first)):
                    found[name] = max(found[name], float(value.nan_to_num(0.0, 0.0, 0.0).max()))
            return oracle.softmax(w, logits[..., logits.shape[-1] - v.shape[0] :], v, heads)

        oracle.exact(call, _with_softmax(softmax))
        call.memo["extremes"] = found
    return call.memo["extremes"]


def _sixteen(call: KernelCall) -> bool:
    return call.q.dtype in (torch.float16, torch.bfloat16)


def _lse(change: Any) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.lse = change(w, into)
        return into

    return finished(finish)


def _has_lse(call: KernelCall) -> bool:
    return call.lse is not None


def _lse_without_sink(w: Work, into: Outcome) -> torch.Tensor:
    return oracle.exact(dataclasses.replace(w.call, sinks=None), number=w.number).lse


def _lse_unscaled(w: Work, into: Outcome) -> torch.Tensor:
    return into.lse / w.call.scale


def _lse_without_log(w: Work, into: Outcome) -> torch.Tensor:
    return into.lse.exp()


SOFTMAX = (
    Fault(
        "not-normalised",
        "softmax",
        "outputs are too large by the sum of the weights",
        "the final division is missing",
        lambda: _with_softmax(_not_normalised),
    ),
    Fault(
        "weights-uniform",
        "softmax",
        "all visible keys have the same weight",
        "logits are zero or lost",
        lambda: _with_softmax(_uniform),
    ),
    Fault(
        "nothing-seen-is-nan",
        "softmax",
        "queries without a visible key give NaN instead of zero",
        "a division by a sum of weights that is 0",
        lambda: _with_softmax(_nothing_seen),
        _has_query_without_keys,
        issues=("vLLM 0.24.0 unified_attention, the path for long queries",),
    ),
    Fault(
        "max-not-subtracted",
        "softmax",
        "NaN where logits are large, zero where all logits of a query are very negative; correct elsewhere",
        "exponentials are computed without subtracting the maximum",
        lambda: _with_maximum(lambda logits, extra: torch.zeros_like(logits[..., :1])),
        lambda call: max(_extremes(call)["high"], _extremes(call)["low"]) > BEYOND,
    ),
    Fault(
        "max-of-first-tile",
        "softmax",
        "NaN where logits increase along a sequence; correct elsewhere",
        "the maximum is taken from the first tile of keys and never updated",
        lambda tile: _first_tile(tile),
        lambda call: _extremes(call)["rise"] > BEYOND,
        tuple({"tile": n} for n in TILES),
    ),
    Fault(
        "max-starts-at-zero",
        "softmax",
        "zero where all logits of a query are very negative; correct elsewhere",
        "the running maximum starts at 0 instead of -inf",
        lambda: _with_maximum(lambda logits, extra: torch.maximum(logits.amax(-1, keepdim=True), extra).clamp(min=0.0)),
        lambda call: _extremes(call)["low"] > BEYOND,
    ),
    Fault(
        "split-combined-without-max",
        "softmax",
        "splits have wrong weights relative to each other",
        "partial sums are added without rescaling them to a common maximum",
        _without_max,
        tries=SPLITS,
    ),
    Fault(
        "splits-averaged",
        "softmax",
        "every split has the same weight",
        "partial outputs are averaged instead of weighted by their sums",
        _averaged,
        tries=SPLITS,
    ),
    Fault(
        "split-dropped",
        "softmax",
        "one split of the keys of every sequence is missing",
        "the merge runs over one split too few",
        _dropped,
        tries=tuple({**how, "split": i} for how in SPLITS for i in (-1, 0, 1)),
    ),
    Fault(
        "split-merged-in-another-base",
        "softmax",
        "splits are weighted too evenly, or too unevenly, relative to each other",
        "maxima of natural logits are merged with exp2, or the reverse",
        _other_base,
        tries=SPLITS,
    ),
    Fault(
        "accumulator-not-rescaled",
        "softmax",
        "keys before a larger logit have too much weight",
        "online softmax: when a tile raises the maximum, the accumulator or the sum is not rescaled",
        _not_rescaled,
        lambda call: int(call.kv_lens.max() if call.kv_lens.numel() else 0) > 8,
        tuple(
            {"of": of, "tile": tile, **how}
            for tile in TILES
            for of in ("accumulator", "sum")
            for how in ({}, {"size": 256}, {"size": 512})
            if tile < 256
        ),
    ),
    Fault(
        "empty-split-counted",
        "softmax",
        "outputs are too small, most of all in short sequences",
        "a split without keys contributes a maximum of 0 and a sum of 1",
        lambda count: _empty_counted(count),
        tries=tuple({"count": n} for n in (1, 2, 3, 4, 7, 8, 15)),
    ),
    Fault(
        "accumulated-in-16-bits",
        "softmax",
        "errors grow with the length, beyond what the rounding of 16-bit factors explains",
        "the accumulator has the dtype of the output",
        lambda tile, online: coarse(tile, online),
        _sixteen,
        tuple({"tile": n, "online": o} for n in (1, 16, 32, 64, 128) for o in (False, True)),
    ),
    Fault(
        "lse-in-base-2",
        "lse",
        "the LSE is too large by the factor 1/ln 2",
        "the kernel returns log2, and the caller expects the natural logarithm",
        lambda: _lse(lambda w, into: into.lse / math.log(2.0)),
        _has_lse,
        issues=("FlashInfer and FlashMLA use base 2",),
    ),
    Fault(
        "lse-without-sink",
        "lse",
        "the LSE does not include the sink",
        "the sink is added after the LSE is computed",
        lambda: _lse(_lse_without_sink),
        lambda call: call.lse is not None and call.sinks is not None,
    ),
    Fault(
        "lse-not-scaled",
        "lse",
        "the LSE is too large by the factor 1/scale",
        "the LSE is computed from logits without the scale",
        lambda: _lse(_lse_unscaled),
        _has_lse,
    ),
    Fault(
        "lse-without-log",
        "lse",
        "the LSE is the sum of the exponentials",
        "the logarithm is missing",
        lambda: _lse(_lse_without_log),
        _has_lse,
    ),
)
