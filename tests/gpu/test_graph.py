"""Clause 10: a graph is captured once; lengths, tables and data change in place, rows become prefills and decodes; each replay is
right."""

from __future__ import annotations

from collections.abc import Callable

import torch

import quire
from gpu.calls import GUARD, every, needs_gpu
from gpu.sequences import DIM, GROUP, KV_HEADS, Sequences, Step, is_correct

pytestmark = needs_gpu

SEQS, PAGES, TOKENS = 5, 8, 64
STEPS: list[dict[int, int]] = [
    {0: 40, 1: 1, 2: 5},
    {2: 1, 0: 1, 1: 50},
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    {4: 60},
    {3: 0, 0: 1, 2: 0, 4: 1},
    {1: 33, 3: 20, 4: 1},
    {3: 1},
]
"""New tokens by sequence: as many rows as there are entries, others are left over."""


class Buffers:
    """What a graph reads and writes."""

    def __init__(self, kernel: str, seed: int):
        self.sequences = Sequences(SEQS, PAGES, seed)
        self.batch = quire.Batch.allocate(SEQS, PAGES, TOKENS, max_q_len=16 if kernel == "triton-decode" else None, device="cuda")
        self.q = torch.full((TOKENS, KV_HEADS * GROUP, DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
        self.k, self.v = (torch.full((TOKENS, KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.out = torch.full_like(self.q, GUARD)

    def take(self, step: Step) -> None:
        for mine, theirs in ((self.q, step.q), (self.k, step.k), (self.v, step.v)):
            mine.copy_(theirs)
        self.batch.fill(step.table, step.kv_lens, step.q_starts)
        self.out.fill_(GUARD)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Captured while the batch is empty: nothing of the lengths can be in the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@every
def test_attend(kernel: str) -> None:
    mine = Buffers(kernel, 1)
    graph = capture(lambda: quire.attend(mine.q, mine.sequences.cache, mine.batch, out=mine.out, kernel=kernel))
    for number, q_lens in enumerate(STEPS):
        step = mine.sequences.step(q_lens, TOKENS)
        mine.sequences.store()
        mine.take(step)
        graph.replay()
        assert is_correct(step, mine.out), f"replay {number}, {q_lens}"
        assert (mine.out[step.expected.shape[0] :] == GUARD).all(), "a padding row was written"


@every
def test_step(kernel: str) -> None:
    mine = Buffers(kernel, 2)
    graph = capture(lambda: quire.step(mine.q, mine.k, mine.v, mine.sequences.cache, mine.batch, out=mine.out, kernel=kernel))
    for number, q_lens in enumerate(STEPS):
        step = mine.sequences.step(q_lens, TOKENS)
        mine.take(step)
        graph.replay()
        assert is_correct(step, mine.out), f"replay {number}, {q_lens}"
    held = [pages.clone() for pages in (mine.sequences.cache.k, mine.sequences.cache.v)]
    mine.sequences.store()
    for before, pages in zip(held, (mine.sequences.cache.k, mine.sequences.cache.v)):
        assert torch.equal(before.view(torch.int16), pages.view(torch.int16)), "the cache holds something else than was written"


def test_outputs_of_the_graph_s_own() -> None:
    """An output and an LSE that the captured call made: both are filled anew, padding rows with zeros."""
    mine = Buffers("triton-mixed", 3)
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    graph = capture(lambda: made.append(quire.attend(mine.q, mine.sequences.cache, mine.batch, lse=True)))
    out, lse = made[-1]
    for q_lens in STEPS:
        step = mine.sequences.step(q_lens, TOKENS)
        mine.sequences.store()
        mine.take(step)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        live = step.expected.shape[0]
        assert is_correct(step, out)
        assert lse[:live].isfinite().all()
        assert (out[live:] == 0).all() and (lse[live:] == 0).all()


def test_two_graphs_do_not_share_memory() -> None:
    """Replayed at once on two streams, again and again: both are right."""
    buffers = [Buffers("triton-mixed", seed) for seed in (4, 5)]
    graphs = [
        capture(lambda mine=mine: quire.attend(mine.q, mine.sequences.cache, mine.batch, out=mine.out))  # type: ignore[misc]
        for mine in buffers
    ]
    streams = [torch.cuda.Stream() for _ in buffers]
    for q_lens in STEPS[:3]:
        steps = [mine.sequences.step(q_lens, TOKENS) for mine in buffers]
        for mine, step in zip(buffers, steps):
            mine.sequences.store()
            mine.take(step)
        torch.cuda.synchronize()
        for _ in range(20):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for mine, step in zip(buffers, steps):
            assert is_correct(step, mine.out)
