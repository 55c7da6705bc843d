"""Detects computation in reduced precision, and in which type, by calls whose result is known to the bit.

The error of reduced precision looks like noise, and noise has many causes. So three calls are made, and a kernel is said to use a
narrower type only if it returns exactly the numbers of that type:

    one key each     its weight is 1, so the output is its value, large or tiny. If that is rounded to tf32, products are in tf32.
    two keys each    the output is a sum of two values, so both weights can be computed from it: either queries and keys are
                     rounded, or the weights are.
    equal weights    values are whole numbers, every weight is 1, every sum is exact in fp32: a sum that is rounded to 16 bits after
                     every tile is a different number, which can be predicted.

What is found must also be enough to explain the error: a straightforward computation in that precision must have as large an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
from quire.conformance.cases.formats import TYPES
from quire.conformance.faults.softmax import coarse
from quire.conformance.oracle import exact as x
from quire.conformance.oracle.budget import Truth, distance, rounding_losses, truth
from quire.conformance.oracle.exact import LOG2E
from quire.conformance.oracle.rounding import ROUNDINGS, ReducedPrecision

NARROWER = {"fp32": ("tf32", "bf16", "fp16"), "fp16": ("bf16",), "bf16": ()}
"""Types that lose something of another. (Within its range fp16 loses nothing of bf16.)"""
TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROWS = 12
LONG, LONGEST = (700, 1500), 4096
MIN_EQUAL_SHARE = 0.99
"""The share of elements that must have the predicted bits; a sum in another order may round one differently."""

RunCase = Callable[[Case], "tuple[KernelCall, Truth] | None"]
"""Runs a case on a target: the call with its result, and the exact result; None if the target cannot run the case, or raises."""


class Found(NamedTuple):
    """A fault of precision with its parameters and the evidence for it."""

    fault: str
    parameters: dict[str, Any]
    evidence: str


def _explains(call: KernelCall, losses: tuple[float, float]) -> bool:
    """Whether the error of a result is at most that of a computation with these losses."""
    want = truth(call, losses=losses)
    lse = None if call.lse is None else call.lse.cpu()
    return max(distance(call.out.cpu(), lse, call.unwritten().cpu(), want, call.live)) <= 1


def plain(case: Case, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Case:
    """A case without options, with the same types, layout and heads."""
    return Case(
        f"{case.name}-bits",
        q_lens,
        kv_lens,
        **{n: getattr(case, n) for n in ("kv_heads", "group", "head_dim", "v_head_dim", "page_size", "layout", "index", "q_dtype")},
        format=case.q_dtype,
        poison="decoy",
        seed=case.seed,
    )


# Products.


def products(case: Case, call: KernelCall, run_case: RunCase) -> Found | None:
    """The type that factors of products are rounded to, given a call with a wrong result."""
    narrower = NARROWER.get(case.q_dtype, ())
    types = [type for type in narrower if _explains(call, rounding_losses(call, factors=ReducedPrecision(type, "truncated")))]
    if not types:
        return None
    ones = (1,) * ROWS
    one, two = run_case(plain(case, ones, ones).replace(data="wide")), run_case(plain(case, ones, (2,) * ROWS))
    if one is None or two is None:
        return None
    lone, right = one
    got, want = lone.out[: lone.live].cpu(), right.outcome.out[: lone.live]
    values: ReducedPrecision | None = None
    if not torch.equal(got, want.to(got.dtype)):
        values = next((n for n in _narrows(types) if torch.equal(got, n(want).to(got.dtype))), None)
        if values is None:
            return None
    found = _weights(two[0], types if values is None else [values.type], values)
    if found is None or (values is None and not any(found)):
        return None
    scores, weights = found
    kind = next(n.type for n in (values, scores, weights) if n is not None)
    parts = {"values": values, "scores": scores, "weights": weights}
    of = {part: n.rounding for part, n in parts.items() if n is not None}
    evidence = f"with one or two keys per sequence it returns exactly the numbers of {', '.join(of)} in {kind}"
    return Found(f"products-in-{kind}", of, evidence)


def _narrows(types: list[str]) -> Iterator[ReducedPrecision]:
    return (ReducedPrecision(type, rounding) for type, rounding in product(types, ROUNDINGS))


def _weights(
    call: KernelCall, types: list[str], values: ReducedPrecision | None
) -> tuple[ReducedPrecision | None, ReducedPrecision | None] | None:
    """What scores and weights of rows with two keys are rounded to, no rounding first; None if nothing gives the actual weights."""
    w = x.Work(call)
    at, heads = x.read(w), x.kv_head(w)
    q, k, seen = [], [], []
    for sequence in x.sequences(w, at):
        keys, v = x.gather(w, x.PLAIN, at, sequence)
        v = (v if values is None else values(v))[:, heads]
        got = call.out[sequence.first].cpu().double()
        fit = [torch.linalg.lstsq(v[:, h].T, got[h, :, None]).solution.flatten() for h in range(call.q_heads)]
        seen.append(torch.stack(fit))
        q.append(call.q[sequence.first].cpu().double())
        k.append(keys[:, heads])
    queries, both, share = torch.stack(q), torch.stack(k), torch.stack(seen)
    noise = torch.finfo(call.out.dtype).eps / 4 if call.out.dtype is not torch.float32 else 2.0**-19

    def fits(scores: tuple[ReducedPrecision, ReducedPrecision, bool] | None, weights: ReducedPrecision | None) -> bool:
        a, b, first = queries, both, 1.0
        if scores is not None:
            first = call.scale * LOG2E if scores[2] else 1.0
            a, b = scores[0](a * first), scores[1](b)
        logits = torch.einsum("rhd,rkhd->rhk", a, b) * (call.scale / first)
        e = torch.exp(logits - logits.amax(-1, keepdim=True))
        ways = [e]
        if weights is not None:
            # The second way: each key is in its own tile. The first one's weight is 1 when it is multiplied, and rescaled later.
            ways = [weights(e), torch.cat((e[..., :1], weights(e[..., 1:])), -1)]
        return any(float((way / by.sum(-1, True) - share).abs().max()) <= noise for way in ways for by in (e, way))

    for weights in (None, *_narrows(types)):
        if fits(None, weights):
            return None, weights
    for kind in types:
        for a, b, before in product(ROUNDINGS, ROUNDINGS, (False, True)):
            for weights in (None, *_narrows([kind])):
                if fits((ReducedPrecision(kind, a), ReducedPrecision(kind, b), before), weights):
                    return ReducedPrecision(kind, a), weights
    return None


# Sums.


def sums(case: Case, call: KernelCall, run_case: RunCase) -> Found | None:
    """The 16-bit type of the accumulator, and the tile after which it is rounded, given a call with a wrong result."""
    if case.q_dtype not in NARROWER or max(case.kv_lens, default=0) > LONGEST:
        return None
    done = run_case(plain(case, (1, 1), LONG).replace(data="even"))
    if done is None:
        return None
    even, right = done
    got = even.out[: even.live].cpu()
    if float((got == right.outcome.out[: even.live].to(got.dtype)).float().mean()) > MIN_EQUAL_SHARE:
        return None
    w = x.Work(even)
    at, heads = x.read(w), x.kv_head(w)
    # The shorter sequence first: it rejects most candidates.
    rows = [(got[sequence.first], x.gather(w, x.PLAIN, at, sequence).v[:, heads]) for sequence in x.sequences(w, at)]
    for tile, type, backwards, total in product(TILES, ("fp16", "bf16"), (False, True), (False, True)):
        predicted = ((one, _predicted_output(v, tile, TYPES[type], backwards, total)) for one, v in rows)
        equal = all(float((one == other.to(one.dtype)).float().mean()) >= MIN_EQUAL_SHARE for one, other in predicted)
        if equal and _explains(call, _lost(call, tile, type)):
            evidence = f"with equal weights it returns exactly the sums that are rounded to {type} after every {tile} keys"
            return Found("accumulated-in-16-bits", {"tile": tile, "type": type}, evidence)
    return None


def _predicted_output(v: torch.Tensor, tile: int, type: torch.dtype, backwards: bool, total: bool) -> torch.Tensor:
    """The output where all weights are 1 and sums are rounded after every tile; with `total`, the sum of weights, too."""
    tiles = list(v.split(tile))
    acc, count = v.new_zeros(v.shape[1:]), v.new_zeros(())
    for part in tiles[::-1] if backwards else tiles:
        acc = (acc + part.sum(0)).to(type).to(v.dtype)
        count = count + part.shape[0]
        count = count.to(type).to(v.dtype) if total else count
    return acc / count


def _lost(call: KernelCall, tile: int, type: str) -> tuple[float, float]:
    """The losses of a straightforward computation with such sums."""
    lost, lost_lse = rounding_losses(call)
    right = x.exact(call)
    for online in (False, True):
        rough = x.exact(call, coarse(tile, online, TYPES[type]))
        error = (rough.out - right.out).abs() / right.weighted.clamp(min=1e-30)
        live = torch.where(right.weighted > 0, error, 0.0)[: call.live]
        lost = max(lost, float(live.max()) if live.numel() else 0.0)
    return lost, max(lost_lse, lost)
