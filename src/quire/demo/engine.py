"""A small continuous-batching engine: requests arrive, fork a shared prefix, wait for pages, decode while others prefill, and
finish.

Every step is one mixed batch: each running sequence contributes its next chunk of tokens, which is one token once it decodes. All
attention is `quire.step`, with one cache per layer and one pool for all layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

import quire
from quire.cache.format import FORMATS
from quire.demo.injected_faults import InjectedFault
from quire.demo.model import HEAD_DIM, KV_HEADS, LAYERS, DemoModel
from quire.demo.requests import DemoRequest, DenseCache, SampledFrom
from quire.demo.sampling import pick
from quire.dispatch.decision import Decision

CHUNK, MOST_TOKENS = 40, 96
"""The maximum of new tokens of one sequence in a step, and of all sequences together."""


class OutputRecord(NamedTuple):
    """The output of attention for one sequence in one layer of one step, with its queries and its dense keys and values."""

    step: int
    layer: int
    request: DemoRequest
    q: torch.Tensor
    out: torch.Tensor
    dense: DenseCache
    kv_len: int


class Event(NamedTuple):
    step: int
    text: str


class DemoEngine:
    """One run of the demo. `run` makes the steps; the attributes are for display and verification."""

    def __init__(
        self, model: DemoModel, prefix: DemoRequest, requests: list[DemoRequest], pages: int, fault: InjectedFault | None = None
    ):
        device = model.weights["embed"].device
        self.model, self.prefix, self.requests, self.fault = model, prefix, requests, fault
        self.pool = quire.PagePool(pages, page_size=16, device=device)
        self.caches = [
            quire.KVCache.allocate(
                self.pool,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype=FORMATS[layer.format].dtype,
                layout=layer.layout,
                scales="token" if layer.token_scales else None,
                ledger=True,
            )
            for layer in LAYERS
        ]
        self.waiting: list[DemoRequest] = []
        self.running: list[DemoRequest] = []
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.forks = self.copies = self.waits = self.high_water = 0
        self.records: list[OutputRecord] = []
        self.events: list[Event] = []
        self.decisions: dict[tuple[int, str], tuple[int, Decision]] = {}
        """The number of calls of each kernel in each layer, and its latest decision."""
        self.injected: str | None = None
        """The fault that was injected, and where; None before."""
        self._full = False

    def run(self) -> Iterator[None]:
        """Runs steps until all requests are done; yields after each step."""
        prefix = self.prefix
        prefix.sequence, prefix.state = self.pool.sequence(), "prefill"
        self.running.append(prefix)
        while prefix.state != "done":
            start = time.perf_counter()
            self._arrive()
            self._advance()
            if all(request.state == "done" for request in self.requests):
                self._leave(prefix)
            self.seconds += time.perf_counter() - start
            self.step += 1
            yield

    def _arrive(self) -> None:
        """Admits one waiting request: it forks the prefix. None is admitted after the pool was full, until a request is done."""
        for request in self.requests:
            if request.state == "to come" and request.arrives <= self.step:
                request.state = "waiting"
                self.waiting.append(request)
        if self.waiting and not self._full and self.prefix.state == "held":
            assert self.prefix.sequence is not None
            request = self.waiting.pop(0)
            request.sequence, request.state = self.pool.fork(self.prefix.sequence), "prefill"
            request.dense = DenseCache(self.prefix.dense)
            self.running.append(request)
            self.forks += 1
            self._log(f"request {request.name} forks the prefix: {request.length} tokens are already computed")

    def _advance(self) -> None:
        """One step: allocate pages, run the model on all new tokens, sample the next ones."""
        if not self.running:
            return
        plan = self._plan()
        batch = self._allocate(plan)
        self.high_water = max(self.high_water, self.pool.pages - self.pool.free_pages)
        self.copies += len(batch.copies)
        for source, target in batch.copies:
            self._log(f"page {source} is shared: copied to page {target} before it is written")
        tokens: list[int] = []
        positions: list[int] = []
        rows: dict[DemoRequest, slice] = {}
        for request, count in plan.items():
            first = request.length - count
            tokens += request.tokens[first : first + count]
            positions += range(first, first + count)
            rows[request] = slice(len(tokens) - count, len(tokens))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attend(layer, q, k, v, batch, rows)

        device = self.pool.device
        logits = self.model.forward(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), attend)
        self.tokens += len(tokens)
        for request, row in rows.items():
            if request.length == len(request.tokens):
                self._pick(request, logits[row.stop - 1])

    def _plan(self) -> dict[DemoRequest, int]:
        """The number of new tokens of each running request, the oldest first."""
        plan, budget = {}, MOST_TOKENS
        for request in self.running:
            count = min(len(request.tokens) - request.length, CHUNK, budget)
            if count:
                plan[request] = count
                budget -= count
        return plan

    def _allocate(self, plan: dict[DemoRequest, int]) -> quire.Batch:
        """Allocates pages for the plan. If there are too few, the newest request is preempted: it waits and starts again later."""
        while True:
            try:
                return self.pool.step({request.sequence: count for request, count in plan.items() if request.sequence})
            except quire.OutOfPages as error:
                if len(self.running) == 1:
                    raise
                newest = self.running[-1]
                plan.pop(newest, None)
                lost = newest.length - self.prefix.length
                self._leave(newest, "waiting")
                self.waiting.insert(0, newest)
                self._full = True
                self.waits += 1
                again = f"; {lost} tokens will be computed again" if lost else ""
                self._log(f"out of pages ({error.needed} needed, {error.free} free): request {newest.name} waits{again}")

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: quire.Batch, rows: dict[DemoRequest, slice]
    ) -> torch.Tensor:
        cache, options = self.caches[layer], self.model.options[layer]
        for request, row in rows.items():
            request.dense.add(layer, k[row], v[row])
        decision = quire.explain(q, cache, batch, options)
        name = decision.chosen.name if decision.chosen else "none"
        calls, _ = self.decisions.get((layer, name), (0, decision))
        self.decisions[layer, name] = calls + 1, decision
        attention = quire.step
        if self.fault and not self.injected and self.fault.ready(self.step, layer, cache):
            attention, self.injected = self.fault.attention, f"{self.fault.summary}, in step {self.step}, layer {layer}"  # type: ignore[assignment]
            self._log(f"injected fault: {self.injected}")
        out = attention(q, k, v, cache, batch, options)
        assert isinstance(out, torch.Tensor)
        for request, row in rows.items():
            self.records.append(OutputRecord(self.step, layer, request, q[row], out[row], request.dense, request.length))
        return out

    def _pick(self, request: DemoRequest, logits: torch.Tensor) -> None:
        """Samples one more token, or finishes the request. The prefix generates nothing and is kept for others to fork."""
        if request is self.prefix:
            request.state = "held"
            self.running.remove(request)
            self._log(f"the prefix is computed: {request.length} tokens, held for all requests")
            return
        request.state = "decode"
        request.choices.append(SampledFrom(logits, request.dense))
        request.tokens.append(pick(logits, request.sampling, len(request.tokens)))
        if len(request.made) == request.wanted:
            self._log(f"request {request.name} is done: {request.wanted} tokens generated, pages released")
            self._leave(request)
            self._full = False

    def _leave(self, request: DemoRequest, state: str = "done") -> None:
        """Releases the pages of a request."""
        assert request.sequence is not None
        self.pool.free(request.sequence)
        request.sequence, request.state = None, state
        if request in self.running:
            self.running.remove(request)

    def _log(self, text: str) -> None:
        self.events.append(Event(self.step, text))
