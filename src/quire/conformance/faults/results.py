"""Faults of results: softmax, splits, LSE, rows of the output, and how a kernel behaves."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from quire.conformance import exact as x
from quire.conformance.call import Call
from quire.conformance.exact import PLAIN, Indices, Outcome, Part, Row, Stages, Values, Work
from quire.conformance.faults import solve
from quire.conformance.faults.fault import Fault


def _finish(change: Any) -> Stages:
    """Changes the whole result: `change(w, outcome)`."""
    return PLAIN.replace(finish=change)


def _unwritten(rows: list[int]) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.written[rows] = False
        return into

    return _finish(finish)


def _unwritten_elements(heads: list[int] | None, dims: list[int] | None) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        if heads is not None:
            into.written[:, heads] = False
        if dims is not None:
            into.written[:, :, dims] = False
        return into

    return _finish(finish)


def _zero(rows: list[int]) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.out[rows] = 0.0
        return into

    return _finish(finish)


def _moved(index: Any) -> Stages:
    """Elements come from elsewhere: `index(tensor)` for out, weighted and, without the last axis, lse."""

    def finish(w: Work, into: Outcome) -> Outcome:
        live = w.call.live
        for name in ("out", "weighted"):
            tensor = getattr(into, name)
            tensor[:live] = index(tensor[:live].clone())
        return into

    return _finish(finish)


def _factor(factor: Any) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        f = torch.as_tensor(factor, dtype=into.out.dtype).reshape(1, -1, 1)
        into.out, into.weighted = into.out * f, into.weighted * f.abs()
        return into

    return _finish(finish)


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


def _sixteen(call: Call) -> bool:
    return call.q.dtype in (torch.float16, torch.bfloat16)


def _lse(change: Any) -> Stages:
    def finish(w: Work, into: Outcome) -> Outcome:
        into.lse = change(w, into)
        return into

    return _finish(finish)


def _has_lse(call: Call) -> bool:
    return call.lse is not None


def _lse_without_sink(w: Work, into: Outcome) -> torch.Tensor:
    return x.exact(dataclasses.replace(w.call, sinks=None), number=w.number).lse


def _lse_unscaled(w: Work, into: Outcome) -> torch.Tensor:
    return into.lse / w.call.scale


def _lse_without_log(w: Work, into: Outcome) -> torch.Tensor:
    return into.lse.exp()


def nan_leak() -> Stages:
    """Slots of the last page beyond the end get weight 0, and 0 times NaN is NaN."""

    def gather(w: Work, s: Stages, at: Indices, row: Row) -> Values:
        if w.call.new is not None:
            return x.gather(w, s, at, row)
        whole = -(-row.kv_len // w.call.page_size) * w.call.page_size
        return x.gather(w, s, at, row._replace(kv_len=whole))

    def see(w: Work, row: Row, keys: int) -> torch.Tensor:
        visible = x.see(w, row, min(keys, row.kv_len))
        return torch.cat((visible, torch.zeros(row.q_len, max(keys - row.kv_len, 0), dtype=torch.bool)), 1)

    def bias(w: Work, row: Row, keys: int) -> torch.Tensor | float:
        if w.call.alibi is None:
            return 0.0
        q_at = torch.arange(row.context, row.kv_len)
        return -x.slopes(w) * (q_at[:, None] - torch.arange(keys)[None, :]).abs()

    return PLAIN.replace(gather=gather, see=see, bias=bias, keep_unseen=True)


def _last_row(call: Call) -> dict[str, Any]:
    return {"rows": [call.live - 1]}


def _swap_ends(call: Call) -> dict[str, Any]:
    rows = list(range(call.live))
    rows[0], rows[-1] = rows[-1], rows[0]
    return {"rows": rows}


RESULTS = (
    Fault(
        "row-unwritten",
        "output",
        "rows of the output keep what the memory held before",
        "a row that no program takes: skipped by its length, beyond the grid, returned early",
        lambda rows: _unwritten(rows),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.unwritten_rows,
        plant=_last_row,
        issues=("vLLM #28905",),
    ),
    Fault(
        "elements-unwritten",
        "output",
        "some heads or some dims of the output keep what the memory held before",
        "a grid or a vector width that does not divide",
        lambda heads=None, dims=None: _unwritten_elements(heads, dims),
        lambda call: call.live > 0 and call.q_heads > 1,
        tries=(),
        solve=solve.unwritten_elements,
        plant=lambda call: {"heads": [call.q_heads - 1], "dims": None},
        issues=("vLLM reshape_and_cache drops heads when Hk*D/x > 512",),
    ),
    Fault(
        "row-zero",
        "output",
        "rows of the output are zero",
        "a row that is taken for an empty one",
        lambda rows: _zero(rows),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.zero_rows,
        plant=_last_row,
        issues=("FlashInfer #1654", "FlashInfer #3219"),
    ),
    Fault(
        "rows-swapped",
        "output",
        "rows hold each other's results",
        "rows are sorted for balance and not sorted back",
        lambda rows: _moved(lambda t: t[torch.tensor(rows)]),
        lambda call: call.live > 1,
        tries=(),
        solve=solve.row_map,
        plant=_swap_ends,
    ),
    Fault(
        "heads-swapped",
        "output",
        "heads hold each other's results",
        "heads of a group are unpacked in another order than they were packed",
        lambda heads: _moved(lambda t: t[:, torch.tensor(heads)]),
        lambda call: call.q_heads > 1,
        tries=(),
        solve=solve.head_order,
        plant=lambda call: {"heads": list(range(call.q_heads))[::-1]},
    ),
    Fault(
        "dims-moved",
        "output",
        "dims of the output hold each other's results",
        "a vectorised store with another order than the load",
        lambda dims: _moved(lambda t: t[..., torch.tensor(dims)]),
        lambda call: call.out.shape[2] > 1,
        tries=(),
        solve=solve.dim_order,
        plant=lambda call: {"dims": [*range(1, call.out.shape[2]), 0]},
    ),
    Fault(
        "output-off-by-factor",
        "output",
        "every output is too large or too small by one factor",
        "a scale of the output that nobody asked for, or a correction applied twice",
        lambda factor: _factor(factor),
        lambda call: call.live > 0,
        tries=(),
        solve=solve.out_factor,
        plant=lambda call: {"factor": 1.5},
    ),
    Fault(
        "output-off-by-head-factors",
        "output",
        "every head's output is off by a factor of its own",
        "scales per head, applied to the wrong head or where there are none",
        lambda factors: _factor(factors),
        lambda call: call.q_heads > 1,
        tries=(),
        solve=solve.head_factors,
        plant=lambda call: {"factors": [1.0 + 0.25 * h for h in range(call.q_heads)]},
    ),
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
        issues=("vLLM unified_attention, queries without keys",),
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
    Fault(
        "nan-leak",
        "behaviour",
        "NaN where a don't-care slot held NaN, right where it held a number",
        "weight 0 times whatever lies there: masked scores, values that are not",
        None,
        issues=("FlashAttention #1745", "FlashAttention #2374", "FlashInfer #941", "AITER #5401"),
    ),
    Fault(
        "two-runs-differ",
        "behaviour",
        "the same call gives other bits the second time",
        "a race, an atomic sum, memory that was not initialised",
        None,
        issues=("vLLM #39146",),
    ),
    Fault(
        "state-leaks",
        "behaviour",
        "a call gives other bits after another call",
        "a workspace, a counter or a cached plan that one call leaves for the next",
        None,
        issues=("FlashInfer #4014", "TRT-LLM #18769", "rtp-llm #1084"),
    ),
    Fault(
        "writes-outside-output",
        "behaviour",
        "memory before or behind the output changes",
        "a store without a mask",
        None,
        issues=("FlashInfer #3978",),
    ),
    Fault(
        "writes-padding-rows",
        "behaviour",
        "rows of the output that belong to no sequence change",
        "a row that is empty or padding is written all the same",
        None,
        issues=("vLLM Triton decode writes a row for query_len 0",),
    ),
    Fault(
        "changes-inputs",
        "behaviour",
        "a tensor that is only to be read changes",
        "scaling in place, or a cache that is written",
        None,
        issues=("vLLM ref_paged_attn: q *= scale",),
    ),
    Fault(
        "raises",
        "behaviour",
        "an error where an answer was due",
        "a limit that is not declared",
        None,
        issues=("vLLM #39065",),
    ),
)
