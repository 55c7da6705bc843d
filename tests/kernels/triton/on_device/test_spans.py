"""Spans: every kind of them with every feature in both forms, against a reference that compares each key with each span."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from quire import KVCache, Options, PagePool
from quire.contract.call import Call
from quire.kernels.triton.host.tuning import SMALL, SMALLEST
from support.launched import attend, audit, card, run
from support.scenario import build

LENS: dict[str, Any] = {"q_lens": [1, 24, 3, 0, 1], "kv_lens": [5, 24, 60, 7, 70], "padding": 2, "page_size": 8}
FEATURES: dict[str, dict[str, Any]] = {
    "images": {"spans": "images", "alibi": True},
    "any-softcap-sinks": {"spans": "any", "softcap": 2.0, "sinks": True, "index": (torch.int64,) * 3},
    "any-shard": {"spans": "any", "shard": (1, 3, 5), "alibi": True},
    "any-invariant": {"spans": "any", "batch_invariant": True},
    "chunks-quantised": {"spans": "chunks", "format": "int8", "scales": "token", "layout": "vllm_x", "group": 3, "q_dtype": "bf16"},
}


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, form: str, kernel: str, device: str) -> None:
    attend(kernel, device, **LENS, form=form, **FEATURES[name])


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("kind, form", [("causal", "full"), ("any", "context"), ("chunks", "full")])
def test_work_is_split(kind: str, form: str, kernel: str, device: str) -> None:
    """More programs than sequences: the parts of a unit are combined."""
    case: dict[str, Any] = {"q_lens": [1, 3, 20, 1], "kv_lens": [200, 90, 100, 150], "form": form, "page_size": 4}
    attend(kernel, device, **case, spans=kind, how={"platform": card(device, 24), "tuning": SMALL})


@pytest.mark.parametrize("form", ["full", "context"])
def test_tiles_that_every_query_sees(form: str, device: str) -> None:
    """They are computed without a mask, between those that only some queries see."""
    spans = [(3 * i, 150 + i) for i in range(20)]
    attend("mixed", device, q_lens=[20], kv_lens=[170], form=form, page_size=4, spans=spans, how={"tuning": SMALL})


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_gaps_are_not_read(kernel: str, device: str) -> None:
    """Keys between the spans of a tile are NaN, and have no entry in the table."""
    spans = [(3, 20), (100, 108), (5, 5)] * 7
    s = build(2, [1, 20], [120, 120], spans=spans, page_size=4, format="e4m3fn", scales="token", device=device)
    assert (s.batch.page_table[1, 6:24] == -1).all()
    out, lse = run(kernel, s)
    s.check(out, lse)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_missing_page_gives_nan(page: int, kernel: str, device: str) -> None:
    """To the rows of the unit that sees it. Nothing is read out of bounds."""
    s = build(3, [1, 1, 20], [60, 50, 90], spans=[(0, 60), (40, 50), *[(8, 30)] * 20], page_size=4, device=device)
    s.batch.page_table[0, 7] = s.batch.page_table[2, 4] = page
    out, lse = run(kernel, s)
    assert lse is not None and out[[0, *range(2, 22)]].isnan().all() and lse[[0, *range(2, 22)]].isnan().all()
    torch.testing.assert_close(out[1].double(), s.expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_a_table_that_ends_before_the_context(kernel: str, device: str) -> None:
    """It is right if no span needs the rest, also if a token sees keys on both sides. A span that needs it gives NaN."""
    spans = [(0, 9), (150, 153), (2, 8), *[(185, 200)] * 18, (6, 12), (199, 200)]
    case: dict[str, Any] = {"q_lens": [3, 19, 1], "kv_lens": [153, 200, 200], "form": "context", "page_size": 4, "device": device}
    s = build(4, **case, spans=[*spans[:20], (0, 12), (185, 186), (199, 200)])
    s.batch.page_table = s.batch.page_table[:, :3].contiguous()
    out, lse = run(kernel, s)
    s.check(out, lse)
    s.batch.spans[0] = torch.tensor([0, 13])  # type: ignore[index]
    out, _ = run(kernel, s)
    assert out[0].isnan().all() and not out[3:].isnan().any()


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_a_table_that_ends_before_the_last_key(kernel: str, device: str) -> None:
    s = build(5, [1, 1, 18], [300, 300, 300], spans=[(0, 12), (2, 8), *[(4, 11)] * 18], page_size=4, device=device)
    s.batch.page_table = s.batch.page_table[:, :3].contiguous()
    out, lse = run(kernel, s)
    s.check(out, lse)
    s.batch.spans[1] = torch.tensor([290, 300])  # type: ignore[index]
    out, _ = run(kernel, s)
    assert out[1].isnan().all() and not out[[0, *range(2, 20)]].isnan().any()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_a_span_outside_of_the_sequence_is_clipped(kernel: str, index: torch.dtype, device: str) -> None:
    s = build(6, [1, 18], [30, 50], spans=[(0, 30)] + [(5, 50)] * 18, page_size=4, index=(index,) * 3, device=device)
    least, most = torch.iinfo(index).min, torch.iinfo(index).max
    s.batch.spans[0] = torch.tensor([least, most])  # type: ignore[index]
    s.batch.spans[1:, 1] = most  # type: ignore[index]
    out, lse = run(kernel, s)
    s.check(out, lse)


@pytest.mark.parametrize(
    "strided", [lambda t: t.T.contiguous().T, lambda t: t.repeat_interleave(2, 0)[::2]], ids=["columns", "rows"]
)
def test_strided_spans(strided: Any, device: str) -> None:
    s = build(7, **LENS, spans="any", device=device)
    s.batch.spans = strided(s.batch.spans)
    out, lse = run("decode", s)
    s.check(out, lse)


@pytest.mark.parametrize("shard", [None, (1, 2, 3)])
def test_ledger(shard: tuple[int, int, int] | None, device: str) -> None:
    """Exactly the keys in some span are checked."""
    pool = PagePool(pages=40, page_size=4, device=device, shard=shard)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32, ledger=True)
    a, b = pool.sequence(), pool.sequence()
    batch = pool.step({a: 30, b: 11})
    rows = torch.zeros(41, 1, 16, device=device)
    quire.write(rows, rows, cache, batch, kernel="torch")
    ledger: Any = cache.ledger
    batch = pool.step({a: 3, b: 1})  # of which nothing is written
    wanted = 4 if shard is None else 1  # positions 30 to 32, of rank 0, and position 11, of rank 1
    for spans, missing in (([[0, 30], [4, 4], [2, 9], [0, 11]], 0), ([[0, 3], [5, 33], [0, 1], [3, 12]], wanted)):
        call = Call(cache, batch.with_spans(torch.tensor(spans, device=device)), rows[:4], Options())
        audit(call, SMALLEST)
        report = ledger.report()
        assert (0 if report is None else report.missing) == missing
