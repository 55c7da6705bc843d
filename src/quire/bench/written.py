"""Writes that rotate: one launch or two, and what a write of any kind must have stored."""

from __future__ import annotations

import torch

from quire.bench.bound import BoundImplementation
from quire.bench.case import BenchCase
from quire.cache.kv_cache import KVCache
from quire.write import write


def own_rotation(case: BenchCase) -> BoundImplementation:
    """`quire.write` with RoPE: queries and keys are rotated, keys and values stored in one launch."""
    rope, q_out = case.rope, torch.full_like(case.q, torch.nan)
    assert rope is not None

    def run() -> torch.Tensor:
        write(case.k, case.v, case.cache, case.batch, rope=rope, q=case.q, q_out=q_out)
        return case.cache.k

    return BoundImplementation(run, case.workload.dtype, lambda: rotated_difference(case, q_out))


def own_in_two_launches(case: BenchCase) -> BoundImplementation | None:
    """The same in two launches of `quire.write`: the first rotates queries and keys, and stores keys and values in order and in
    their own type; the second stores them in the cache."""
    rope = case.rope
    if rope is None:
        return None
    q_out, both = torch.full_like(case.q, torch.nan), torch.empty_like(torch.stack((case.k, case.v)))
    aside = KVCache.wrap(both[0][:, None], both[1][:, None], layout="nhd")
    in_order = torch.arange(len(case.k), dtype=torch.int32, device=case.k.device)
    positions = case.batch.positions_of_tokens(len(case.k)).int()

    def run() -> torch.Tensor:
        write(case.k, case.v, aside, slots=in_order, rope=rope, q=case.q, q_out=q_out, positions=positions)
        write(both[0], both[1], case.cache, case.batch)
        return case.cache.k

    return BoundImplementation(run, case.workload.dtype, lambda: rotated_difference(case, q_out))


def stored_difference(case: BenchCase) -> float:
    """The largest difference of what is stored from the new tokens, in units of the format."""
    worst = 0.0
    for (x, scale, got), format in zip(_stored(case), (case.cache.k_format, case.cache.v_format)):
        want = format.quantise(x, scale)
        worst = max(worst, float((got.float() - want.float()).abs().max()), key=_nan_first)
    return worst


def rotated_difference(case: BenchCase, q_out: torch.Tensor, q_scale: float | None = None) -> float:
    """By how much an element that a rotation wrote exceeds what rounding explains: one rounding to the type of k and one to that in
    which it is stored. With a scale, the queries are divided by it."""
    assert case.rope is not None
    at = case.batch.positions_of_tokens(len(case.k))
    found = [(_rotated(case, case.k, at), _stored(case)[0]), (case.v.double(), _stored(case)[1])]
    pairs = [(x, 1.0 if scale is None else float(scale), got) for x, (_, scale, got) in found]
    pairs.append((_rotated(case, case.q, at), q_scale or 1.0, q_out))
    worst = 0.0
    for exact, scale, got in pairs:
        want, kinds = exact / scale, (torch.finfo(got.dtype), torch.finfo(case.k.dtype))
        allowed = sum(want.abs() * kind.eps / 2 + kind.smallest_normal * kind.eps / 2 for kind in kinds)
        # fp32 arithmetic, and elements of a pair that cancel out.
        largest = want.abs().amax(-1, keepdim=True)
        over = (got.double() - want).abs() - allowed * 1.01 - largest * 2.0**-20
        worst = max(worst, float(over.max().clamp(min=0.0)), key=_nan_first)
    return worst


def _rotated(case: BenchCase, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Heads `[tokens, heads, head_dim]` rotated in float64, the halves of a head being pairs."""
    assert case.rope is not None
    cos, sin = (table.double()[at][:, None] for table in (case.rope.cos, case.rope.sin))
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _stored(case: BenchCase) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """For K and V: the new tokens, the scale, and what is stored in their slots."""
    cache, slots = case.cache, case.batch.given_slots
    assert slots is not None
    both = ((case.k, cache.k_scale, cache.k_bytes, cache.k_format), (case.v, cache.v_scale, cache.v_bytes, cache.v_format))
    return [(x, scale, pages.flatten(0, 1)[slots].view(format.dtype)) for x, scale, pages, format in both]


def _nan_first(error: float) -> float:
    return float("inf") if error != error else error
