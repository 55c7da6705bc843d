"""Verifies a run on the host, in float64 and without pages, in two ways:

    outputs   every output of every layer and step, against `quire.reference` over the dense keys and values that the engine stored
    tokens    every token of every request, against the same model run for that request alone with dense attention

The tolerances are derived from the types: see `allowed_error` and `MODEL_TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from quire import reference
from quire.cache.format import FORMATS
from quire.contract.picture import row_picture
from quire.demo.engine import DemoEngine, OutputRecord
from quire.demo.model import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, Q_HEADS, DemoModel
from quire.demo.requests import DemoRequest, DenseCache
from quire.demo.sampling import distance, pick
from quire.options import Options

MODEL_TOLERANCE = 3 * len(LAYERS) * HIDDEN * torch.finfo(torch.float32).eps
"""The maximum relative difference of two correct runs of the model: three matrix products per layer, each a sum of at most HIDDEN
terms rounded to fp32."""


class Comparison(NamedTuple):
    """A comparison of values with the expected ones: the error that is largest relative to its tolerance."""

    values: int
    error: float
    allowed: float
    where: str = ""
    """A description of the error with a picture; empty if it is within the tolerance."""

    @property
    def used(self) -> float:
        """The error relative to the tolerance; above 1 is wrong."""
        return self.error / self.allowed

    def __str__(self) -> str:
        return f"largest error {self.error:.2g}, allowed {self.allowed:.2g}"


class Verification(NamedTuple):
    """The summary of all comparisons."""

    compared: int
    worst: Comparison
    where: str
    """The first error; empty if there is none."""

    @property
    def holds(self) -> bool:
        return self.compared > 0 and self.worst.used <= 1

    @classmethod
    def of(cls, comparisons: Iterable[Comparison]) -> Verification:
        every = list(comparisons)
        worst = max(every, key=lambda c: c.used, default=Comparison(0, 0.0, 1.0))
        return cls(sum(c.values for c in every), worst, next((c.where for c in every if c.where), ""))


def outputs(engine: DemoEngine) -> Iterator[Comparison]:
    """Compares the output of each sequence in each layer and step with the reference."""
    for record in engine.records:
        q, out = record.q.cpu(), record.out.cpu().double()
        k, v = (as_stored(x[: record.kv_len], record.layer) for x in record.dense.read(record.layer))
        # The same weights over v and over |v|: the second is the size of the terms of the sum.
        both = attention(q, k, torch.cat((v, v.abs()), -1), engine.model.options[record.layer])
        want, size = both.chunk(2, dim=-1)
        error, allowed = (out - want).abs().nan_to_num(math.inf, math.inf), allowed_error(q, k, want, size)
        at = int((error / allowed).argmax())
        where = _picture(record, error, allowed) if bool((error > allowed).any()) else ""
        yield Comparison(out.numel(), float(error.flatten()[at]), float(allowed.flatten()[at]), where)


def allowed_error(q: torch.Tensor, k: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The error bound of fp32 arithmetic for each element of an output, for any order of summation.

    A score is a sum of head_dim products, so its error is at most (head_dim + a few) roundings of |q||k|, and the relative error of
    its weight is as large. The two sums over the keys add kv_len roundings. These errors are relative to `size`, the sum of
    weight * |v|. Then the output is rounded once to its own type."""
    rounding = torch.finfo(torch.float32).eps
    largest_score = q.double().norm(dim=-1) * k.norm(dim=-1).amax(0).repeat_interleave(Q_HEADS // KV_HEADS) * HEAD_DIM**-0.5
    relative = rounding * ((HEAD_DIM + 8) * largest_score + k.shape[0] + 16)
    return relative[..., None] * size + torch.finfo(q.dtype).eps / 2 * want.abs() + torch.finfo(q.dtype).tiny


def tokens(engine: DemoEngine) -> Iterator[Comparison]:
    """Runs each request again, alone and dense, and compares its keys, values, logits and sampled tokens.

    One pass over all tokens of a request is enough: if each token sampled from its logits is the generated one, then by induction
    the request alone generates the same tokens. Keys and values are compared before they are rounded to the cache's format, and
    those of
    the run are used for later layers: a last bit that rounds differently is not an error."""
    model = engine.model.to("cpu").to(torch.float64)
    for request in engine.requests:
        for dense in dict.fromkeys(choice.dense for choice in request.choices):
            yield from _alone(model, request, dense)


def _alone(model: DemoModel, request: DemoRequest, dense: DenseCache) -> Iterator[Comparison]:
    """One pass over the tokens of a dense cache. A request that was preempted has several."""
    found = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept = [x[: dense.length] for x in dense.read(layer)]
        for name, then, now in zip(("keys", "values"), kept, (k, v)):
            found.append(_difference(then, now, f"request {request.name}: its {name} of layer {layer}"))
        return attention(q, as_stored(kept[0], layer), as_stored(kept[1], layer), model.options[layer])

    known = torch.tensor(request.tokens[: dense.length], device="cpu")
    logits = model.forward(known, torch.arange(len(known), device="cpu"), attend)
    yield from found
    for i, choice in enumerate(request.choices):
        if choice.dense is dense:
            position = len(request.prompt) + i
            mine, made, name = logits[position - 1], request.made[i], f"request {request.name}, token {i}"
            yield _difference(choice.logits, mine, f"{name}: its logits")
            size = float(mine.abs().max())
            error = distance(made, mine, request.sampling, position) / size
            where = f"{name}: {chr(made)!r} was sampled, alone it samples {chr(pick(mine, request.sampling, position))!r}"
            yield Comparison(1, error, MODEL_TOLERANCE, where if error > MODEL_TOLERANCE else "")


def _difference(then: torch.Tensor, now: torch.Tensor, name: str) -> Comparison:
    error = float((then.cpu() - now).abs().max().nan_to_num(math.inf, math.inf) / now.abs().max())
    where = (
        f"{name} differ by a relative {error:.2g} from those of the request alone, allowed {MODEL_TOLERANCE:.2g}"
        if error > MODEL_TOLERANCE
        else ""
    )
    return Comparison(0, error, MODEL_TOLERANCE, where)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """Dense attention of one sequence, by the reference."""
    sinks = None if options.sinks is None else options.sinks.cpu()
    out: torch.Tensor = reference.attention(q, k, v, window=options.sides, scale=options.scale, sinks=sinks)[0]
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


def _picture(record: OutputRecord, error: torch.Tensor, allowed: torch.Tensor) -> str:
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
