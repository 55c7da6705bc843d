"""The inputs of every implementation of a stream: the model, the trace, the rows of q, k and v, the pages of each layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from quire.batch import Batch
from quire.bench.stream.trace import EngineLimits, Trace, generate
from quire.bench.stream.traffic import TRAFFIC
from quire.cache.format import FORMATS
from quire.cache.kv_cache import KVCache

UNWRITTEN = 64.0
"""What pages hold before anything is written: far from any key, so that reading it is a wrong result. Not NaN, because some peers
multiply what they mask by 0."""
SPARE_ROWS = 1000
"""Rows of q, k and v beyond those of the largest step: each step starts at another one."""


@dataclass(frozen=True)
class StreamModel:
    """The attention layers of a model."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bf16"

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads} heads x {self.head_dim}"
        return f"{self.layers} layers, {heads}, pages of {self.page_size}, {self.dtype}"


@dataclass(frozen=True)
class Spec:
    """Everything that a trace and its replay follow from. JSON both ways, so that another process replays the same."""

    stream: str
    seed: int
    model: StreamModel
    engine: EngineLimits

    def trace(self) -> Trace:
        return generate(TRAFFIC[self.stream], self.engine, self.seed)

    def with_counts(self, layers: int | None = None, steps: int | None = None) -> Spec:
        model = self.model if layers is None else replace(self.model, layers=layers)
        return replace(self, model=model, engine=self.engine if steps is None else replace(self.engine, steps=steps))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        fields = json.loads(text)
        return cls(fields["stream"], fields["seed"], StreamModel(**fields["model"]), EngineLimits(**fields["engine"]))


# vLLM's CPU kernel needs pages of 32, so all implementations have them on a CPU.
DEFAULTS: dict[str, tuple[StreamModel, EngineLimits]] = {
    "cpu": (StreamModel(4, 8, 2, 64, 32), EngineLimits(steps=96, budget=256, sequences=16, capacity=1 << 14, scale=1 / 8)),
    "cuda": (StreamModel(32, 32, 8, 128, 16), EngineLimits(steps=512, budget=2048, sequences=256, capacity=1 << 19)),
}


def default_spec(stream: str, device: str, seed: int = 0) -> Spec:
    return Spec(stream, seed, *DEFAULTS[device])


class Planned(NamedTuple):
    """One step as an implementation plans it. The lengths are what an engine knows on the host."""

    batch: Batch
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    slots: torch.Tensor | None = None
    """The slot of each new token, for peers."""


class StreamLayers(Protocol):
    """An implementation: its plan of a step, made once, and its work of each layer."""

    is_peer: bool
    """Whether it is given slots and a padded table: `planned`."""

    def plan(self, planned: Planned) -> None: ...

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Writes k and v of the new tokens to the pages, then attends."""
        ...


class Setup:
    """The tensors of a replay. Layer `l` of a step that starts at row `s` gets the rows from `s + l` on: no two layers have the
    same input, and nothing is copied."""

    def __init__(self, spec: Spec, device: torch.device | str = "cpu"):
        self.spec, self.model, self.device = spec, spec.model, torch.device(device)
        self.trace = spec.trace()
        model, dtype = spec.model, FORMATS[spec.model.dtype].dtype
        heads = model.q_heads + 2 * model.kv_heads
        values = torch.Generator(self.device).manual_seed(spec.seed)
        rows = self.trace.max_tokens + model.layers + SPARE_ROWS
        fused = torch.randn(rows, heads, model.head_dim, generator=values, device=self.device)
        self.fused = fused.to(dtype)
        """[rows, q_heads + 2 * kv_heads, head_dim], as a fused projection leaves them."""
        self.pages = self.trace.pages(model.page_size)
        shape = (self.pages, model.page_size, model.kv_heads, model.head_dim)
        self.memory = [[torch.empty(shape, dtype=dtype, device=self.device) for _ in "kv"] for _ in range(model.layers)]
        size = (self.trace.max_tokens, model.q_heads, model.head_dim)
        self.outs = [torch.full(size, torch.nan, dtype=dtype, device=self.device) for _ in range(model.layers)]

    @cached_property
    def max_kv_len(self) -> int:
        return self.trace.max_kv_len

    def clear(self) -> None:
        """Overwrites what the implementation before has written."""
        for tensor in (x for pair in self.memory for x in pair):
            tensor.fill_(UNWRITTEN)
        for out in self.outs:
            out.fill_(torch.nan)

    def caches(self) -> list[KVCache]:
        """The pages of each layer. New objects each time: a cache remembers which copies were applied to it."""
        return [KVCache.wrap(k, v, layout="nhd") for k, v in self.memory]

    def start(self, step: int) -> int:
        """Where the rows of a step start."""
        return step * 7919 % SPARE_ROWS

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v of some rows."""
        return rows.split((self.model.q_heads, self.model.kv_heads, self.model.kv_heads), dim=1)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def planned(batch: Batch, q_lens: Sequence[int], kv_lens: Sequence[int], page_size: int, *, for_peer: bool) -> Planned:
    """A step for an implementation. A peer is given the slots of the new tokens and a table that it may read past the end of a row:
    its padding is the id of a page, its width is a multiple of 8."""
    if not for_peer:
        return Planned(batch, q_lens, kv_lens)
    slots = batch.slots_of_tokens(sum(q_lens), page_size)
    table = torch.nn.functional.pad(batch.page_table.clamp(min=0), (0, -batch.page_table.shape[1] % 8))
    longest, most = batch.max_q_len, batch.max_kv_len
    padded = Batch(table, batch.kv_lens, batch.q_starts, copies=batch.copies, max_q_len=longest, max_kv_len=most)
    return Planned(padded, q_lens, kv_lens, slots)
