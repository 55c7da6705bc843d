"""On a GPU the ledger is checked beside every attend: nothing is read until a report is asked for."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.cache.ledger import LedgerFinding, LedgerReport

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PAGE_SIZE, PAGES = 16, 64


class Engine:
    """One layer on the GPU, with a ledger."""

    def __init__(self, seqs: int = 3, window: int | None = None):
        self.pool = quire.PagePool(PAGES, PAGE_SIZE, "cuda")
        self.cache = quire.KVCache.allocate(self.pool, kv_heads=2, head_dim=64, dtype=torch.bfloat16, ledger=True)
        self.sequences = [self.pool.sequence() for _ in range(seqs)]
        self.options = quire.Options(window=window)

    def batch(self, *counts: int) -> quire.Batch:
        return self.pool.step(dict(zip(self.sequences, counts)))

    def tokens(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, 64, device="cuda", dtype=torch.bfloat16)

    def step(self, *counts: int) -> quire.Batch:
        batch, n = self.batch(*counts), sum(counts)
        quire.step(self.tokens(n, 4), self.tokens(n, 2), self.tokens(n, 2), self.cache, batch, self.options)
        return batch

    def report(self) -> LedgerReport | None:
        assert self.cache.ledger is not None
        return self.cache.ledger.report()

    def forget(self, batch: quire.Batch, row: int, position: int) -> LedgerFinding:
        """Lets the ledger say that nobody wrote a token; what should be found."""
        assert self.cache.ledger is not None
        page, offset = int(batch.page_table[row, position // PAGE_SIZE]), position % PAGE_SIZE
        self.cache.ledger.position[page * PAGE_SIZE + offset] = -1
        return LedgerFinding(row, position, page * PAGE_SIZE + offset, page, offset, "never written")


def test_correct_steps_have_no_report() -> None:
    engine = Engine()
    for counts in ((40, 1, 0), (1, 300, 17), (1, 1, 1), (1, 1, 1), (0, 2, 30)):
        engine.step(*counts)
    assert engine.report() is None


def test_a_missing_token_is_reported_by_every_call() -> None:
    """The second and later calls of a kind go straight to the launcher."""
    engine = Engine()
    batch = engine.step(40, 1, 20)
    q = engine.tokens(61, 4)
    for _ in range(2):
        quire.attend(q, engine.cache, batch)
    assert engine.report() is None
    found = engine.forget(batch, 2, 7)
    for calls in (1, 2, 3):
        quire.attend(q, engine.cache, batch)
        assert engine.report() == (calls, found)


def test_a_token_behind_the_window_is_not_missed() -> None:
    engine = Engine(window=8)
    engine.step(40, 1, 20)
    batch = engine.batch(1, 1, 1)
    engine.forget(batch, 0, 32)
    q, k = engine.tokens(3, 4), engine.tokens(3, 2)
    quire.step(q, k, k, engine.cache, batch, engine.options)
    assert engine.report() is None
    found = engine.forget(batch, 0, 33)
    quire.attend(q, engine.cache, batch, engine.options)
    assert engine.report() == (1, found)


def test_context_form_does_not_miss_new_tokens() -> None:
    engine = Engine()
    engine.step(40, 1, 20)
    batch = engine.batch(3, 1, 2)
    q, k = engine.tokens(6, 4), engine.tokens(6, 2)
    quire.attend(q, engine.cache, batch, new=(k, k))
    assert engine.report() is None
    quire.attend(q, engine.cache, batch)
    report = engine.report()
    assert report is not None and report.missing == 6
    assert (report.first.seq, report.first.position, report.first.reason) == (0, 40, "never written")


def test_pages_that_were_handed_out_again_are_stale() -> None:
    engine = Engine()
    engine.step(40, 1, 20)
    engine.pool.free(engine.sequences[0])
    engine.sequences[0] = engine.pool.sequence()
    batch = engine.batch(16, 0, 0)
    quire.attend(engine.tokens(16, 4), engine.cache, batch)
    report = engine.report()
    assert report is not None and report.missing == 16 and report.first.reason.startswith("stale: written at step 1")


def test_the_check_agrees_with_the_contract() -> None:
    engine = Engine()
    batch = engine.step(40, 1, 20)
    for row, position in ((0, 3), (0, 39), (2, 19)):
        engine.forget(batch, row, position)
    q = engine.tokens(61, 4)
    quire.attend(q, engine.cache, batch)
    broken = [v for v in quire.check(q, engine.cache, batch) if v.rule == "residency"]
    report = engine.report()
    assert report is not None and report.missing == len(broken) == 3
    assert (report.first.seq, report.first.position, report.first.slot) == (broken[0].seq, broken[0].token, broken[0].slot)


def test_a_graph_checks_what_it_is_replayed_on() -> None:
    engine = Engine()
    batch = engine.step(40, 1, 20)
    assert engine.cache.ledger is not None
    q, out = engine.tokens(61, 4), torch.empty(61, 4, 64, device="cuda", dtype=torch.bfloat16)
    quire.attend(q, engine.cache, batch, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attend(q, engine.cache, batch, out=out)
    graph.replay()
    assert engine.report() is None
    found = engine.forget(batch, 2, 19)
    graph.replay()
    assert engine.report() == (1, found)
    engine.cache.ledger.clear()
    batch.kv_lens[2] -= 1  # now the missing token is behind the end
    batch.q_starts[3] -= 1
    graph.replay()
    assert engine.report() is None
