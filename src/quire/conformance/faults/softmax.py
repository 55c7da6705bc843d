"""Faults of the softmax: normalisation, splits, sums, and the LSE."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from quire.conformance import exact as x
from quire.conformance.call import Call
from quire.conformance.exact import PLAIN, Outcome, Part, Stages, Work
from quire.conformance.faults.fault import Fault
from quire.conformance.faults.stages import TILES, finished


def _weigh(change: Any) -> Stages:
    return PLAIN.replace(weigh=change)


def _not_normalised(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
    part = x.weigh(w, logits, v, heads)
    top = logits.amax(-1) if logits.shape[-1] else logits.new_zeros(logits.shape[:2])
    total = torch.exp(part.lse - top.T).unsqueeze(-1).nan_to_num(0.0)
    return Part(part.out * total, part.lse, part.weighted * total)


def _uniform(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
    return x.weigh(w, torch.where(logits == -torch.inf, logits, 0.0), v, heads)


def _nothing_seen(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
    """Where no key is visible the weights' sum is 0, and 0 / 0 is NaN."""
    part = x.weigh(w, logits, v, heads)
    empty = torch.isneginf(logits).all(-1).T.unsqueeze(-1) if x.sink(w) is None else torch.zeros(())
    return Part(torch.where(empty > 0, torch.nan, part.out), part.lse, part.weighted)


def _sees_nothing(call: Call) -> bool:
    """Whether some query has no key to see, nor a sink."""
    if call.sinks is not None:
        return False
    w = Work(call)
    return any(row.q_len > 0 and not bool(x.see(w, row, max(row.kv_len, 0)).any(1).all()) for row in x.rows(w, x.read(w)))


def _splits(count: int, keys: int) -> list[slice]:
    size = max(-(-keys // count), 1)
    return [slice(a, min(a + size, keys)) for a in range(0, max(keys, 1), size)]


def _parts(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor, count: int) -> list[tuple[Any, Any, Any, Any]]:
    """Each split's largest logit, sum, values and magnitudes, not normalised."""
    found = []
    for keys in _splits(count, logits.shape[-1]):
        s = logits[..., keys]
        top = s.amax(-1, keepdim=True).masked_fill(s.amax(-1, keepdim=True) == -torch.inf, 0.0)
        e = torch.exp(s - top)
        out, weighted = x.mix(e, v[keys], heads)
        found.append((top, e.sum(-1, keepdim=True), out, weighted))
    return found


def _without_max(splits: int) -> Stages:
    """Splits are added up as if each had the same largest logit."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        right = x.weigh(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        parts = _parts(w, logits, v, heads, splits)
        extra = x.sink(w)
        total = sum((p[1] for p in parts), torch.zeros(()))
        if extra is not None:
            total = total + torch.exp(extra - parts[0][0])
        share = torch.where(total > 0, 1.0 / total, 0.0).transpose(0, 1)
        out = sum((p[2] for p in parts), torch.zeros(())) * share
        weighted = sum((p[3] for p in parts), torch.zeros(())) * share
        return Part(out, (parts[0][0] + total.log()).squeeze(-1).T, weighted)

    return _weigh(weigh)


def _averaged(splits: int) -> Stages:
    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        right = x.weigh(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        parts = _parts(w, logits, v, heads, splits)
        outs = [torch.where(p[1] > 0, 1.0 / p[1], 0.0).transpose(0, 1) for p in parts]
        out = sum((p[2] * o for p, o in zip(parts, outs)), torch.zeros(())) / len(parts)
        weighted = sum((p[3] * o for p, o in zip(parts, outs)), torch.zeros(())) / len(parts)
        return Part(out, right.lse, weighted)

    return _weigh(weigh)


def _dropped(splits: int, split: int) -> Stages:
    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        parts = _splits(splits, logits.shape[-1])
        at = split if split >= 0 else len(parts) + split
        if len(parts) > 1 and at < len(parts):
            logits = logits.clone()
            logits[..., parts[at]] = -torch.inf
        return x.weigh(w, logits, v, heads)

    return _weigh(weigh)


def _empty_counted(count: int) -> Stages:
    """Each empty split brings a largest logit of 0 and a sum of 1."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        extra = logits.new_full((*logits.shape[:2], 1), math.log(count))
        return x.weigh(w, torch.cat((logits, extra), -1), torch.cat((v, torch.zeros_like(v[:1]))) if v.shape[0] else
                       v.new_zeros(1, *v.shape[1:]), heads)  # fmt: skip

    return _weigh(weigh)


def coarse(tile: int, online: bool, type: torch.dtype | None = None) -> Stages:
    """The accumulator is rounded to 16 bits after every tile of keys: to the queries' type, or to another."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        right = x.weigh(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        narrow = type or w.call.q.dtype
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
            acc = (acc + x.mix(e, v[a : a + tile], heads)[0]).to(narrow).to(acc.dtype)
            total = total + e.sum(-1, keepdim=True)
        extra = x.sink(w)
        if extra is not None:
            total = total + torch.exp(extra - (running if online else top))
        return Part(acc * torch.where(total > 0, 1.0 / total, 0.0).transpose(0, 1), right.lse, right.weighted)

    return _weigh(weigh)


def _under(tops: Any) -> Stages:
    """Exponentials in fp32 under something else than the largest logit, `tops(logits [q_heads, queries, keys], sink)`."""

    def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
        right = x.weigh(w, logits, v, heads)
        if not logits.shape[-1]:
            return right
        extra = x.sink(w)
        top = tops(logits, logits.new_tensor(-torch.inf) if extra is None else extra)
        top = top.masked_fill(top == -torch.inf, 0.0)
        e = torch.exp(logits - top).float().to(w.number)
        total = e.sum(-1, keepdim=True)
        if extra is not None:
            total = total + torch.exp(extra - top).float().to(w.number)
        share = torch.where(total > 0, 1.0 / total, 0.0).transpose(0, 1)
        out = x.mix(w.rounded(e), w.rounded(v), heads)[0] * share
        # What becomes of an LSE without a finite sum nobody says.
        lse = torch.where(total.isfinite() & (total > 0), top + total.log(), torch.nan).squeeze(-1).T
        return Part(torch.where(total.transpose(0, 1).isfinite(), out, torch.nan), lse, right.weighted)

    return _weigh(weigh)


def _first_tile(tile: int) -> Stages:
    return _under(lambda logits, extra: torch.maximum(logits[..., :tile].amax(-1, keepdim=True), extra))


BEYOND = 110.0
"""No exponential of a logit so far from 0 is a number other than 0 in fp32, with or without its smallest ones."""


def _extremes(call: Call) -> dict[str, float]:
    """How high the largest logits of queries lie, how low, and how far above those of a query's first keys."""
    if "extremes" not in call.memo:
        found = {"high": 0.0, "low": 0.0, "rise": 0.0}

        def weigh(w: Work, logits: torch.Tensor, v: torch.Tensor, heads: torch.Tensor) -> Part:
            extra = x.sink(w)
            if extra is not None:
                logits = torch.cat((extra.expand(*logits.shape[:2], 1), logits), -1)
            if logits.shape[-1]:
                top, first = (part.amax(-1) for part in (logits, logits[..., : TILES[0]]))
                for name, value in (("high", top), ("low", -top), ("rise", top - first)):
                    found[name] = max(found[name], float(value.nan_to_num(0.0, 0.0, 0.0).max()))
            return x.weigh(w, logits[..., -v.shape[0] :], v, heads)

        x.exact(call, _weigh(weigh))
        call.memo["extremes"] = found
    return call.memo["extremes"]


def _sixteen(call: Call) -> bool:
    return call.q.dtype in (torch.float16, torch.bfloat16)


def _lse(change: Any) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.lse = change(w, into)
        return into

    return finished(finish)


def _has_lse(call: Call) -> bool:
    return call.lse is not None


def _lse_without_sink(w: Work, into: Outcome) -> torch.Tensor:
    return x.exact(dataclasses.replace(w.call, sinks=None), number=w.number).lse


def _lse_unscaled(w: Work, into: Outcome) -> torch.Tensor:
    return into.lse / w.call.scale


def _lse_without_log(w: Work, into: Outcome) -> torch.Tensor:
    return into.lse.exp()


SOFTMAX = (
    Fault(
        "not-normalised",
        "softmax",
        "outputs are too large by the sum of the weights",
        "the division at the end is missing",
        lambda: _weigh(_not_normalised),
    ),
    Fault(
        "weights-uniform",
        "softmax",
        "every visible key weighs the same",
        "logits that are zero, or lost",
        lambda: _weigh(_uniform),
    ),
    Fault(
        "nothing-seen-is-nan",
        "softmax",
        "queries that see no key give NaN, not zero",
        "a sum of weights that is 0, and a division by it",
        lambda: _weigh(_nothing_seen),
        _sees_nothing,
        issues=("vLLM 0.24.0 unified_attention, the path for long queries",),
    ),
    Fault(
        "max-not-subtracted",
        "softmax",
        "NaN where logits are large, nothing where all of a query's are very negative; right everywhere else",
        "exponentials of the logits as they are",
        lambda: _under(lambda logits, extra: torch.zeros_like(logits[..., :1])),
        lambda call: max(_extremes(call)["high"], _extremes(call)["low"]) > BEYOND,
    ),
    Fault(
        "max-of-first-tile",
        "softmax",
        "NaN where logits grow along a sequence; right everywhere else",
        "the largest logit is taken once, from the first tile of keys, and never raised",
        lambda tile: _first_tile(tile),
        lambda call: _extremes(call)["rise"] > BEYOND,
        tuple({"tile": n} for n in TILES),
    ),
    Fault(
        "max-starts-at-zero",
        "softmax",
        "nothing where all logits of a query are very negative; right everywhere else",
        "the running maximum starts at 0 instead of minus infinity",
        lambda: _under(lambda logits, extra: torch.maximum(logits.amax(-1, keepdim=True), extra).clamp(min=0.0)),
        lambda call: _extremes(call)["low"] > BEYOND,
    ),
    Fault(
        "split-combined-without-max",
        "softmax",
        "splits weigh wrongly against each other",
        "partial sums are added without bringing them to one largest logit",
        lambda splits: _without_max(splits),
        tries=tuple({"splits": n} for n in (2, 4, 8, 16, 3)),
    ),
    Fault(
        "splits-averaged",
        "softmax",
        "every split weighs the same",
        "partial outputs are averaged instead of weighed by their sums",
        lambda splits: _averaged(splits),
        tries=tuple({"splits": n} for n in (2, 4, 8, 16, 3)),
    ),
    Fault(
        "split-dropped",
        "softmax",
        "a share of the keys of every sequence is missing",
        "the combination runs over one split too few",
        lambda splits, split: _dropped(splits, split),
        tries=tuple({"splits": n, "split": i} for n in (2, 4, 8, 16, 3) for i in (-1, 0, 1)),
    ),
    Fault(
        "empty-split-counted",
        "softmax",
        "outputs are too small, most of all in short sequences",
        "a split without keys leaves a largest logit of 0 and a sum of 1",
        lambda count: _empty_counted(count),
        tries=tuple({"count": n} for n in (1, 2, 3, 4, 7, 8, 15)),
    ),
    Fault(
        "accumulated-in-16-bits",
        "softmax",
        "errors that grow with the length, beyond what 16-bit factors explain",
        "the accumulator has the type of the output",
        lambda tile, online: coarse(tile, online),
        _sixteen,
        tuple({"tile": n, "online": o} for n in (1, 16, 32, 64, 128) for o in (False, True)),
    ),
    Fault(
        "lse-in-base-2",
        "lse",
        "the LSE is too large by 1/ln 2",
        "log2 is faster; whoever merges must know",
        lambda: _lse(lambda w, into: into.lse / math.log(2.0)),
        _has_lse,
        issues=("FlashInfer and FlashMLA use base 2",),
    ),
    Fault(
        "lse-without-sink",
        "lse",
        "the LSE lacks the sink's weight",
        "the sink is put in after the LSE is taken",
        lambda: _lse(_lse_without_sink),
        lambda call: call.lse is not None and call.sinks is not None,
    ),
    Fault(
        "lse-not-scaled",
        "lse",
        "the LSE is too large by 1/scale",
        "the largest logit is kept without its scale",
        lambda: _lse(_lse_unscaled),
        _has_lse,
    ),
    Fault(
        "lse-without-log",
        "lse",
        "the LSE is a sum",
        "the logarithm is missing",
        lambda: _lse(_lse_without_log),
        _has_lse,
    ),
)
