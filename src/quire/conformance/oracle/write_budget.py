"""Compares what a write left in the cache with what it should be: every bit that no token is stored to, and every number within its
budget, which is half a step of the format and the error that the number may have before it is rounded."""

from __future__ import annotations

import math

import torch

from quire.conformance.cases.formats import (
    E2M1,
    GROUP,
    INTEGERS,
    LARGEST_SCALE,
    PACK,
    SCALE_FORMAT,
    SMALLEST,
    TYPES,
    encode_groups,
    numbers_of_codes,
    numbers_of_scales,
    pairs,
)
from quire.conformance.cases.write_call import WriteCall
from quire.conformance.oracle.exact import nibbles, signed
from quire.conformance.oracle.write import StoredPart, WriteOutcome, WriteWork

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def half_step(format: str, magnitude: torch.Tensor) -> torch.Tensor:
    """Half the distance of two neighbours of a format near a magnitude."""
    if format in INTEGERS:
        return torch.full_like(magnitude, 0.5)
    if format in GROUP:
        step, normal = 0.5, 1.0  # e2m1
    else:
        info = torch.finfo(TYPES[format])
        step, normal = info.smallest_normal * info.eps, info.smallest_normal
    exponent = torch.log2(magnitude.clamp(min=normal) / normal).floor()
    return step / 2 * torch.exp2(exponent)


def codes_of(format: str, held: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of each element, and the number that they stand for without any scale, [.., dim]."""
    if format in PACK:
        codes = nibbles(held[..., : dim // 2].repeat_interleave(2, -1))
        return codes.long(), numbers_of_codes(codes) if format in GROUP else signed(codes).double()
    typed = held.view(TYPES[format])
    return typed.view(BITS[typed.element_size()]).long(), typed.double()


def ratios_of_write(call: WriteCall, held: dict[str, torch.Tensor], want: WriteOutcome) -> dict[str, torch.Tensor]:
    """Error divided by budget of everything that a write may change, by what it is: k, v, k_scale, v_scale and q. It is infinite
    where bits changed that must not."""
    found: dict[str, torch.Tensor] = {}
    for part, stored in want.parts.items():
        format, dim = call.case.formats[part], call.case.dims[part]
        (bits, number), (old, _) = (codes_of(format, x[part], dim) for x in (held, call.before))
        found[part] = _ratios(format, bits == old, number, stored, _groups(held[part], dim) if format in GROUP else None)
        if format in GROUP:
            found[part] = torch.maximum(found[part], _ratios_of_groups(held[part], call.before[part], stored, dim))
        if stored.scale is not None:
            name = f"{part}_scale"
            found[name] = _ratios_of_scales(held[name], call.before[name], stored)
    if want.q is not None and want.q_written is not None:
        loss = WriteWork(call).loss(want.q)
        got = held["q"][: call.live]
        off = _over(got.double() - want.q.x, half_step(call.case.q_dtype, want.q.x.abs() + loss) + loss)
        same = _same_bits(got, call.before["q"][: call.live])
        kept = torch.where(same, 0.0, torch.inf)
        found["q"] = torch.where(want.q_written[:, None, None], torch.where(same & (off > 1), torch.inf, off), kept)
    return found


def _over(error: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    return (error.abs() / budget).nan_to_num(math.inf, math.inf, math.inf)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kind = BITS[a.element_size()]
    return a.contiguous().view(kind) == b.contiguous().view(kind)


def _ratios(
    format: str, unchanged: torch.Tensor, number: torch.Tensor, stored: StoredPart, groups: torch.Tensor | None
) -> torch.Tensor:
    value, loss = stored.value, stored.loss
    if groups is not None:
        by = groups.repeat_interleave(GROUP[format], -1).clamp(min=SMALLEST)
        # A quotient beyond the largest code saturates: the scale of its group was rounded down.
        value, loss = (value / by).clamp(-E2M1[-1], E2M1[-1]), loss / by
    off = _over(number - value, half_step(format, value.abs() + loss) + loss)
    off = torch.where(number.isnan() & value.isnan() | (number == value), 0.0, off)
    off = torch.where(stored.written, off, torch.where(unchanged, 0.0, torch.inf))
    return torch.where(stored.free, 0.0, off)


def _groups(held: torch.Tensor, dim: int) -> torch.Tensor:
    return numbers_of_scales(held[..., dim // 2 :])


def _ratios_of_groups(held: torch.Tensor, before: torch.Tensor, stored: StoredPart, dim: int) -> torch.Tensor:
    """The same for the scale of the group of each element: it may be off by one step of its format."""
    assert stored.groups is not None
    got = _groups(held, dim)
    off = _over(got - stored.groups, 2 * half_step(SCALE_FORMAT, stored.groups))
    same = torch.where(_same_bits(held[..., dim // 2 :], before[..., dim // 2 :]), 0.0, torch.inf)
    off = torch.where(stored.groups.isnan(), same, off).repeat_interleave(dim // got.shape[-1], -1)
    return torch.where(stored.free, 0.0, off)


def _ratios_of_scales(held: torch.Tensor, before: torch.Tensor, stored: StoredPart) -> torch.Tensor:
    assert stored.scale is not None and stored.scale_loss is not None
    off = _over(held.double() - stored.scale, stored.scale_loss)
    off = torch.where(stored.scale.isnan(), torch.where(_same_bits(held, before), 0.0, torch.inf), off)
    return torch.where(stored.free[..., 0], 0.0, off)


def put_write(call: WriteCall, want: WriteOutcome) -> None:
    """Writes an outcome to the cache and the queries of a call as a kernel does: rounded once."""
    for part, stored in want.parts.items():
        format, place = call.case.formats[part], call.places[part]
        units = _encoded(format, call.before[part], stored, call.case.dims[part])
        flat = units.view(torch.uint8) if place.flat.dtype is torch.uint8 else units
        place.flat[place.addresses.to(place.flat.device)] = flat.to(place.flat.device)
        scale = call.scales[part]
        if stored.scale is not None and scale is not None:
            inside = call.pages_of >= 0
            new = torch.where(stored.scale.isnan(), call.before[f"{part}_scale"].double(), stored.scale).float()
            scale[call.pages_of[inside].to(scale.device)] = new[inside].to(scale.device)
    if want.q is not None and want.q_written is not None and call.q_out is not None:
        rows = want.q_written.nonzero().flatten()
        call.q_out[rows.to(call.device)] = want.q.x[rows].to(call.q_out.dtype).to(call.device)


def _encoded(format: str, before: torch.Tensor, stored: StoredPart, dim: int) -> torch.Tensor:
    """The storage of the pages after a write, [.., units]."""
    if format not in PACK:
        new = (stored.value.round() if format in INTEGERS else stored.value).to(TYPES[format])
        bits = BITS[new.element_size()]
        return torch.where(stored.written, new.view(bits), before.view(TYPES[format]).view(bits)).view(TYPES[format])
    old = nibbles(before[..., : dim // 2].repeat_interleave(2, -1)).to(torch.uint8)
    if format not in GROUP:
        codes = stored.value.round().to(torch.int16) % 16
        return pairs(torch.where(stored.written, codes.to(torch.uint8), old))
    assert stored.groups is not None
    codes, scales = encode_groups(stored.value.float(), LARGEST_SCALE * E2M1[-1])
    scales = torch.where(stored.groups.isnan(), before[..., dim // 2 :], scales)
    return torch.cat((pairs(torch.where(stored.written, codes, old)), scales), -1)
