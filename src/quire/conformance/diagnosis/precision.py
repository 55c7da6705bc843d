"""Whether a kernel computes in fewer bits than it was given, and in which: by calls whose answer is known to the bit.

An error that fewer bits can make looks like noise, and many things make noise. So three questions are asked, and only a kernel that
gives the very numbers of a narrower type gets that name:

    one key each     its weight is 1, so the output is its value, be it large or tiny. If it is the value rounded to tf32, products
                     are in tf32.
    two keys each    the output is a sum of two values, so that both weights can be read off it: are they those of rounded queries
                     and keys, or are they themselves rounded?
    equal weights    values are whole numbers, every weight is 1, every sum exact in fp32: a sum that is rounded tile by tile
                     to 16 bits gives other numbers, and they can be foretold.

What is found must also be enough to explain the error: an honest kernel with as few bits must be as far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from quire.conformance.cases.build import TYPES
from quire.conformance.cases.call import KernelCall
from quire.conformance.cases.case import Case
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
ALIKE = 0.99
"""The share of elements that must have the foretold bits; a sum in another order may round one otherwise."""

Answer = Callable[[Case], "tuple[KernelCall, Truth] | None"]
"""Puts a case to a target: the call with what it gave, and what is right; None if it cannot be asked that, or fails."""


class Found(NamedTuple):
    fault: str
    parameters: dict[str, Any]
    said: str


def _explains(call: KernelCall, losses: tuple[float, float]) -> bool:
    """Whether an answer is as near as a computation with these losses may be."""
    want = truth(call, losses=losses)
    lse = None if call.lse is None else call.lse.cpu()
    return max(distance(call.out.cpu(), lse, call.unwritten().cpu(), want, call.live)) <= 1


def plain(case: Case, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Case:
    """A case without options, in the same types of numbers, layout and heads."""
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


def products(case: Case, call: KernelCall, ask: Answer) -> Found | None:
    """The type that factors of products are rounded to, given a call with a wrong answer."""
    narrower = NARROWER.get(case.q_dtype, ())
    types = [type for type in narrower if _explains(call, rounding_losses(call, factors=ReducedPrecision(type, "truncated")))]
    if not types:
        return None
    ones = (1,) * ROWS
    one, two = ask(plain(case, ones, ones).replace(data="wide")), ask(plain(case, ones, (2,) * ROWS))
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
    said = f"with one or two keys a sequence it gives the very numbers of {', '.join(of)} in {kind}"
    return Found(f"products-in-{kind}", of, said)


def _narrows(types: list[str]) -> Iterator[ReducedPrecision]:
    return (ReducedPrecision(type, rounding) for type, rounding in product(types, ROUNDINGS))


def _weights(
    call: KernelCall, types: list[str], values: ReducedPrecision | None
) -> tuple[ReducedPrecision | None, ReducedPrecision | None] | None:
    """What scores and weights of rows with two keys are rounded to, none first; None if nothing gives the weights that are seen."""
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
            # The second: keys in tiles of their own. The first one's weight is 1 when it is multiplied, whatever it becomes later.
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


def sums(case: Case, call: KernelCall, ask: Answer) -> Found | None:
    """The 16-bit type that sums are kept in, and the tiles after which they are rounded, given a call with a wrong answer."""
    if case.q_dtype not in NARROWER or max(case.kv_lens, default=0) > LONGEST:
        return None
    done = ask(plain(case, (1, 1), LONG).replace(data="even"))
    if done is None:
        return None
    even, right = done
    got = even.out[: even.live].cpu()
    if float((got == right.outcome.out[: even.live].to(got.dtype)).float().mean()) > ALIKE:
        return None
    w = x.Work(even)
    at, heads = x.read(w), x.kv_head(w)
    # The shorter one first: mostly it is enough to say no.
    rows = [(got[sequence.first], x.gather(w, x.PLAIN, at, sequence).v[:, heads]) for sequence in x.sequences(w, at)]
    for tile, type, backwards, total in product(TILES, ("fp16", "bf16"), (False, True), (False, True)):
        told = ((one, _told(v, tile, TYPES[type], backwards, total)) for one, v in rows)
        alike = all(float((one == other.to(one.dtype)).float().mean()) >= ALIKE for one, other in told)
        if alike and _explains(call, _lost(call, tile, type)):
            said = f"with equal weights it gives the very sums that are rounded to {type} after every {tile} keys"
            return Found("accumulated-in-16-bits", {"tile": tile, "type": type}, said)
    return None


def _told(v: torch.Tensor, tile: int, type: torch.dtype, backwards: bool, total: bool) -> torch.Tensor:
    """The output where all weights are 1 and sums are rounded after every tile; that of the weights too, or not."""
    tiles = list(v.split(tile))
    acc, count = v.new_zeros(v.shape[1:]), v.new_zeros(())
    for part in tiles[::-1] if backwards else tiles:
        acc = (acc + part.sum(0)).to(type).to(v.dtype)
        count = count + part.shape[0]
        count = count.to(type).to(v.dtype) if total else count
    return acc / count


def _lost(call: KernelCall, tile: int, type: str) -> tuple[float, float]:
    """What an honest kernel with such sums may lose."""
    lost, lost_lse = rounding_losses(call)
    right = x.exact(call)
    for online in (False, True):
        rough = x.exact(call, coarse(tile, online, TYPES[type]))
        error = (rough.out - right.out).abs() / right.weighted.clamp(min=1e-30)
        live = torch.where(right.weighted > 0, error, 0.0)[: call.live]
        lost = max(lost, float(live.max()) if live.numel() else 0.0)
    return lost, max(lost_lse, lost)
