"""Selected keys. Each kernel of this machine is compared with the reference; every slot and table cell that no query sees is
poison. Then what the contract checks, and that a batch keeps its selection wherever it goes."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire import Batch, KVCache, Options, PagePool, Select
from quire.conformance.oracle.exact import exact
from quire.conformance.recording.record import load
from quire.conformance.recording.replay import call_of
from quire.contract import validated
from quire.kernels.native import library
from quire.kernels.torch.selected import AttendSelected
from quire.platform import Platform
from support import kernels
from support.scenario import Scenario, build

KERNELS = [name for name in ("torch", "native") if name == "torch" or kernels.levels()]
INDICES = ((torch.int32,) * 3, (torch.int64,) * 3, (torch.int64, torch.int32, torch.int64))
KINDS = ("positions", "columns")
each_kernel = kernels.each_kernel


def attend(s: Scenario, kernel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return quire.attend(s.q, s.cache, s.batch, s.options, lse=True, kernel=kernel)


def drawn(seed: int) -> dict[str, Any]:
    """A random mixed batch with some features."""
    r = random.Random(seed)
    kv_lens = [r.choice([0, 1, r.randint(2, 70)]) for _ in range(r.randint(1, 4))]
    q_lens = [min(r.choice([0, 1, 1, 2, 7, 30]), n) for n in kv_lens]
    if r.random() < 0.2:
        q_lens[0], kv_lens[0] = r.choice([1, 4, 40]), r.randint(280, 600)
    features: dict[str, Any] = r.choice([{}, {}, {"causal": False}, {"causal": "mixed"}])
    features = features | {"batch_invariant": r.random() < 0.2}
    for chance, name, values in (
        (0.4, "window", [5, 20, (7, 3), (None, 2), (3, None)]),
        (0.4, "alibi", [True]),
        (0.3, "softcap", [3.0]),
        (0.4, "sinks", [True]),
    ):
        if r.random() < chance:
            features[name] = r.choice(values)
    heads = r.choice([1, 2, 3])
    return {
        "q_lens": q_lens, "kv_lens": kv_lens, "page_size": r.choice([4, 8, 16]), "kv_heads": heads,
        "group": r.choice([1, 2, 8, 20]),
        "select": r.choice(KINDS), "select_heads": r.choice([1, heads]), "scales": r.choice(["tensor", "head", "token"]),
        "format": r.choice(["fp32", "fp32", "bf16", "e4m3fn", "e5m2", "int8"]), "index": r.choice(INDICES),
        "padding": r.choice([0, 2]), "layout": r.choice(["nhd", "hnd", "vllm_x", "aiter", "vllm_joint"]),
        "q_dtype": r.choice(["fp32", "fp32", "bf16", "fp16"]), **features,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed: int) -> None:
    s = build(seed, **drawn(seed))
    assert [v for v in quire.check(s.q, s.cache, s.batch, s.options) if not v.harmless] == []
    for name in KERNELS:
        s.check(*attend(s, name), factors=s.q.dtype)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("select", KINDS)
def test_every_instruction_set(select: str) -> None:
    for heads in (1, 2):
        case: dict[str, Any] = {"window": 270, "alibi": True, "select": select, "select_heads": heads}
        s = build(3, [1, 3, 40, 2], [300, 300, 300, 9], **case)
        s.check(*attend(s))


@pytest.mark.parametrize("select", KINDS)
def test_reference_of_single_keys(select: str) -> None:
    """A query that sees one key gives its value."""
    v = torch.arange(6.0).view(6, 1, 1)
    q, k = torch.ones(2, 1, 1), torch.ones(6, 1, 1)
    out, lse = quire.reference.attention(q, k, v, select=torch.tensor([[[1, -1]], [[5, 4]]]))
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 4.5], dtype=torch.float64))
    out, lse = quire.reference.attention(q, k, v, select=torch.tensor([[[5]], [[-1]]]))  # 5 is after the first query
    assert out.flatten().tolist() == [0.0, 0.0] and lse.flatten().tolist() == [-torch.inf, -torch.inf]


# The contract.


def refused(s: Scenario, entries: torch.Tensor, **call: Any) -> list[quire.Violation]:
    assert s.batch.select is not None
    batch = s.batch.with_select(Select(**{s.batch.select.kind: entries}))
    with pytest.raises(quire.ContractError) as raised:
        quire.attend(s.q, s.cache, batch, call.pop("options", s.options), **call)
    return list(raised.value.violations)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("select", KINDS)
def test_values_that_are_refused(select: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native validation, and with the rules alone."""
    if not native or not library.FILE.exists():
        monkeypatch.setattr(validated, "_loaded", [None])
    s = build(1, [1, 2], [30, 20], page_size=8, select=select, select_heads=2)
    assert s.batch.select is not None
    attend(s)
    entries = s.batch.select.entries
    limit = 20 if select == "positions" else 3
    row = 2 if select == "positions" else 1
    for bad in (limit, -2, 2**31 - 1):
        wrong = entries.clone()
        wrong[row, 1] = -1
        wrong[row, 1, 3] = bad
        (violation,) = refused(s, wrong)
        assert (violation.rule, violation.argument) == ("selection", f"select.{select}[{row}, 1, 3]")
        assert (violation.given, violation.seq) == (str(bad), 1) and f"[0, {limit})" in violation.allowed
    wrong = entries.clone()
    wrong[row, 1] = -1
    wrong[row, 1, 1] = wrong[row, 1, 4] = 0
    (violation,) = refused(s, wrong)
    assert violation.argument == f"select.{select}[{row}, 1, 4]" and "at most once" in violation.allowed
    # A selected page that does not exist is refused, one that no query sees is not.
    wrong[row, 1, 4] = -1
    s.batch.page_table[1] = s.cache.pages
    assert {v.rule for v in refused(s, wrong)} == {"table"}
    hidden = torch.full_like(entries, -1)
    hidden[0] = entries[0]
    attend_hidden = s.batch.with_select(Select(**{select: hidden}))
    quire.attend(s.q, s.cache, attend_hidden, s.options)


def test_a_change_in_place_is_validated_again() -> None:
    s = build(1, [1], [30], select="positions")
    assert s.batch.select is not None
    attend(s)
    s.batch.select.entries[0, 0, :2] = 3
    with pytest.raises(quire.ContractError, match="at most once"):
        attend(s)


@pytest.mark.parametrize("select", KINDS)
def test_calls_that_are_refused(select: str) -> None:
    s = build(1, [1, 2], [30, 20], select=select)
    assert s.batch.select is not None
    entries = s.batch.select.entries
    for wrong in (entries[:1], entries[0], entries.expand(-1, 3, -1), entries.float()):
        assert f"select.{select}" in {v.argument for v in refused(s, wrong)}
    mask = Options(mask=torch.ones(3, 2, dtype=torch.bool))
    assert [v.argument for v in refused(s, entries, options=mask)] == ["mask"]
    new = (torch.zeros(3, 2, 16), torch.zeros(3, 2, 16))
    assert [v.argument for v in refused(s, entries, new=new)] == ["new"]
    s.batch.shard = quire.cache.shard.Shard(0, 2, 1)
    assert [v.argument for v in refused(s, entries)] == ["shard"]


def test_arguments_that_are_refused() -> None:
    for given in ({}, {"positions": torch.zeros(1, 1, 1), "columns": torch.zeros(1, 1, 1)}, {"columns": [1]}):
        with pytest.raises(quire.ArgumentError):
            Select(**given)
    with pytest.raises(quire.ArgumentError, match=r"select.*quire\.Select\(positions"):
        Batch(*(torch.zeros(shape, dtype=torch.int32) for shape in ((1, 1), (1,), (2,))), select=torch.zeros(1, 1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("select", KINDS)
def test_a_change_that_no_check_sees_gives_nan(select: str, kernel: str) -> None:
    """Through numpy: entries out of range, and pages out of range, in the rows and heads that read them."""
    s = build(2, [1, 1], [30, 20], page_size=8, select=select, select_heads=2)
    assert s.batch.select is not None
    good, _ = attend(s, kernel)
    entries = s.batch.select.entries.numpy()
    before = entries.copy()
    for bad in (-2, 30 if select == "positions" else 4, 2**31 - 1):
        entries[0, 1, :2] = bad, -1
        out, lse = attend(s, kernel)
        assert out[0, 2:].isnan().all() and lse[0, 2:].isnan().all()
        assert torch.equal(out[0, :2], good[0, :2]) and torch.equal(out[1], good[1])
        entries[:] = before
    s.batch.page_table.numpy()[1] = s.cache.pages
    out, _ = attend(s, kernel)
    assert torch.equal(out[0], good[0]) and out[1].isnan().all(-1)[s.expected_lse[1] > -torch.inf].all()


def test_a_ledger_needs_selected_slots_only() -> None:
    pool = PagePool(pages=8, page_size=4)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32, ledger=True)
    sequence = pool.sequence()
    first = pool.step({sequence: 8})
    rows = torch.randn(8, 1, 8)
    quire.write(rows, rows, cache, first)
    batch = pool.step({sequence: 1})  # position 8 is not written
    quire.attend(rows[:1], cache, batch.with_select(Select(columns=torch.tensor([[[1, 0]]]))))
    with pytest.raises(quire.ContractError, match="residency"):
        quire.attend(rows[:1], cache, batch.with_select(Select(columns=torch.tensor([[[2]]]))))


# Invariance.


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("select", KINDS)
def test_invariance(select: str, kernel: str) -> None:
    """Batch-invariant bits: a sequence alone, with other entries of -1, and its new tokens in two calls."""
    s = build(5, [20, 3], [300, 70], select=select, batch_invariant=True, alibi=True)
    assert s.batch.select is not None
    entries = s.batch.select.entries
    whole, _ = attend(s, kernel)
    table, lens = s.batch.page_table[:1], s.batch.kv_lens[:1]
    for first, last in ((0, 20), (0, 13), (13, 20)):
        mine = entries[first:last] if select == "positions" else entries[:1]
        mine = torch.where(mine < (280 + last if select == "positions" else 99), mine, -1)
        padded = torch.cat((mine, torch.full_like(mine, -1)), -1)
        part = Batch(table, lens - 20 + last, torch.tensor([0, last - first]), select=Select(**{select: padded}))
        limit = -(-(280 + last) // (1 if select == "positions" else 16))
        part.select.entries[part.select.entries >= limit] = -1  # type: ignore[union-attr]
        assert torch.equal(quire.attend(s.q[first:last], s.cache, part, s.options, kernel=kernel), whole[first:last])


# The batch, and where it goes.


@pytest.mark.parametrize("select", KINDS)
def test_a_batch_keeps_its_selection(select: str) -> None:
    s = build(1, [1, 9], [30, 9], select=select)
    assert s.batch.select is not None
    for batch in (s.batch.clone(), copy.deepcopy(s.batch), pickle.loads(pickle.dumps(s.batch)), s.batch.to("meta")):
        assert batch.select is not None and batch.select.kind == select
        if batch.select.entries.is_cpu:
            assert torch.equal(batch.select.entries, s.batch.select.entries)
            assert batch.select.entries.data_ptr() != s.batch.select.entries.data_ptr()
    assert f"select=Select({select}=int32[" in repr(s.batch)
    assert s.batch.with_select(None).select is None and s.batch.select is not None
    problem = quire.explain(s.q, s.cache, s.batch).problem
    assert problem.features == ("select",) and quire.Problem.from_json(problem.to_json()) == problem
    hopper = quire.explain(s.q, s.cache, s.batch, platform=Platform.named("sm90"))
    refused_by = {c.kernel.name: [found.rule for found in c.findings if not found.holds] for c in hopper.candidates}
    assert "select" in refused_by["gluon-mixed"] and "select" in refused_by["gluon-mixed-bytes"] and not refused_by["triton-mixed"]


def test_a_derived_batch_shares_the_step_of_a_pool() -> None:
    pool = PagePool(pages=8, page_size=4)
    sequence = pool.sequence()
    batch = pool.step({sequence: 5}).with_select(Select(columns=torch.zeros(1, 1, 1, dtype=torch.int64)))
    assert batch.step_id is not None and batch.positions.tolist() == [0, 1, 2, 3, 4]
    pool.step({sequence: 1})
    with pytest.raises(quire.StaleBatch):
        batch.clone()
    fixed = Batch.allocate(seqs=1, pages_per_seq=2, tokens=4)
    with pytest.raises(quire.ArgumentError, match="fill"):
        fixed.with_select(None).fill(fixed.page_table, fixed.kv_lens, fixed.q_starts)


@pytest.mark.parametrize("select", KINDS)
def test_torch_operators(select: str) -> None:
    s = build(1, [1, 2], [30, 20], select=select)
    compiled = torch.compile(lambda q, batch: quire.attend(q, s.cache, batch, s.options), fullgraph=True, backend="eager")
    assert torch.equal(compiled(s.q, s.batch), attend(s)[0])


def test_one_kernel_serves_every_selection_of_a_kind() -> None:
    """The number of entries, and whether heads share them, are arguments; the kind and the type are compiled for."""
    pytest.importorskip("triton")

    def nothing(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = KVCache.wrap(nothing(9, 16, 8, 128), nothing(9, 16, 8, 128), layout="nhd")

    def keys(select: Select | None, tokens: int = 3) -> tuple[str, ...]:
        tensors = (nothing(*shape, dtype=torch.int32) for shape in ((3, 8), (3,), (4,)))
        batch = Batch(*tensors, max_q_len=1 if tokens == 3 else tokens, max_kv_len=100, select=select)
        return quire.explain(nothing(tokens, 32, 128), cache, batch, platform=Platform.named("sm90")).compiled

    found = []
    for kind, index in ((kind, index) for kind in KINDS for index in (torch.int32, torch.int64)):
        few, many = (Select(**{kind: nothing(3, heads, n, dtype=index)}) for heads, n in ((1, 4), (8, 2048)))
        assert keys(few) == keys(many)
        found.append(keys(few)[0])
    assert len({*found, keys(None)[0]}) == 5


def test_a_recording_has_the_selection(tmp_path: Path) -> None:
    for select in KINDS:
        s = build(1, [1, 4], [30, 20], select=select, select_heads=2, index=INDICES[1])
        file = tmp_path / f"{select}.safetensors"
        with quire.record(file):
            attend(s)
        (recorded,) = load(file)
        assert recorded.batch.select is not None and s.batch.select is not None and recorded.batch.select.kind == select
        assert torch.equal(recorded.batch.select.entries, s.batch.select.entries)
        out = torch.zeros(5, 4, 16)
        call = call_of(recorded, with_lse=False)
        out[:] = exact(call).out
        s.check(out)


# The tests above can fail.


def neighbours(kernel: AttendSelected, *given: Any) -> Any:
    """The keys of the neighbouring heads."""
    part, page, offset, here, heads = given
    return GATHER(kernel, part, page.roll(1, 1), offset.roll(1, 1), here, heads)


GATHER, VISIBLE = AttendSelected._gather, AttendSelected._visible
FAULTS: dict[str, tuple[str, Any]] = {
    "the keys of another head": ("_gather", neighbours),
    "the next slot": ("_gather", lambda k, part, page, offset, here, heads: GATHER(k, part, page, offset ^ 1, here, heads)),
    "no causality": ("_visible", lambda kernel, key, at, rows: VISIBLE(kernel, key, at, rows._replace(causal=False))),
    "padding is a key": ("_visible", lambda kernel, key, at, rows: VISIBLE(kernel, key.clamp(min=0), at, rows)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttendSelected, *FAULTS[fault])
    s = build(7, [1, 14, 3], [65, 20, 40], page_size=8, select="positions", select_heads=2)
    with pytest.raises(AssertionError):
        s.check(*attend(s, "torch"))
