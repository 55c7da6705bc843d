"""Steps that only decode, as captured graphs: one graph of all layers for each padded number of sequences, as engines have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.batch import Batch
from quire.bench.stream.implementations import StreamImplementation
from quire.bench.stream.replay import EagerRunner
from quire.bench.stream.setup import Planned, Setup, StreamLayers
from quire.bench.stream.trace import Step

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of sequences that have a graph. A step takes the next larger one; the sequences left over are empty."""

Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


@dataclass
class Captured:
    """The graph of one size, with the buffers that it reads and writes."""

    size: int
    batch: Batch
    rows: torch.Tensor
    outs: list[torch.Tensor]
    layers: StreamLayers
    replay: Callable[[], torch.Tensor]


def capture_all(setup: Setup, implementation: StreamImplementation, capture: Capture) -> list[Captured]:
    """A graph for each size that the trace needs, smallest first."""
    most = max((len(step.sequences) for step in setup.trace.steps if step.decode_only), default=0)
    sizes = [size for i, size in enumerate(SIZES) if i == 0 or SIZES[i - 1] < most] if most else []
    return [_capture(setup, implementation, capture, size) for size in sizes]


def _capture(setup: Setup, implementation: StreamImplementation, capture: Capture, size: int) -> Captured:
    per_row = max(entry.new for step in setup.trace.steps if step.decode_only for entry in step.sequences)
    tokens, model = size * per_row, setup.model
    width = -(-setup.max_kv_len // model.page_size)
    width += -width % 8
    batch = Batch.allocate(size, width, tokens, max_q_len=per_row, max_kv_len=setup.max_kv_len, device=setup.device)
    layers = implementation(setup, batch)
    rows = setup.fused[: tokens + model.layers].clone()
    if rows.shape[0] < tokens + model.layers:  # the largest graph has more rows than the trace
        rows = setup.fused.new_zeros(tokens + model.layers, *setup.fused.shape[1:])
    outs = [setup.fused.new_full((tokens, model.q_heads, model.head_dim), torch.nan) for _ in range(model.layers)]
    captured = Captured(size, batch, rows, outs, layers, lambda: outs[-1])
    # Any plan of this size will do: what is captured reads tables and lengths from the buffers.
    slots = torch.full((tokens,), -1, device=setup.device) if layers.is_peer else None
    _plan(captured, Planned(_full(setup, size, per_row), [per_row] * size, [per_row] * size, slots))

    def run() -> torch.Tensor:
        for layer, out in enumerate(outs):
            q, k, v = setup.split(rows[layer : layer + tokens])
            layers.run(layer, q, k, v, out)
        return outs[-1]

    captured.replay = capture(run)
    return captured


def _full(setup: Setup, size: int, per_row: int) -> Batch:
    """As many sequences as a graph has, each with its new tokens and nothing before them."""
    device, pages = setup.device, -(-per_row // setup.model.page_size)
    table = torch.zeros(size, pages, dtype=torch.int32, device=device)
    starts = torch.arange(size + 1, dtype=torch.int32, device=device) * per_row
    return Batch(table, torch.full((size,), per_row, dtype=torch.int32, device=device), starts)


def _plan(captured: Captured, planned: Planned) -> None:
    """Puts a step into the buffers of a graph and plans it there. The lengths are padded as the batch is."""
    batch, left_over = planned.batch, captured.size - len(planned.q_lens)
    captured.batch.fill(batch.page_table, batch.kv_lens, batch.q_starts, planned.slots)
    if captured.layers.is_peer:
        captured.batch.page_table.clamp_(min=0)  # as `setup.planned` does
    q_lens, kv_lens = ([*lens, *[0] * left_over] for lens in (planned.q_lens, planned.kv_lens))
    captured.layers.plan(Planned(captured.batch, q_lens, kv_lens, captured.batch.slots))


class GraphRunner:
    """Graphs for the steps that only decode, one call after the other for all others. A step with copy-on-write is one of those:
    its copies are no part of a graph."""

    def __init__(self, setup: Setup, layers: StreamLayers, graphs: list[Captured]):
        self.eager, self.graphs, self.setup = EagerRunner(setup, layers), graphs, setup
        self.active: Captured | None = None
        self.replayed = 0

    @property
    def is_peer(self) -> bool:
        return self.eager.is_peer

    def plan(self, step: Step, planned: Planned) -> None:
        fits = (graph for graph in self.graphs if graph.size >= len(step.sequences))
        self.active = next(fits, None) if step.decode_only and not planned.batch.copies else None
        if self.active is None:
            self.eager.plan(step, planned)
        else:
            _plan(self.active, planned)

    def launch(self, start: int, tokens: int) -> list[torch.Tensor]:
        if self.active is None:
            return self.eager.launch(start, tokens)
        count = tokens + self.setup.model.layers
        self.active.rows[:count].copy_(self.setup.fused[start : start + count])
        self.active.replay()
        self.replayed += 1
        return self.active.outs
