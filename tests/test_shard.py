"""Context-parallel shards. Each rank is compared with a reference that hides the keys of other ranks, and the merged ranks with the
call over all keys. Every slot, table cell, scale and new token that is not required is poison."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
from itertools import combinations
from typing import Any

import numpy
import pytest
import torch

import quire
from quire import Batch, KVCache, Options, PagePool
from quire.cache.shard import Shard
from quire.kernels.torch import features as torch_features
from quire.platform import Platform
from support import kernels
from support.scenario import Scenario, build

Three = tuple[int, int, int]
KERNELS = [name for name in ("torch", "native") if name == "torch" or kernels.levels()]
INDICES = ((torch.int32,) * 3, (torch.int64,) * 3, (torch.int32, torch.int64, torch.int32))


def of_rank(position: int, shard: Three) -> bool:
    rank, ranks, interleave = shard
    return position // interleave % ranks == rank


def attend(s: Scenario, kernel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True, kernel=kernel)


def check_ranks(seed: int, ranks: int, interleave: int, names: list[str], sinks: torch.Tensor | None = None, **case: Any) -> None:
    """Every rank against the reference, and all of them merged against the call over all keys. One rank has the sinks."""
    whole = build(seed, sinks=sinks, **case)
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in names}
    allowed, scenarios = torch.zeros_like(whole.expected), []
    for rank in range(ranks):
        s = build(seed, sinks=sinks if rank == ranks - 1 else None, shard=(rank, ranks, interleave), **case)
        found = [v for v in quire.check(s.q, s.cache, s.batch, s.options, new=s.new) if not v.harmless]
        assert not found, found
        for name in names:
            out, lse = attend(s, name)
            s.check(out, lse, factors=s.q.dtype)
            parts[name].append((out, lse))
        scenarios.append(s)
    for s in scenarios:
        # A rank's error is weighted like its output; one more rounding of the weighted values covers the sum of the ranks.
        share = torch.exp(s.expected_lse - whole.expected_lse.nan_to_num(neginf=0.0)).unsqueeze(-1)
        allowed += share * s.budget(whole.q.dtype, s.q.dtype)
    for name in names:
        out, lse = quire.merge([out for out, _ in parts[name]], [lse for _, lse in parts[name]])
        wrong = ~((out[: whole.live].double() - whole.expected).abs() <= allowed + whole.budget(out.dtype, whole.q.dtype))
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong after the merge"
        whole_lse = whole.expected_lse
        off = (lse[: whole.live].double() - whole_lse).abs() > 4e-6 * whole_lse.abs().clamp(min=1)
        assert not (off & (lse[: whole.live] != whole_lse)).any(), f"{name}: the LSE is wrong after the merge"


# The arithmetic of a shard.


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("interleave", [1, 3, 16, 100])
def test_numbers_of_a_shard(ranks: int, interleave: int) -> None:
    length = numpy.arange(-3, 70)
    for rank in range(ranks):
        shard = Shard(rank, ranks, interleave)
        kept = [p for p in range(200) if of_rank(p, shard)]
        counts = [sum(p < n for p in kept) for n in length.tolist()]
        assert [shard.count(n) for n in length.tolist()] == counts
        assert shard.count(length).tolist() == shard.count(torch.from_numpy(length)).tolist() == counts
        assert [shard.position(j) for j in range(len(kept))] == kept
        assert shard.position(torch.arange(len(kept))).tolist() == kept
        assert [shard.owns(p) for p in range(50)] == [of_rank(p, shard) for p in range(50)]


BAD = [(2, 2, 1), (-1, 2, 1), (0, 2, 0), (0, 0, 1), (0, 2), (0, 2, 1, 1), (0, 2.0, 1), (True, 2, 1), "022", 3]


@pytest.mark.parametrize("shard", BAD, ids=str)
def test_an_invalid_shard_is_refused(shard: Any) -> None:
    tensors = [torch.zeros(shape, dtype=torch.int32) for shape in ((1, 1), (1,), (2,))]
    for make in (
        lambda: Batch(*tensors, shard=shard),
        lambda: PagePool(4, 4, shard=shard),
        lambda: Batch.allocate(1, 1, 1, shard=shard),
    ):
        with pytest.raises(quire.ArgumentError, match=r"shard.*0 <= rank < ranks and interleave >= 1"):
            make()


def test_a_cycle_of_more_than_32_bits_is_refused() -> None:
    with pytest.raises(quire.ArgumentError, match=r"ranks \* interleave of at most 2147483647"):
        PagePool(4, 4, shard=(0, 2, 2**30))
    assert PagePool(4, 4, shard=(0, 1, 2**31 - 1)).shard is None


# Attention.


def drawn(seed: int) -> dict[str, Any]:
    """A random mixed batch with some features."""
    r = random.Random(seed)
    seqs = r.randint(1, 4)
    kv_lens = [r.choice([0, 1, r.randint(2, 70)]) for _ in range(seqs)]
    q_lens = [min(r.choice([0, 1, 1, 2, 7, 30]), n) for n in kv_lens]
    if r.random() < 0.2:
        q_lens[0], kv_lens[0] = r.choice([1, 4]), r.randint(280, 600)  # several tiles
    features: dict[str, Any] = {}
    if r.random() < 0.4:
        features["window"] = r.choice([5, 20, (7, 3), (None, 2), (3, None)])
    if r.random() < 0.4:
        features["alibi"] = True
    if r.random() < 0.3:
        features["softcap"] = 3.0
    features |= r.choice([{}, {}, {"mask": True}, {"causal": False}, {"causal": "mixed"}])
    features["batch_invariant"] = r.random() < 0.2
    format = r.choice(["fp32", "fp32", "bf16", "e4m3fn", "e5m2", "int8"])
    forms = ["full"] if features["batch_invariant"] and format in ("e4m3fn", "e5m2", "int8") else ["full", "context"]
    return {
        "q_lens": q_lens, "kv_lens": kv_lens, "page_size": r.choice([4, 8, 16]), "form": r.choice(forms),
        "format": format, "scales": r.choice(["tensor", "head", "token"]), "index": r.choice(INDICES), "padding": r.choice([0, 2]),
        "layout": r.choice(["nhd", "hnd", "vllm_x"]), "q_dtype": r.choice(["fp32", "fp32", "bf16"]), **features,
        "ranks": r.choice([1, 2, 3, 4, 5]), "interleave": r.choice([1, 3, 8, 16, 1000]),
        "sinks": torch.tensor([1.0, -2.0, 0.0, 3.0]) if r.random() < 0.4 else None,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(36))
def test_random_batches(seed: int) -> None:
    check_ranks(seed, names=KERNELS, **drawn(seed))


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (9, 3)},
    "alibi": {"alibi": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])},
    "tree": {"mask": True},
    "non-causal": {"causal": False},
    "per-sequence": {"causal": "mixed"},
    "fp8": {"format": "e4m3fn", "scales": "head"},
    "token-scales": {"format": "int8", "scales": "token"},
    "context": {"form": "context"},
    "invariant": {"batch_invariant": True},
}
IMPOSSIBLE = [{"tree", "per-sequence"}, {"non-causal", "per-sequence"}, {"fp8", "token-scales"}]
PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) not in IMPOSSIBLE]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs_of_features(pair: tuple[str, str]) -> None:
    which = PAIRS.index(pair)
    features = FEATURES[pair[0]] | FEATURES[pair[1]]
    ranks, interleave = [(2, 3), (3, 1), (2, 8), (4, 5)][which % 4]
    check_ranks(which, ranks, interleave, KERNELS, q_lens=[1, 14, 3], kv_lens=[33, 20, 3], page_size=8, **features)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("q_len", [1, 9, 70])
def test_every_instruction_set(q_len: int) -> None:
    for shard in ((1, 3, 5), (0, 2, 64)):
        case: dict[str, Any] = {"q_lens": [q_len, 2], "kv_lens": [300, 40], "window": (270, None), "alibi": True, "shard": shard}
        for form in ("full", "context"):
            s = build(3, form=form, **case)
            s.check(*attend(s))


each_kernel = kernels.each_kernel


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_without_keys(kernel: str) -> None:
    """Zeros, and an LSE of -inf; with a sink, the sink."""
    for sinks in (None, torch.tensor([1.0, -2.0, 0.0, 3.0])):
        s = build(1, [1, 5], [20, 5], shard=(3, 4, 1000), sinks=sinks)
        assert s.batch.page_table.shape[1] == 2, "no page at all"
        out, lse = attend(s, kernel)
        assert (out == 0).all()
        torch.testing.assert_close(lse, torch.full((6, 4), -torch.inf) if sinks is None else sinks.expand(6, 4))


def test_one_rank_is_no_shard() -> None:
    s = build(1, [1, 9], [30, 9], shard=(0, 1, 4))
    assert s.batch.shard is None
    plain = build(1, [1, 9], [30, 9])
    assert all(torch.equal(a, b) for a, b in zip(attend(s), attend(plain)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_invariance(kernel: str) -> None:
    """Batch-invariant bits with a shard: a sequence alone, and its prompt in two chunks."""
    torch.manual_seed(1)
    k, v, q = torch.randn(40, 2, 16), torch.randn(40, 2, 16), torch.randn(40, 4, 16)
    options = Options(batch_invariant=True, alibi=torch.rand(4))

    def of(*chunks: int, other: int = 0) -> torch.Tensor:
        pool = PagePool(pages=40, page_size=4, shard=(1, 3, 5))
        cache = KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32)
        a, b, outs, at = pool.sequence(), pool.sequence(), [], 0
        for count in chunks:
            rows = slice(at, at + count)
            extra = [torch.randn(other, *x.shape[1:]) for x in (q, k, v)]
            mine = [torch.cat((x[rows], y)) for x, y in zip((q, k, v), extra)]
            outs.append(quire.step(*mine, cache, pool.step({a: count, b: other}), options, kernel=kernel)[:count])
            at += count
        return torch.cat(outs)

    assert torch.equal(of(40), of(17, 23)) and torch.equal(of(40), of(12, 1, 27, other=9))


# Writes.


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shard", [(0, 2, 1), (1, 3, 4), (2, 3, 4), (3, 4, 100)])
def test_write(shard: Three, kernel: str) -> None:
    """Token by token: those of this rank in their slots, all other memory as it was."""
    q_lens, kv_lens = [5, 0, 1, 11], [9, 4, 30, 11]
    table = torch.randperm(20).view(4, 5)
    batch = Batch(table, torch.tensor(kv_lens), torch.tensor([0, 5, 5, 6, 17]), page_size=8, shard=shard)
    k, v = torch.randn(19, 2, 16), torch.randn(19, 2, 16)
    cache = KVCache.wrap(*(torch.full((20, 8, 2, 16), 7.0) for _ in "kv"), layout="nhd")
    quire.write(k, v, cache, batch, kernel=kernel)
    expected, slots, token = [torch.full((160, 2, 16), 7.0) for _ in "kv"], [], 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        kept = [p for p in range(kv_len) if of_rank(p, shard)]
        for position in range(kv_len - q_len, kv_len):
            slots.append(-1)
            if position in kept:
                key = kept.index(position)
                slots[-1] = int(table[row, key // 8]) * 8 + key % 8
                expected[0][slots[-1]], expected[1][slots[-1]] = k[token], v[token]
            token += 1
    assert torch.equal(cache.k.view(160, 2, 16), expected[0]) and torch.equal(cache.v.view(160, 2, 16), expected[1])
    assert batch.slots is not None and batch.slots.tolist() == slots
    assert batch.positions.tolist() == [4, 5, 6, 7, 8, 29, *range(11)], "positions are those in the sequence"
    quire.write(k[:17], v[:17], cache, batch, slots=torch.arange(17), kernel=kernel)
    assert torch.equal(cache.k.view(160, 2, 16)[:17], k[:17]), "given slots are used as given"


# Pools.


@pytest.mark.parametrize("seed", range(8))
def test_pools(seed: int) -> None:
    """Ranks with pools of their own and one pool without a shard take the same steps: every token is checked by a ledger, each rank
    holds the pages of its keys and no other, and the merged outputs are those of the single pool."""
    r = random.Random(seed)
    ranks, interleave, size = r.choice([2, 3, 5]), r.choice([1, 3, 4, 7, 100]), 4
    shards: list[Three | None] = [*((rank, ranks, interleave) for rank in range(ranks)), None]
    pools = [PagePool(200, size, shard=shard) for shard in shards]
    caches = [KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32, ledger=True) for pool in pools]
    sequences = [[pool.sequence() for pool in pools] for _ in range(3)]
    for _ in range(12):
        change, one = r.random(), r.choice(sequences)
        length = r.randint(one[-1].length * 2 // 3, one[-1].length)
        if change < 0.2:
            sequences.append([pool.fork(mine) for pool, mine in zip(pools, one)])
        elif change < 0.4:
            for pool, mine in zip(pools, one):
                pool.trim(mine, length)
        elif change < 0.5 and len(sequences) > 3:
            sequences.remove(one)
            for pool, mine in zip(pools, one):
                pool.free(mine)
        chosen = r.sample(sequences, r.randint(1, len(sequences)))
        counts = [r.choice([1, 1, 2, 5, 9]) for _ in chosen]
        rows = [torch.randn(sum(counts), heads, 16) for heads in (4, 2, 2)]
        results = []
        for i, (pool, cache) in enumerate(zip(pools, caches)):
            batch = pool.step({mine[i]: count for mine, count in zip(chosen, counts)})
            batch = r.choice([lambda b: b, Batch.clone, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])(batch)
            assert batch.shard == pool.shard == shards[i]
            for mine in chosen:
                held = sum(shards[i] is None or of_rank(p, shards[i]) for p in range(mine[i].length))
                assert len(mine[i].pages) == -(-held // size)
            assert quire.check(rows[0], cache, batch, k=rows[1], v=rows[2]) == []
            results.append(quire.step(*rows, cache, batch, lse=True))
        out, lse = quire.merge([out for out, _ in results[:-1]], [lse for _, lse in results[:-1]])
        # Outputs are means of values: a few roundings of the largest one.
        torch.testing.assert_close(out, results[-1][0], rtol=0, atol=64 * 2.0**-24 * 6.0)
        torch.testing.assert_close(lse, results[-1][1], rtol=4e-6, atol=4e-6)
    for i, pool in enumerate(pools):
        pool.free(*(mine[i] for mine in sequences))
        assert pool.free_pages == 200


def test_trim_and_drop_of_a_pool() -> None:
    """Keys of rank 1 of 2 in turns of 3 are positions 3-5, 9-11, 15-17, 21-23; pages of 4."""
    pool = PagePool(pages=8, page_size=4, shard=(1, 2, 3))
    sequence = pool.sequence()
    pool.step({sequence: 24})
    assert sequence.pages == [0, 1, 2] and sequence.length == 24
    pool.drop(sequence, 9)
    assert sequence.pages == [0, 1, 2], "position 9 is in the first page too"
    pool.drop(sequence, 10)
    assert sequence.pages == [-1, 1, 2]
    with pytest.raises(quire.ArgumentError, match=r"length.*10 to 24: positions before 10 were dropped"):
        pool.trim(sequence, 9)
    pool.trim(sequence, 16)
    assert sequence.pages == [-1, 1] and pool.free_pages == 7
    pool.step({sequence: 6})
    assert sequence.pages[:2] == [-1, 1] and len(sequence.pages) == 3, "positions 16, 17 and 21 fill page 1 and begin another"


def test_a_ledger_detects_a_token_of_another_rank() -> None:
    pool = PagePool(pages=8, page_size=4, shard=(1, 2, 3))
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32, ledger=True)
    batch = pool.step({pool.sequence(): 12})
    rows = torch.zeros(12, 1, 8)
    wrong = Batch(batch.page_table, batch.kv_lens, batch.q_starts, shard=(0, 2, 3))  # as if this were rank 0
    quire.write(rows, rows, cache, wrong)
    with pytest.raises(quire.ContractError, match="another position's: written at position 0"):
        quire.attend(rows, cache, batch)


# The batch, and where it goes.


def test_a_batch_keeps_its_shard() -> None:
    s = build(1, [1, 9], [30, 9], shard=(1, 2, 3))
    for batch in (s.batch.clone(), copy.deepcopy(s.batch), pickle.loads(pickle.dumps(s.batch)), s.batch.to("meta")):
        assert batch.shard == (1, 2, 3)
    assert "shard=(1, 2, 3)" in repr(s.batch) and "shard" not in repr(build(1, [1], [3]).batch)
    buffers = Batch.allocate(4, 10, 20, shard=(1, 2, 3)).fill(s.batch.page_table, s.batch.kv_lens, s.batch.q_starts)
    assert buffers.shard == (1, 2, 3)
    out, lse = quire.attend(s.q, s.cache, buffers, s.options, lse=True)
    s.check(out, lse)


def test_step_in_a_compiled_function() -> None:
    """One graph, and the shard reaches the kernels: the keys of rank 1 alone are written and seen."""
    pool = PagePool(pages=8, page_size=4, shard=(1, 2, 3))
    caches = [KVCache.allocate(pool, kv_heads=1, head_dim=16, dtype=torch.float32) for _ in "ab"]
    batch = pool.step({pool.sequence(): 10}).clone()
    q, k, v = torch.randn(10, 2, 16), torch.randn(10, 1, 16), torch.randn(10, 1, 16)
    compiled = torch.compile(lambda q, k, v, cache: quire.step(q, k, v, cache, batch), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, caches[0]), quire.step(q, k, v, caches[1], batch))
    assert torch.equal(caches[0].k, caches[1].k) and int((caches[0].k != 0).any(-1).sum()) == 4


def test_explanations() -> None:
    s = build(1, [1, 9], [30, 9], shard=(1, 2, 3))
    q, cache, batch = s.q.to("meta"), KVCache.wrap(s.cache.k.to("meta"), s.cache.v.to("meta"), layout="nhd"), s.batch.to("meta")
    problem = quire.explain(s.q, s.cache, s.batch).problem
    assert problem.shard and "shard" in str(problem) and quire.Problem.from_json(problem.to_json()) == problem
    decision = quire.explain(q.half(), cache, batch, platform=Platform.named("sm90"))
    refused = {c.kernel.name: [r.rule for r in c.refusals] for c in decision.candidates}
    assert not refused["triton-mixed"] and not any("shard" in rules for name, rules in refused.items() if name != "triton-shared")


def test_one_kernel_serves_every_shard() -> None:
    """Rank, ranks and interleave are arguments: nothing is compiled for them, and not for the size of a batch."""
    pytest.importorskip("triton")

    def keys(shard: Three | None, operation: str) -> tuple[str, ...]:
        def nothing(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        cache = KVCache.wrap(nothing(9, 16, 8, 128), nothing(9, 16, 8, 128), layout="nhd")
        batch = Batch(
            *(nothing(*shape, dtype=torch.int32) for shape in ((3, 8), (3,), (4,))), max_q_len=1, max_kv_len=100, shard=shard
        )
        return quire.explain(nothing(3, 32, 128), cache, batch, operation=operation, platform=Platform.named("sm90")).compiled

    for operation in ("attend", "write"):
        assert keys((0, 2, 1), operation) == keys((1, 3, 77), operation) != keys(None, operation) != ()


def test_hints_are_those_of_the_whole_sequence() -> None:
    s = build(1, [1, 9], [30, 9], shard=(1, 2, 3))
    batch = Batch(s.batch.page_table, s.batch.kv_lens, s.batch.q_starts, max_kv_len=30, shard=(1, 2, 3))
    assert batch.max_keys == 15
    assert quire.check(s.q, s.cache, batch) == []
    batch.max_kv_len = 29
    assert [v.argument for v in quire.check(s.q, s.cache, batch)] == ["max_kv_len"]


# What is required, and what is not.


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_pages_of_the_shard_are_required(kernel: str) -> None:
    """14 of 30 keys are on this rank, in 4 pages of 4. Column 3 is required, column 4 may hold anything."""
    s = build(1, [2], [30], shard=(1, 2, 7), page_size=4)
    assert s.batch.page_table.shape[1] == 6
    table = s.batch.page_table.clone()
    table[0, 4:] = 10**6
    s.batch.page_table = table
    s.check(*attend(s, kernel))
    table[0, 3] = -1
    (found,) = quire.check(s.q, s.cache, s.batch)
    assert found.argument == "page_table[0, 3]" and "kv_len 30, of which 14 in the shard" in str(found)
    with pytest.raises(quire.ContractError):
        attend(s, kernel)
    s.batch.page_table = table[:, :3]
    (found,) = quire.check(s.q, s.cache, s.batch)
    assert found.allowed == "4 or more: sequence 0 reaches 14 tokens of the shard in pages of 4"


def test_kernels_never_use_a_missing_page() -> None:
    """A change that no check saw gives NaN in that sequence alone."""
    for name in KERNELS:
        for mask in (None, True):
            s = build(1, [3, 2], [30, 20], shard=(1, 2, 7), page_size=4, mask=mask)
            out, lse = torch.zeros(5, 4, 16), torch.zeros(5, 4)
            s.batch.page_table[0, 2] = 10**6
            importlib.import_module(f"quire.kernels.{name}.attend").launch(s.q, s.cache, s.batch, s.options, None, out, lse)
            assert out[:3].isnan().all() and lse[:3].isnan().all(), name
            assert torch.allclose(out[3:].double(), s.expected[3:], atol=1e-5), name


def test_the_lengths_of_a_call_are_of_the_whole_sequence() -> None:
    s = build(1, [9], [9], shard=(1, 2, 3))
    s.batch.kv_lens = torch.tensor([8], dtype=torch.int32)
    (found,) = quire.check(s.q, s.cache, s.batch)
    assert found.argument == "kv_lens[0]" and "9 or more" in found.allowed


def test_a_write_needs_no_page_for_tokens_of_other_ranks() -> None:
    """One new token at position 29, of rank 0: rank 1 stores nothing, and its table may be empty."""
    cache = KVCache.wrap(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), layout="nhd")
    lens, starts, rows = torch.tensor([29]), torch.tensor([0, 1]), torch.ones(1, 1, 8)
    quire.write(rows, rows, cache, Batch(torch.zeros(1, 0, dtype=torch.int64), lens, starts, shard=(1, 2, 7)))
    assert not cache.k.any()
    with pytest.raises(quire.ContractError, match="15 tokens of the shard"):
        quire.write(rows, rows, cache, Batch(torch.zeros(1, 0, dtype=torch.int64), lens, starts, shard=(0, 2, 7)))


# The tests above can fail.


FAULTS: dict[str, Any] = {
    "a position is the number of the key": lambda m: m.setattr(torch_features, "positions_of", lambda shard, keys: keys),
    "one key too many": lambda m: m.setattr(torch_features, "keys_of", lambda s, n: n if s is None else min(n, s.count(n) + 1)),
    "one key too few": lambda m: m.setattr(torch_features, "keys_of", lambda s, n: n if s is None else max(0, s.count(n) - 1)),
    "lengths are those of the rank": lambda m: m.setattr(torch_features, "keys_of", lambda s, n: n),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("features", [{"alibi": True}, {"window": 11}, {"causal": False, "window": (5, 9)}, {}], ids=str)
def test_faults_are_found(fault: str, features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a position is the number of the key" and not features:
        features = {"mask": True}
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_ranks(7, 3, 4, ["torch"], q_lens=[1, 14, 3], kv_lens=[65, 20, 40], page_size=8, **features)
