"""Shards of a context-parallel cache: every feature in both forms, against a reference that hides the keys of other ranks; the
merged ranks; writes; and the ledger's check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from quire import Batch, KVCache, Options, PagePool
from quire.contract.call import Call
from quire.kernels.torch import write as plain
from quire.kernels.triton.host.tuning import SMALL, SMALLEST
from support.launched import attend, audit, bits, card, run, write
from support.scenario import build

LENS: dict[str, Any] = {"q_lens": [1, 40, 3, 0, 20], "kv_lens": [5, 40, 100, 7, 90], "padding": 2}
# (rank, ranks, interleave): keys in turns, in odd pieces, page by page; every sequence has keys whose position is another number.
SHARDS = [(1, 2, 1), (2, 3, 3), (1, 2, 16)]
# Then rank 0, whose first keys have their own numbers; all keys of some sequences on one rank; a rank without keys.
MORE_SHARDS = [*SHARDS, (0, 2, 1), (0, 4, 37), (1, 2, 1000)]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window-both-sides": {"window": (30, 3), "causal": False},
    "alibi": {"alibi": True, "window": (30, 3)},
    "softcap-alibi": {"softcap": 2.0, "alibi": True, "scale": 3.0},
    "sinks": {"sinks": True},
    "non-causal": {"causal": False},
    "causal-by-row-window": {"causal": "mixed", "window": (15, 4)},
    "tree": {"mask": True},
    "tree-window-alibi": {"mask": True, "window": 25, "alibi": True},
    "tree-left-only": {"mask": True, "window": (25, None)},
    "tree-right-only": {"mask": True, "window": (None, 1)},
    "invariant": {"batch_invariant": True, "window": 33},
}


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("form", ["full", "context"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, form: str, kernel: str, device: str) -> None:
    which = list(FEATURES).index(name) + (form == "context") + 2 * (kernel == "mixed")
    attend(kernel, device, **LENS, form=form, shard=SHARDS[which % len(SHARDS)], **FEATURES[name])


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("shard", MORE_SHARDS)
def test_shard(shard: tuple[int, int, int], kernel: str, device: str) -> None:
    index = (torch.int64, torch.int32, torch.int64)
    attend(kernel, device, **LENS, form="context", shard=shard, window=(40, 2), causal="mixed", alibi=True, index=index)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_everything_at_once(kernel: str, device: str) -> None:
    attend(
        kernel, device, **LENS, form="context", format="int8", scales="token", q_dtype="bf16", layout="vllm_x", page_size=8,
        window=(33, 2), causal="mixed", softcap=20.0, alibi=True, sinks=True, group=3, head_dim=20, v_head_dim=12, shard=(1, 3, 5),
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("form", ["full", "context"])
def test_work_is_split(form: str, kernel: str, device: str) -> None:
    """More programs than sequences: the parts of a unit are combined."""
    case: dict[str, Any] = {"q_lens": [1, 3, 25], "kv_lens": [300, 150, 200], "form": form, "shard": (1, 2, 7), "page_size": 4}
    attend(kernel, device, **case, window=(140, 0), how={"platform": card(device, 40), "tuning": SMALL})


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
def test_a_table_that_is_too_short(kernel: str, device: str) -> None:
    """A required page without a column gives NaN; with a window that hides the context it is not required, and may be missing."""
    s = build(1, [3, 20], [200, 90], form="context", shard=(0, 2, 3), page_size=4, device=device)
    s.batch.page_table = s.batch.page_table[:, :12]
    out, _ = run(kernel, s)
    assert out[:3].isnan().all() and not out[3:23].isnan().any()
    s = build(1, [3, 20], [200, 90], form="context", shard=(0, 2, 3), page_size=4, window=(0, 0), device=device)
    s.batch.page_table = s.batch.page_table[:, :12]
    out, lse = run(kernel, s)
    s.check(out, lse)


@pytest.mark.parametrize("kernel", ["decode", "mixed"])
@pytest.mark.parametrize("form", ["full", "context"])
def test_merged_ranks_equal_the_whole(form: str, kernel: str, device: str) -> None:
    sinks, case = torch.tensor([0.5, -1.0, 2.0, 0.0]), {**LENS, "form": form, "alibi": True, "window": (60, 1), "causal": "mixed"}
    outs, lses = [], []
    for rank in range(3):
        s = build(4, **case, sinks=sinks if rank == 1 else None, shard=(rank, 3, 6), device=device)
        out, lse = run(kernel, s)
        outs.append(out)
        lses.append(lse)
    build(4, **case, sinks=sinks, device=device).check(*quire.merge(outs, lses))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shard", [(0, 2, 1), (1, 3, 4), (3, 4, 100)])
def test_write(shard: tuple[int, int, int], index: torch.dtype, device: str) -> None:
    """The bytes that the torch kernel stores; `tests/test_shard.py` checks those token by token."""
    q_lens, kv_lens = [5, 0, 1, 11, 3], [9, 4, 30, 11, 2]  # the last sequence is shorter than its new tokens
    table = torch.randperm(25, generator=torch.Generator().manual_seed(3)).view(5, 5).to(device, index)
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(device, index)
    batch = Batch(table, torch.tensor(kv_lens).to(device, index), starts, shard=shard)
    k, v = (torch.randn(22, 2, 16).to(device) for _ in "kv")
    caches = [KVCache.wrap(*(torch.full((25, 4, 2, 16), 7.0, device=device) for _ in "kv"), layout="nhd") for _ in "ab"]
    plain.launch(k, v, caches[0], batch, None)
    write(k, v, caches[1], batch, None, SMALLEST)
    assert torch.equal(bits(caches[0].k), bits(caches[1].k)) and torch.equal(bits(caches[0].v), bits(caches[1].v))
    slots = torch.arange(22, device=device)
    write(k, v, caches[1], batch, slots, SMALLEST)
    assert torch.equal(caches[1].k.view(-1, 2, 16)[:20], k[:20]), "given slots are used as given"


@pytest.mark.parametrize("window", [None, 8])
def test_ledger(window: int | None, device: str) -> None:
    """Every required key is checked at its own position."""
    pool = PagePool(pages=40, page_size=4, device=device, shard=(1, 2, 3))
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32, ledger=True)
    a, b = pool.sequence(), pool.sequence()
    batch = pool.step({a: 30, b: 11})
    rows = torch.zeros(41, 1, 16, device=device)
    quire.write(rows, rows, cache, batch, kernel="torch")
    ledger: Any = cache.ledger
    call = Call(cache, batch, rows, Options(window=window))
    audit(call, SMALLEST)
    assert ledger.report() is None
    batch = pool.step({a: 1, b: 2})  # positions 30, 11 and 12: of rank 0, of rank 1, and of rank 0
    call = Call(cache, batch, rows[:3], Options(window=window))
    audit(call, SMALLEST)
    report = ledger.report()
    assert report is not None and (report.missing, report.first.seq, report.first.position) == (1, 1, 11)
    assert report.first.slot == int(batch.page_table[1, 1]) * 4 + 1, "position 11 is key 5 of the shard"
