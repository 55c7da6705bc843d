"""Shared prefixes. Each kernel that reads them once is compared with the reference, over random trees; every slot and table cell
that no query sees is poison. Then who is chosen and why, what the contract checks, and where prefixes come from."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import quire
from quire import ArgumentError, Batch, ContractError, KVCache, Options, PagePool, Platform, Prefixes
from quire.cache import prefix_search
from quire.conformance.recording.record import load
from quire.contract import validated
from quire.contract.call import Call
from quire.kernels.native import library
from quire.launch import described
from support import kernels
from support.prefix_search import plainly_found
from support.scenario import Scenario, build

each_kernel = kernels.each_kernel
needs_native = pytest.mark.skipif(not kernels.levels(), reason=kernels.NO_LIBRARY)
INDICES = ((torch.int32,) * 3, (torch.int64,) * 3, (torch.int64, torch.int32, torch.int64))
Groups = list[tuple[tuple[int, ...], int, int]]


def tree(r: random.Random, context_pages: list[int], depth: int = 3) -> Groups:
    """A random tree of prefixes of sequences that have so many full pages before their new tokens."""
    found: Groups = []

    def grow(seqs: list[int], begin: int, level: int) -> None:
        r.shuffle(seqs)
        while len(seqs) >= 2:
            some = [seqs.pop() for _ in range(r.randint(2, len(seqs)))]
            longest = min(context_pages[i] for i in some)
            if longest > begin:
                end = r.randint(begin + 1, longest)
                found.append((tuple(some), begin, end))
                if level + 1 < depth:
                    grow([i for i in some if context_pages[i] > end], end, level + 1)

    grow([i for i, n in enumerate(context_pages) if n], 0, 0)
    return found


def drawn(seed: int) -> dict[str, Any]:
    """A random mixed batch with prefixes and some features."""
    r = random.Random(seed)
    page_size = r.choice([4, 8, 16])
    contexts = [r.choice([0, r.randint(0, 90), r.randint(0, 90), r.randint(250, 400)]) for _ in range(r.randint(2, 8))]
    q_lens = [r.choice([0, 1, 1, 1, 2, 5, 16, 17, 40]) for _ in contexts]
    features: dict[str, Any] = r.choice([{}, {}, {"causal": False}, {"causal": "mixed"}])
    for chance, name, values in (
        (0.3, "alibi", [True]),
        (0.3, "softcap", [3.0]),
        (0.4, "sinks", [True]),
        (0.3, "form", ["context"]),
        (0.2, "scale", [-0.2]),
    ):
        if r.random() < chance:
            features[name] = r.choice(values)
    return {
        "q_lens": q_lens, "kv_lens": [c + q for c, q in zip(contexts, q_lens)], "page_size": page_size,
        "prefixes": tree(r, [c // page_size for c in contexts]), "kv_heads": r.choice([1, 2, 3]), "group": r.choice([1, 2, 8, 20]),
        "scales": r.choice(["tensor", "head", "token"]), "format": r.choice(["fp32", "fp32", "bf16", "e4m3fn", "e5m2", "int8"]),
        "index": r.choice(INDICES), "padding": r.choice([0, 2]),
        "layout": r.choice(["nhd", "hnd", "vllm_x", "aiter", "vllm_joint"]),
        "q_dtype": r.choice(["fp32", "fp32", "bf16", "fp16"]), **features,
    }  # fmt: skip


def attend(s: Scenario, kernel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True, kernel=kernel)


def saving(s: Scenario) -> int:
    return described("attend", Call(s.cache, s.batch, s.q, s.options))[1].saved_keys


@pytest.mark.parametrize("seed", range(40))
def test_random_trees(seed: int) -> None:
    s = build(seed, **drawn(seed))
    assert [v for v in quire.check(s.q, s.cache, s.batch, s.options, new=s.new) if not v.harmless] == []
    names = [
        "torch",
        *(["native"] if kernels.levels() else []),
        *(["native-shared"] if kernels.levels() and saving(s) >= 64 else []),
    ]
    for name in names:
        s.check(*attend(s, name), factors=s.q.dtype)


@needs_native
def test_random_trees_have_depth() -> None:
    """The random trees reach three levels, sequences that are not neighbours, and several kinds of units."""
    made = [Prefixes(d["prefixes"], len(d["q_lens"])) for d in map(drawn, range(40))]
    assert max(one.levels for one in made) == 3
    assert any(tuple(sorted(p.sequences)) != p.sequences for one in made for p in one.listed)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("group", [1, 2, 16])
def test_every_instruction_set(group: int, each_kernel: str) -> None:
    """Few rows and many; prefixes that are split over keys, by threads."""
    case: dict[str, Any] = {"page_size": 8, "group": group, "alibi": True, "sinks": True}
    s = build(3, [1, 2, 1, 1], [4500, 4400, 90, 12], prefixes=[((1, 0, 2), 0, 10), ((0, 1), 10, 540)], **case)
    name = None if each_kernel == "torch" else "native-shared"
    if name:
        with kernels.kernel(each_kernel):
            out, lse = quire.attend(s.q, s.cache, s.batch, s.options, lse=True, kernel=name)
    else:
        out, lse = attend(s)
    s.check(out, lse)


@needs_native
def test_output_types_and_padding() -> None:
    s = build(5, [1, 3, 1], [90, 80, 70], page_size=8, padding=3, prefixes=[((0, 1, 2), 0, 8)], sinks=True)
    out = torch.full((8, 4, 16), torch.nan)
    quire.attend(s.q, s.cache, s.batch, s.options, out=out, kernel="native-shared")
    s.check(out)
    assert out[5:].isnan().all()
    made = quire.attend(s.q, s.cache, s.batch, s.options, kernel="native-shared")
    assert (made[5:] == 0).all()


@needs_native
def test_idle_members_are_not_read() -> None:
    """A sequence without new tokens may have any pages and any length."""
    s = build(5, [0, 1, 1], [90, 80, 70], page_size=8, prefixes=[((0, 1, 2), 0, 8)])
    s.batch.page_table[0] = 10**6
    s.batch.kv_lens[0] = -5
    assert [v for v in quire.check(s.q, s.cache, s.batch, s.options) if not v.harmless] == []
    s.check(*attend(s, "native-shared"))


# Who is chosen.


def case(**changes: Any) -> Scenario:
    given: dict[str, Any] = {"page_size": 16, "prefixes": [((0, 1, 2), 0, 8)]}
    return build(1, [1, 1, 1], [140, 150, 160], **given | changes)


@needs_native
def test_explain_says_why() -> None:
    s = case()
    decision = quire.explain(s.q, s.cache, s.batch)
    assert decision.chosen is not None and decision.chosen.name == "native-shared"
    assert decision.extent.saved_keys == 2 * 8 * 16
    options = Options(window=50)
    decision = quire.explain(s.q, s.cache, s.batch, options)
    assert decision.chosen is not None and decision.chosen.name == "native"
    (refused,) = [c for c in decision.candidates if c.kernel.name == "native-shared"]
    assert {r.rule for r in refused.refusals} == {"window"}
    quire.attend(s.q, s.cache, s.batch, options)
    small = case(prefixes=[((0, 1), 0, 2)])
    text = str(quire.explain(small.q, small.cache, small.batch))
    assert "refused: native-shared" in text and "saved_keys: given 32, allowed at least 64" in text
    # Without prefixes it is no candidate, but can be asked for.
    plain = s.batch.with_prefixes(None)
    assert "native-shared" not in str(quire.explain(s.q, s.cache, plain))
    with pytest.raises(quire.KernelError, match="saved_keys: given 0, allowed at least 64"):
        quire.attend(s.q, s.cache, plain, kernel="native-shared")


def test_gpus_share_from_a_number_of_keys_on() -> None:
    for count, name in ((8192 // 16, "triton-shared"), (8192 // 16 - 1, "triton-decode")):
        prefixes = Prefixes([((0, 1), 0, count)], 2, "meta")
        cache = KVCache.wrap(*(torch.empty(9, 16, 8, 128, dtype=torch.bfloat16, device="meta") for _ in "kv"), layout="nhd")
        lists = (torch.empty(*n, dtype=torch.int32, device="meta") for n in ((2, 600), (2,), (3,)))
        batch = Batch(*lists, max_q_len=1, prefixes=prefixes)
        q = torch.empty(2, 32, 128, dtype=torch.bfloat16, device="meta")
        for arch in ("h200", "gfx942"):
            decision = quire.explain(q, cache, batch, platform=Platform.named(arch))
            assert decision.chosen is not None and decision.chosen.name == name


@needs_native
@pytest.mark.parametrize("feature", [{"window": 50}, {"spans": "causal"}, {"select": "columns"}])
def test_without_sharing_the_result_is_right(feature: dict[str, Any]) -> None:
    s = case(**feature)
    s.check(*attend(s))


# The contract.


@pytest.fixture(params=[True, False])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native validation, and with the rules alone."""
    if not request.param or not library.FILE.exists():
        monkeypatch.setattr(validated, "_loaded", [None])


def refused(s: Scenario, batch: Batch | None = None) -> list[quire.Violation]:
    with pytest.raises(ContractError) as raised:
        quire.attend(s.q, s.cache, batch or s.batch, s.options)
    assert {v.rule for v in raised.value.violations} == {"prefixes"}
    return list(raised.value.violations)


@pytest.mark.usefixtures("native")
def test_other_pages_are_refused() -> None:
    s = case()
    attend(s)
    s.batch.page_table[1, 5] = s.batch.page_table[2, 9]
    (violation,) = refused(s)
    assert (violation.seq, violation.argument) == (1, "page_table[1, 5]") and "sequence 0" in violation.allowed


@pytest.mark.usefixtures("native")
def test_new_tokens_are_not_shared() -> None:
    s = case()
    attend(s)
    s.batch.kv_lens[2] = 128  # its new token is the last of the eighth page
    (violation,) = refused(s)
    assert violation.seq == 2 and violation.allowed.startswith("at most 7 columns")


@pytest.mark.usefixtures("native")
def test_tensors_that_do_not_fit_are_refused() -> None:
    s = case()
    attend(s)
    assert s.batch.prefixes is not None
    good = s.batch.prefixes
    for name, place, value in (
        ("members", (0,), 7), ("members", (0,), -1), ("groups", (0, 1), 9), ("groups", (0, 2), 8), ("groups", (0, 4), 1),
        ("chains", (0, 0), 7), ("chains", (1, 1), -1),
    ):  # fmt: skip
        wrong = {k.split(".")[1]: t.clone() for k, t in good.tensors.items()}
        wrong[name][place] = value
        batch = s.batch.with_prefixes(Prefixes.restored(good.numbers, {f"prefixes.{k}": t for k, t in wrong.items()}))
        assert refused(s, batch)
    other = Prefixes.restored(good.numbers, {k: t.long() for k, t in good.tensors.items()})
    assert {v.argument for v in refused(s, s.batch.with_prefixes(other))} == {
        f"prefixes.{n}" for n in ("groups", "members", "chains")
    }
    # In place, torch counts the change.
    good.chains[0, 0] = 3
    assert refused(s)


@needs_native
def test_changes_that_torch_does_not_see_give_nan() -> None:
    """Through an alias of NumPy, after the batch was validated."""
    for change in ("pages", "length", "tables"):
        s = case()
        good = attend(s, "native-shared")[0].clone()
        assert s.batch.prefixes is not None
        if change == "pages":
            s.batch.page_table.numpy()[1, 5] = int(s.batch.page_table[2, 9])
        elif change == "length":
            s.batch.kv_lens.numpy()[1] = 100
        else:
            s.batch.prefixes.groups.numpy()[0, 2] = 1
        out, lse = attend(s, "native-shared")
        rows = [1] if change != "tables" else [0, 1, 2]
        assert out[rows].isnan().all() and lse[rows].isnan().all()
        others = [i for i in range(3) if i not in rows]
        assert torch.equal(out[others], good[others])


# Where prefixes come from.


def test_prefixes_must_form_trees() -> None:
    for groups, text in (
        ([((0,), 0, 2)], "two sequences or more"),
        ([((0, 0), 0, 2)], "two sequences or more"),
        ([((0, 3), 0, 2)], "rows of the page table"),
        ([((0, 1), 2, 2)], "0 <= begin < end"),
        ([((0, 1), 1, 2)], "0 for the first prefix"),
        ([((0, 1), 0, 2), ((0, 1), 3, 4)], "where the prefix before it ends"),
        ([((0, 1), 0, 2), ((1, 2), 0, 2)], "where the prefix before it ends"),
        ([((0, 1), 0, 2), ((0.5, 1), 2, 3)], "of ints"),
        ([((0, True), 0, 2)], "of ints"),
        ([(([0], 1), 0, 2)], "of ints"),
        ([("ab", 0, 2)], "of ints"),
        ([(1, 0, 1)], r"prefixes\[0\]: given \(1, 0, 1\); allowed: \(sequences, begin, end\), such as"),
        ([((0, 1), 0, 2), ((0, 1), 0)], r"prefixes\[1\]: given \(\(0, 1\), 0\); allowed: \(sequences"),
        ([None], r"prefixes\[0\]: given nothing"),
        ("x", r"prefixes\[0\]: given 'x'; allowed: \(sequences"),
        (5, "prefixes: given 5; allowed: an iterable of"),
        (None, r"prefixes: given nothing \(None\); allowed: an iterable of"),
    ):
        with pytest.raises(ArgumentError, match=text):
            Prefixes(groups, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="share all columns before"):
        Prefixes([((0, 1), 0, 2), ((2, 3), 0, 2), ((1, 2), 2, 3)], 4)
    with pytest.raises(ArgumentError, match="prefixes of 3 sequences"):
        Batch(torch.zeros(2, 1).int(), torch.zeros(2).int(), torch.zeros(3).int(), prefixes=Prefixes([], 3))


def plainly_shared(table: list[list[int]], limits: list[int], a: int, b: int) -> int:
    """How many columns two sequences share, column by column."""
    n = 0
    while n < min(limits[a], limits[b]) and table[a][n] == table[b][n]:
        n += 1
    return n


@pytest.mark.parametrize("seed", range(20))
def test_find_finds_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of sequences shares as many columns as by comparison, if prefixes of any length are kept."""
    monkeypatch.setattr(prefix_search, "LEAST_KEYS", 1)
    r = random.Random(seed)
    seqs, width = r.randint(1, 9), r.randint(1, 9)
    table = [[r.randint(0, 1) + 2 * c for c in range(width)] for _ in range(seqs)]
    limits = [r.randint(0, width) for _ in range(seqs)]
    found = Prefixes.of_table(numpy.array(table), numpy.array(limits) * 4, 4)
    ends = {(a, b): 0 for a in range(seqs) for b in range(seqs) if a != b}
    for prefix in found.listed:
        ends |= {(a, b): prefix.end for a in prefix.sequences for b in prefix.sequences if a != b}
    for (a, b), end in ends.items():
        want = plainly_shared(table, limits, a, b)
        assert end == want or (found.levels == prefix_search.MOST_LEVELS and end < want)


def test_find_leaves_out_what_does_not_pay() -> None:
    table = numpy.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]])
    keys = numpy.array([64, 64, 64])
    assert Prefixes.of_table(table, keys, 16).listed == []
    assert [tuple(p) for p in Prefixes.of_table(table, 4 * keys, 64).listed] == [((0, 1, 2), 0, 2), ((0, 1), 2, 3)]
    # A short prefix is kept if a long one continues it.
    table = numpy.array([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 9, 9, 9, 9, 9, 9]])
    assert [tuple(p) for p in Prefixes.of_table(table, numpy.array([112] * 3), 16).listed] == [((0, 1, 2), 0, 1), ((0, 1), 1, 6)]
    assert Prefixes.of_table(numpy.array([[-1, 4], [-1, 4]]), numpy.array([128] * 2), 64).listed == []


def assert_found(found: Prefixes, table: numpy.ndarray, limits: numpy.ndarray, page_size: int) -> None:
    """The prefixes are those of the search group by group, and their tensors those that the constructor makes of them."""
    want = plainly_found(table, limits, page_size)
    assert sorted(found.listed, key=lambda prefix: (prefix.begin, prefix.sequences)) == want
    made = Prefixes(found.listed, found.seqs)
    assert made.numbers == found.numbers and made.saved_pages == found.saved_pages
    for name, tensor in made.tensors.items():
        assert torch.equal(tensor, found.tensors[name]) and found.tensors[name].is_contiguous(), name


@pytest.mark.parametrize("seed", range(40))
def test_search_finds_the_trees_of_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that continue copies of others; deep trees, wide tables, missing pages, groups that begin in different columns."""
    r = numpy.random.default_rng(seed)
    monkeypatch.setattr(prefix_search, "LEAST_KEYS", int(r.choice([1, 4, 16])))
    monkeypatch.setattr(prefix_search, "_FIRST_COLUMNS", int(r.choice([1, 3, 32])))
    seqs, width = int(r.integers(1, 60)), int(r.choice([1, 3, 12, 90]))
    table = r.permutation(seqs * width).reshape(seqs, width).astype(numpy.int32)
    for row in range(1, seqs):
        columns = r.integers(0, width + 1)
        table[row, :columns] = table[r.integers(0, row), :columns]
    if seed % 3 == 0:
        table[r.random(table.shape) < 0.02] = -1
        table[:, int(r.integers(0, width)) :] = -1
    order, limits = r.permutation(seqs), r.integers(0, width + 1, seqs)
    assert_found(Prefixes.of_table(table[order], limits * 2, 2), table[order], limits, 2)


class Engine:
    """Operations on a pool; each step says which pages are shared, and is compared with a search in its table."""

    def __init__(self, seed: int, shard: tuple[int, int, int] | None = None) -> None:
        self.r = random.Random(seed)
        self.pool = PagePool(pages=300, page_size=4, shard=shard)
        self.batched: list[Any] = []
        self.repeated = self.prefixes = 0
        self.pool.step({self.pool.sequence(): 30, self.pool.sequence(): 30})

    @property
    def live(self) -> list[Any]:
        return list(self.pool.sequences)

    def step(self) -> None:
        """Mostly with the sequences of the step before."""
        if self.r.random() < 0.2 or not set(self.batched) <= set(self.live) or not self.batched:
            self.batched = self.r.sample(self.live, self.r.randint(1, len(self.live)))
        counts = {sequence: self.r.choice([0, 1, 1, 1, 5]) for sequence in self.batched}
        known = getattr(self.pool._last, "_prefixes", None)
        try:
            batch = self.pool.step(counts, share=self.r.random() < 0.8)
        except quire.OutOfPages:
            self.pool.free(*self.r.sample(self.live, len(self.live) // 2))
            return
        if batch.prefixes is not None:
            self.repeated += self.pool._last._prefixes is known  # type: ignore[union-attr]
            self.prefixes += len(batch.prefixes.groups) > 0
            context = batch.kv_lens - batch.q_starts.diff()
            keys = context if batch.shard is None else torch.tensor([batch.shard.count(int(n)) for n in context])
            assert_found(batch.prefixes, batch.page_table.numpy(), (keys // 4).numpy(), 4)
            batch.prefixes.groups.fill_(7)  # a caller's change does not reach later steps
        if self.r.random() < 0.25:
            self.pool.rollback(batch)

    def change(self) -> None:
        one = self.r.choice(self.live)
        act = self.r.choice(["fork", "fork", "trim", "drop", "free", "extend", "swap", "sequence", "register"])
        if act == "fork" and len(self.live) < 12:
            self.pool.fork(one)
        elif act == "trim":
            least = one.pages.count(-1) * 4 if self.pool.shard is None else one.length
            self.pool.trim(one, self.r.randint(min(least, one.length), one.length))
        elif act == "drop" and self.r.random() < 0.3:
            self.pool.drop(one, self.r.randint(0, one.length))
        elif act == "free" and len(self.live) > 3:
            self.pool.free(one)
        elif act == "extend" and self.pool.free_pages > 10:
            self.pool.extend(one, self.r.randint(0, 9))
        elif act == "swap" and self.pool.free_pages > len(one.pages):
            self.pool.swap_out(one)
            self.pool.swap_in(one)
        elif act == "sequence" and len(self.live) < 12:
            self.pool.sequence()
        elif act == "register" and self.pool.shard is None and len(self.live) < 12:
            self.pool.register(one, [0] * one.length)
            self.pool.match([0] * one.length)


@pytest.mark.parametrize("shard", [None, (1, 2, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_pool_knows_prefixes_after_any_change(
    seed: int, shard: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_search, "LEAST_KEYS", 1)
    engine = Engine(seed, shard)
    for _ in range(150):
        for _ in range(engine.r.randint(1, 6)):
            engine.step()
        engine.change()
    assert engine.repeated > 100 and engine.prefixes > 30, (engine.repeated, engine.prefixes)


def pool_of_forks() -> tuple[PagePool, list[Any]]:
    pool = PagePool(pages=200, page_size=16)
    prompt = pool.sequence()
    pool.step({prompt: 200})
    return pool, [pool.fork(prompt) for _ in range(4)]


def listed(batch: Batch) -> list[tuple[Any, ...]]:
    assert batch.prefixes is not None
    return [tuple(prefix) for prefix in batch.prefixes.listed]


def test_pool_knows_prefixes_after_every_change() -> None:
    pool, answers = pool_of_forks()
    batch = pool.step(dict.fromkeys(answers, 1), share=True)
    assert listed(batch) == [((0, 1, 2, 3), 0, 12)]  # the thirteenth page has been copied on write
    assert pool.step(dict.fromkeys(answers, 1)).prefixes is None
    pool.rollback(pool.step(dict.fromkeys(answers, 30), share=True))
    pool.trim(answers[0], 150)
    pool.free(answers[1])
    del answers[1]
    batch = pool.step(dict.fromkeys(answers, 100), share=True)
    assert listed(batch) == [((0, 1, 2), 0, 9), ((1, 2), 9, 12)] or listed(batch) == [((0, 1, 2), 0, 9)]
    late = [pool.fork(answers[2]) for _ in range(2)]
    batch = pool.step(dict.fromkeys([late[0], answers[0], *answers[1:], late[1]], 1), share=True)
    assert listed(batch)[0][0] == (0, 1, 2, 3, 4) and ((0, 3, 4)) in [p[0] for p in listed(batch)]
    with pytest.raises(quire.StaleBatch):
        pool.step({late[0]: 1})
        quire.attend(torch.zeros(5, 2, 64), KVCache.allocate(pool, kv_heads=2, head_dim=64), batch)


@pytest.mark.parametrize("share", [1, 0, None, "yes"])
def test_share_is_a_bool(share: Any) -> None:
    pool, answers = pool_of_forks()
    with pytest.raises(ArgumentError, match=r"share: given .*; allowed: True or False"):
        pool.step(dict.fromkeys(answers, 1), share=share)
    assert pool.steps == 1


def test_hits_of_the_prefix_cache_are_shared() -> None:
    pool = PagePool(pages=100, page_size=16)
    prompt = list(range(100))
    first = pool.match(prompt)
    pool.step({first: 100})
    pool.register(first, prompt)
    others = [pool.match([*prompt[:90], 7, 7, n]) for n in range(3)]
    batch = pool.step({first: 1, **dict.fromkeys(others, 13)}, share=True)
    assert listed(batch) == [((0, 1, 2, 3), 0, 5)]
    assert Prefixes.find(batch).listed == batch.prefixes.listed  # type: ignore[union-attr]


def test_a_batch_keeps_its_prefixes(tmp_path: Path) -> None:
    pool, answers = pool_of_forks()
    batch = pool.step(dict.fromkeys(answers, 1), share=True)
    want = listed(batch)
    for other in (batch.clone(), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch.with_spans(None)):
        assert listed(other) == want and other.prefixes is not None
        assert other.prefixes.numbers == batch.prefixes.numbers  # type: ignore[union-attr]
    moved = batch.to("meta")
    assert moved.prefixes is not None and moved.prefixes.groups.is_meta and moved.prefixes.saved_pages == 36
    assert batch.with_prefixes(None).prefixes is None
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=64)
    k = torch.randn(4, 2, 64, dtype=torch.bfloat16)
    quire.write(k, k, cache, batch)
    with quire.record(tmp_path / "call.safetensors"):
        quire.attend(k, cache, batch)
    (call,) = load(tmp_path / "call.safetensors")
    assert listed(call.batch) == want and call.batch.prefixes is not None and call.batch.prefixes.saved_pages == 36


def test_buffers() -> None:
    buffers = Prefixes.allocate(seqs=5, prefixes=3, members=9, pages=20, levels=2)
    assert buffers.listed == [] and buffers.saved_pages == 0
    given = Prefixes([((0, 1, 2), 0, 4), ((0, 2), 4, 6)], 4)
    place = buffers.groups.data_ptr()
    assert buffers.fill(given).listed == given.listed and buffers.groups.data_ptr() == place
    assert (buffers.saved_pages, buffers.most_pages) == (10, 20)
    assert buffers.fill(Prefixes([], 1)).listed == [] and (buffers.chains[:, 0] == 0).all() and (buffers.chains[:, 1:] == -1).all()
    for other in (Prefixes([], 6), Prefixes([((0, 1), 0, 21)], 2), Prefixes([((0, 1, 2, 3, 4), 0, 1), ((0, 1, 2, 3, 4), 1, 2)], 5)):
        with pytest.raises(ArgumentError, match="as allocated"):
            buffers.fill(other)
    with pytest.raises(ArgumentError, match="members"):
        Prefixes.allocate(seqs=1, prefixes=1, members=-1, pages=1)
    s = case()
    assert s.batch.prefixes is not None
    s.batch.prefixes = Prefixes.allocate(seqs=3, prefixes=4, members=8, pages=9, levels=3).fill(s.batch.prefixes)
    s.check(*attend(s))


def test_compiled_functions_refuse_prefixes() -> None:
    s = case()
    with pytest.raises(ArgumentError, match="with_prefixes"):
        torch.compile(lambda q: quire.attend(q, s.cache, s.batch), backend="eager", fullgraph=True)(s.q)
