"""What a write leaves in the cache, in float64: a pipeline of named stages. A fault replaces one or more of them.

    positions   the position by which each token is rotated
    norm        RMSNorm of a head
    rotate      the rotation of a head
    turn        the norm, then the rotation
    transform   keys times the Hadamard matrix
    prepare     what is stored of K and of V, and the queries: the stages above, in their order
    divisor     what each head of a token is divided by: its scale
    scales      the scales that are stored, where each token has its own
    quantise    quotients to the range of the format
    slots       the slot of each token, negative to skip it
    locate      the page and the offset of each token
    place       the page, offset, head and dim of each element
    finish      the whole outcome

Every number carries its size, the sum of the magnitudes that it was made of, and the roundings that a kernel may make on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.conformance.cases.formats import GROUP, LARGEST, LARGEST_SCALE, SMALLEST, hadamard, hadamard_matrix
from quire.conformance.cases.write_call import WriteCall

FP32 = 2.0**-24
"""The largest relative error of one rounding in fp32."""
ROUNDINGS = {"norm": 1, "rotate": 3, "transform": 1}
"""How often each stage may round to the type of the new keys. A kernel that rotates in that type rounds the tables, the products
and their sum; one that keeps fp32 rounds less."""


class Rows(NamedTuple):
    """Heads of new tokens, [live, heads, dim]."""

    x: torch.Tensor
    size: torch.Tensor
    """The sum of the magnitudes that each number was made of."""
    roundings: int = 0
    """How often a kernel may have rounded it to the type of the new keys."""


class Divisor(NamedTuple):
    """What heads are divided by before they are stored, in a shape that broadcasts to [live, heads, 1]."""

    value: torch.Tensor
    loss: torch.Tensor | float = 0.0
    """Its relative error, where a kernel computes it."""


class Spots(NamedTuple):
    """Where elements are stored; each broadcasts to [live, heads, dim]."""

    page: torch.Tensor
    offset: torch.Tensor
    head: torch.Tensor
    dim: torch.Tensor


class WriteWork:
    """A write to compute."""

    def __init__(self, call: WriteCall):
        self.call, self.case = call, call.case
        self.parts = tuple(call.places)

    def given(self, part: str) -> Rows:
        """New keys, values or queries as they are passed."""
        tensor = getattr(self.call, part)
        x = tensor[: self.call.live].cpu().double()
        return Rows(x, x.abs())

    @property
    def live_slots(self) -> torch.Tensor:
        return self.call.slots[: self.call.live].cpu().long()

    def has_token_scales(self, part: str) -> bool:
        scale = self.call.scales[part]
        return scale is not None and scale.dim() == 3

    @property
    def unit(self) -> float:
        """The largest relative error of one rounding to the type of the new keys."""
        return float(torch.finfo(self.call.k.dtype).eps) / 2

    def loss(self, rows: Rows) -> torch.Tensor:
        """The error that numbers may have before they are stored."""
        if not rows.roundings:
            return torch.zeros_like(rows.x)
        return (rows.roundings * self.unit + (8 + math.sqrt(self.case.head_dim)) * FP32) * rows.size


# Stages.


def positions(w: WriteWork) -> torch.Tensor:
    """The position by which each token is rotated, [live]."""
    assert w.call.positions is not None
    return w.call.positions[: w.call.live].cpu().long()


def weight_of(w: WriteWork, part: str) -> torch.Tensor | None:
    """The factors of the norm of keys or queries, [head_dim]."""
    weight = getattr(w.call, f"{part}_norm")
    return None if weight is None else weight.cpu().double() + float(w.call.unit_offset)


def norm(w: WriteWork, part: str, rows: Rows) -> Rows:
    weight = weight_of(w, part)
    return rows if weight is None else normalised(rows, weight, w.call.eps)


def normalised(rows: Rows, weight: torch.Tensor, eps: float, over: tuple[int, ...] = (-1,)) -> Rows:
    """RMSNorm over the axes `over`, times the weight."""
    factor = (rows.x.square().mean(over, keepdim=True) + eps).rsqrt()
    return Rows(rows.x * factor * weight, rows.size * factor * weight.abs(), rows.roundings + ROUNDINGS["norm"])


def pairs_of(w: WriteWork, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second element of each pair that is rotated."""
    half = torch.arange(w.case.rotated // 2)
    return (2 * half, 2 * half + 1) if interleaved else (half, half + w.case.rotated // 2)


def rotate(w: WriteWork, part: str, rows: Rows, at: torch.Tensor) -> Rows:
    return rotated(w, rows, at, pairs_of(w, w.call.interleaved))


def rotated(w: WriteWork, rows: Rows, at: torch.Tensor, pairs: tuple[torch.Tensor, torch.Tensor], sign: float = 1.0) -> Rows:
    """The rotation of these pairs of elements by the angles of positions `at`."""
    assert w.call.cos is not None and w.call.sin is not None
    first, second = pairs
    cos, sin = (table.cpu().double()[at.clamp(min=0)][:, None] for table in (w.call.cos, w.call.sin))
    x, size = rows.x.clone(), rows.size.clone()
    a, b = rows.x[..., first], rows.x[..., second]
    x[..., first], x[..., second] = a * cos - sign * b * sin, b * cos + sign * a * sin
    a, b = rows.size[..., first], rows.size[..., second]
    size[..., first], size[..., second] = a * cos.abs() + b * sin.abs(), b * cos.abs() + a * sin.abs()
    return Rows(x, size, rows.roundings + ROUNDINGS["rotate"])


def turn(w: WriteWork, s: WriteStages, part: str, rows: Rows, at: torch.Tensor) -> Rows:
    """Keys or queries, normalised and rotated."""
    return s.rotate(w, part, s.norm(w, part, rows), at)


def transform(w: WriteWork, rows: Rows) -> Rows:
    """Keys times the Hadamard matrix."""
    size = rows.size @ hadamard_matrix(rows.x.shape[-1]).abs()
    return Rows(hadamard(rows.x), size, rows.roundings + ROUNDINGS["transform"])


def prepare(w: WriteWork, s: WriteStages, part: str) -> Rows:
    """What is stored of K or V before it is divided by its scale; the rotated queries."""
    rows = w.given(part)
    if part != "v" and w.case.rotated:
        rows = s.turn(w, s, part, rows, s.positions(w))
    return s.transform(w, rows) if part == "k" and w.call.hadamard else rows


def divisor(w: WriteWork, part: str, rows: Rows) -> Divisor:
    """The scale of each head of each token."""
    scale = w.call.scales[part]
    if scale is None:
        return Divisor(torch.ones(1, 1, 1, dtype=torch.float64))
    if scale.dim() < 3:
        return Divisor(scale.cpu().double().reshape(1, -1, 1))
    largest = rows.x.abs().amax(-1, keepdim=True)
    loss = w.loss(rows).amax(-1, keepdim=True) / largest.clamp(min=1e-30)
    return Divisor(largest / LARGEST[w.case.formats[part]], loss + 4 * FP32)


def scales(w: WriteWork, part: str, divisor: Divisor) -> Divisor | None:
    """The scales that are stored; None if there are none."""
    return divisor if w.has_token_scales(part) else None


def quantise(w: WriteWork, part: str, quotient: torch.Tensor) -> torch.Tensor:
    """Quotients, saturated but not rounded."""
    largest = LARGEST.get(w.case.formats[part])
    return quotient if largest is None else quotient.clamp(-largest, largest)


def slots(w: WriteWork) -> torch.Tensor:
    """The slot of each token, [live]."""
    return w.live_slots


def locate(w: WriteWork, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The page and the offset of each token."""
    size = w.case.page_size
    return slots.div(size, rounding_mode="floor"), slots % size


def place(w: WriteWork, part: str, page: torch.Tensor, offset: torch.Tensor) -> Spots:
    heads, dims = torch.arange(w.case.kv_heads), torch.arange(w.case.dims[part])
    return Spots(page.view(-1, 1, 1), offset.view(-1, 1, 1), heads.view(1, -1, 1), dims.view(1, 1, -1))


@dataclass
class StoredPart:
    """What the pages with contents hold of K or V after a write."""

    value: torch.Tensor
    """[pages, page_size, kv_heads, dim]: the quotients of number and scale, not rounded."""
    loss: torch.Tensor
    """The error that each may have before it is rounded to the format."""
    written: torch.Tensor
    """Which elements are written; all others keep their bits."""
    free: torch.Tensor
    """Elements that several tokens are stored to: each may be the last."""
    scale: torch.Tensor | None = None
    """[pages, page_size, kv_heads]; NaN where none is stored."""
    scale_loss: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    """[pages, page_size, kv_heads, groups]: the scales of groups before they are rounded; NaN where none is stored."""


@dataclass
class WriteOutcome:
    """The result of a write."""

    parts: dict[str, StoredPart]
    q: Rows | None = None
    q_written: torch.Tensor | None = None
    """bool [live]"""


def finish(w: WriteWork, into: WriteOutcome) -> WriteOutcome:
    """The last stage: only faults change the outcome here."""
    return into


@dataclass(frozen=True)
class WriteStages:
    """The stages of a pipeline; the defaults give the correct result."""

    positions: Callable[..., torch.Tensor] = positions
    norm: Callable[..., Rows] = norm
    rotate: Callable[..., Rows] = rotate
    turn: Callable[..., Rows] = turn
    transform: Callable[..., Rows] = transform
    prepare: Callable[..., Rows] = prepare
    divisor: Callable[..., Divisor] = divisor
    scales: Callable[..., Divisor | None] = scales
    quantise: Callable[..., torch.Tensor] = quantise
    slots: Callable[..., torch.Tensor] = slots
    locate: Callable[..., tuple[torch.Tensor, torch.Tensor]] = locate
    place: Callable[..., Spots] = place
    finish: Callable[..., WriteOutcome] = finish

    def replace(self, **changes: object) -> WriteStages:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


RIGHT = WriteStages()


def exact_write(call: WriteCall, stages: WriteStages = RIGHT) -> WriteOutcome:
    """Runs the pipeline. A fault that stores to a page without contents raises an IndexError: it cannot be predicted."""
    w, s = WriteWork(call), stages
    slot = s.slots(w)
    kept = (slot >= 0).nonzero().flatten()
    page, offset = s.locate(w, slot[kept])
    into = WriteOutcome({part: _stored(w, s, part, kept, page, offset) for part in w.parts})
    if call.q is not None:
        into.q = s.prepare(w, s, "q")
        into.q_written = torch.ones(call.live, dtype=torch.bool)
    return s.finish(w, into)


def _stored(w: WriteWork, s: WriteStages, part: str, kept: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> StoredPart:
    rows = s.prepare(w, s, part)
    by = s.divisor(w, part, rows)
    quotient = s.quantise(w, part, rows.x / by.value)
    loss = w.loss(rows) / by.value + (by.loss + (2 * FP32 if w.call.scales[part] is not None else 0.0)) * quotient.abs()
    shape = (w.call.pages_of.numel(), w.case.page_size, w.case.kv_heads, w.case.dims[part])
    spots = s.place(w, part, page, offset)
    spots = Spots(_numbers_of_pages(w, spots.page), *spots[1:])
    address = torch.zeros((), dtype=torch.int64)
    for index, n in zip(spots, shape):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < n:
            raise IndexError("an element beside the pages")
        address = address * n + index
    address = address.expand(kept.numel(), *shape[2:])
    count = torch.bincount(address.flatten(), minlength=math.prod(shape)).view(shape)
    value, lost = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    value.view(-1)[address], lost.view(-1)[address] = quotient[kept], loss.expand_as(quotient)[kept]
    made = StoredPart(value, lost, count > 0, count > 1)
    of_token = s.scales(w, part, by)
    # Scales have a tensor of their own, whose layout does not depend on that of the pages.
    slot = _numbers_of_pages(w, page) * shape[1] + offset
    heads = slot[:, None] * shape[2] + torch.arange(shape[2])
    if w.has_token_scales(part):
        made.scale, made.scale_loss = (torch.full(shape[:3], math.nan, dtype=torch.float64) for _ in range(2))
        if of_token is not None:
            each, lost = (torch.as_tensor(x).expand(w.call.live, shape[2], 1)[kept, :, 0] for x in of_token)
            made.scale.view(-1)[heads], made.scale_loss.view(-1)[heads] = each, (lost + 2 * FP32) * each.abs()
    if w.case.formats[part] in GROUP:
        size = GROUP[w.case.formats[part]]
        groups = (quotient.unflatten(-1, (-1, size)).abs().amax(-1) / 6).clamp(SMALLEST, LARGEST_SCALE)
        made.groups = torch.full((*shape[:3], shape[3] // size), math.nan, dtype=torch.float64)
        made.groups.view(-1, shape[3] // size)[heads] = groups[kept]
    return made


def _numbers_of_pages(w: WriteWork, page: torch.Tensor) -> torch.Tensor:
    """The numbers of pages among those with contents, which are in order."""
    known = w.call.pages_of
    number = torch.searchsorted(known, page.contiguous()).clamp(max=known.numel() - 1)
    if page.numel() and not bool((known[number] == page).all()):
        raise IndexError("a page without contents")
    return number
