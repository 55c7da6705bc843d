"""Two proofs that a run was right, made on the host, in float64, without a page.

    outputs   every output of every layer and step, against `quire.reference` over the keys and values that the engine kept aside
    tokens    every token of every request, against the same model run for that request alone with dense attention

What may differ is derived from the types, not tuned: see `allowed_error` and `SWAY`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from quire import reference
from quire.cache.format import FORMATS
from quire.contract.picture import row_picture
from quire.demo.engine import Engine, Record
from quire.demo.model import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, Q_HEADS, Model
from quire.demo.requests import Book, Request
from quire.demo.sampling import distance, pick
from quire.options import Options

SWAY = 3 * len(LAYERS) * HIDDEN * torch.finfo(torch.float32).eps
"""How far two right ways to run the model may differ, relative to the largest value: three products a layer, each a sum of at
most HIDDEN terms that fp32 rounds."""


class Comparison(NamedTuple):
    """Some values against what they should be: the one that came nearest to its allowance, or went farthest beyond."""

    values: int
    error: float
    allowed: float
    where: str = ""
    """What is wrong there, with a picture; empty if nothing is."""

    @property
    def used(self) -> float:
        """The share of the allowance that was used; above 1 is wrong."""
        return self.error / self.allowed

    def __str__(self) -> str:
        return f"off by {self.error:.2g} where {self.allowed:.2g} is allowed"


class Proof(NamedTuple):
    """What all comparisons say together."""

    compared: int
    worst: Comparison
    where: str
    """The first thing that is wrong; empty if nothing is."""

    @property
    def holds(self) -> bool:
        return self.compared > 0 and self.worst.used <= 1

    @classmethod
    def of(cls, comparisons: Iterable[Comparison]) -> Proof:
        every = list(comparisons)
        worst = max(every, key=lambda c: c.used, default=Comparison(0, 0.0, 1.0))
        return cls(sum(c.values for c in every), worst, next((c.where for c in every if c.where), ""))


def outputs(engine: Engine) -> Iterator[Comparison]:
    """What attention gave each sequence in each layer and step, against the definition."""
    for record in engine.records:
        q, out = record.q.cpu(), record.out.cpu().double()
        k, v = (as_stored(x[: record.kv_len], record.layer) for x in record.book.read(record.layer))
        # The same weights over v and over |v|: the second says how large the terms of the sum are.
        both = attention(q, k, torch.cat((v, v.abs()), -1), engine.model.options[record.layer])
        want, size = both.chunk(2, dim=-1)
        error, allowed = (out - want).abs().nan_to_num(math.inf, math.inf), allowed_error(q, k, want, size)
        at = int((error / allowed).argmax())
        where = _picture(record, error, allowed) if bool((error > allowed).any()) else ""
        yield Comparison(out.numel(), float(error.flatten()[at]), float(allowed.flatten()[at]), where)


def allowed_error(q: torch.Tensor, k: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """What fp32 arithmetic may lose, in any order of summation, for each element of an output.

    A score is a sum of head_dim products, so it is off by at most (head_dim + a few) roundings of |q||k|, and the weight made from
    it by as much relatively; the two sums over the keys add kv_len roundings. All of that scales the terms that are summed,
    `size` = sum of weight * |v|. Then the output is rounded once to its own type."""
    rounding = torch.finfo(torch.float32).eps
    loudest = q.double().norm(dim=-1) * k.norm(dim=-1).amax(0).repeat_interleave(Q_HEADS // KV_HEADS) * HEAD_DIM**-0.5
    relative = rounding * ((HEAD_DIM + 8) * loudest + k.shape[0] + 16)
    return relative[..., None] * size + torch.finfo(q.dtype).eps / 2 * want.abs() + torch.finfo(q.dtype).tiny


def tokens(engine: Engine) -> Iterator[Comparison]:
    """Each request again, alone and densely: its keys, values and logits, and the tokens picked from them.

    One pass over all tokens of a request does: if each pick from its logits is the token that was made, then by induction the
    request alone makes the same tokens one by one. Keys and values are compared as they were before rounding to the cache's
    format, and those of the run are used from there on: a last bit that falls the other way is not a fault."""
    model = engine.model.to("cpu").to(torch.float64)
    for request in engine.requests:
        for book in dict.fromkeys(choice.book for choice in request.choices):
            yield from _alone(model, request, book)


def _alone(model: Model, request: Request, book: Book) -> Iterator[Comparison]:
    """One pass over the tokens in a book. A request that had to start again has several books."""
    found = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept = [x[: book.length] for x in book.read(layer)]
        for name, then, now in zip(("keys", "values"), kept, (k, v)):
            found.append(_sway(then, now, f"request {request.name}: its {name} of layer {layer}"))
        return attention(q, as_stored(kept[0], layer), as_stored(kept[1], layer), model.options[layer])

    known = torch.tensor(request.tokens[: book.length], device="cpu")
    logits = model.forward(known, torch.arange(len(known), device="cpu"), attend)
    yield from found
    for i, choice in enumerate(request.choices):
        if choice.book is book:
            position = len(request.prompt) + i
            mine, made, name = logits[position - 1], request.made[i], f"request {request.name}, token {i}"
            yield _sway(choice.logits, mine, f"{name}: its logits")
            size = float(mine.abs().max())
            error = distance(made, mine, request.taste, position) / size
            where = f"{name}: {chr(made)!r} was made, alone it makes {chr(pick(mine, request.taste, position))!r}"
            yield Comparison(1, error, SWAY, where if error > SWAY else "")


def _sway(then: torch.Tensor, now: torch.Tensor, name: str) -> Comparison:
    error = float((then.cpu() - now).abs().max().nan_to_num(math.inf, math.inf) / now.abs().max())
    where = f"{name} differ by {error:.2g} of their size from those it has alone, allowed {SWAY:.2g}" if error > SWAY else ""
    return Comparison(0, error, SWAY, where)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """Dense attention of one sequence, by the definition."""
    sinks = None if options.sinks is None else options.sinks.cpu()
    out: torch.Tensor = reference.attention(q, k, v, window=options.sides, softcap=options.softcap, sinks=sinks)[0]
    return out


def as_stored(x: torch.Tensor, layer: int) -> torch.Tensor:
    """Keys or values `[tokens, kv_heads, head_dim]` as a reader of the layer's cache sees them: rounded to its format."""
    format = FORMATS[LAYERS[layer].format]
    x = x.cpu().float()
    if format.largest is None:
        return x.to(format.dtype).double()
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / format.largest)
    return (x / scale).clamp(-format.largest, format.largest).to(format.dtype).double() * scale.double()


def _picture(record: Record, error: torch.Tensor, allowed: torch.Tensor) -> str:
    """The worst token's error in each head, the worst head marked."""
    token, head, dim = (int(i) for i in torch.unravel_index((error / allowed).argmax(), error.shape))
    position = record.kv_len - error.shape[0] + token
    wrong = int((error > allowed).flatten(1).any(1).sum())
    cells = [f"{float(e):.1e}" for e in error[token].amax(-1)]
    note = f"dim {dim}: off by {float(error[token, head, dim]):.2g}, allowed {float(allowed[token, head, dim]):.2g}"
    return "\n".join(
        (
            f"[output] step {record.step}, layer {record.layer} ({LAYERS[record.layer].summary}), request {record.request.name}: "
            f"{wrong} of {error.shape[0]} tokens wrong, the worst at position {position}, head {head}",
            row_picture("largest error by head", cells, head, note),
        )
    )
