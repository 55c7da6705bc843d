"""What is kept of one call must hold for the next: all that a launcher is made for is in the Problem, and nothing else."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import quire
from quire import launch
from quire.cache.ledger import Ledger
from quire.contract.call import Call
from quire.errors import ArgumentError
from quire.options import Options
from quire.problem import Extent, Problem
from support.launched import bits, problem_of
from support.scenario import Scenario, build

OTHERS: dict[str, Any] = {
    "scale": -0.3,
    "causal": False,
    "window": 4,
    "softcap": 2.0,
    "alibi": torch.ones(4),
    "sinks": torch.ones(4),
    "mask": torch.ones(11, 11, dtype=torch.bool),
    "positions": torch.arange(11),
    "q_scale": 0.5,
    "out_scale": 0.5,
    "batch_invariant": True,
}


def problem_of_call(operation: str, *call: Any, **more: Any) -> Problem:
    return launch.described(operation, Call(*call, **more))[0]


def small(**how: Any) -> Scenario:
    return build(1, [1, 2], [20, 30], **how)


def of(s: Scenario, options: Options) -> Problem:
    return problem_of(replace(s, options=options))


def test_every_option_makes_a_problem() -> None:
    assert set(OTHERS) == {field.name for field in fields(Options)}
    s = small()
    problems = [of(s, Options())]
    for name, value in OTHERS.items():
        more = {"mask": OTHERS["mask"]} if name == "positions" else {}
        problems.append(of(s, Options(**{name: value}, **more)))
    problems.append(of(s, Options(sinks=torch.ones(4, dtype=torch.bfloat16))))
    assert len(set(problems)) == len(problems)


def test_values_make_none() -> None:
    s = small()
    for options in ((Options(), Options(scale=0.2)), (Options(softcap=1.0), Options(softcap=2.0))):
        assert of(s, options[0]) is of(s, options[1])
    assert of(s, Options(sinks=torch.zeros(4))) is of(s, Options(sinks=torch.ones(8)[::2]))


def test_parameters_that_are_converted_in_place() -> None:
    """What `module.to(torch.bfloat16)` does."""
    sinks = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    s, options = small(), Options(sinks=sinks)
    before = of(s, options)
    sinks.data = sinks.data.bfloat16()
    assert of(s, options) != before and of(s, options).sinks_dtype == "bf16"


def test_batches_of_other_sizes_have_one_problem() -> None:
    s = build(1, [1, 2], [20, 30])
    t = build(2, [1] * 4 + [30], [50] * 5)
    assert problem_of(s) is problem_of(t)
    for hints in ({}, {"max_q_len": 1, "max_kv_len": 1}, {"max_q_len": 99, "max_kv_len": 10**6}):
        wide = torch.cat((t.batch.page_table, t.batch.page_table), 1)[:, : t.batch.page_table.shape[1] + 1]
        batch = quire.Batch(wide, t.batch.kv_lens, t.batch.q_starts, **hints)
        assert problem_of(replace(t, batch=batch)) is problem_of(t)


def test_the_extent_takes_hints_no_further_than_shapes() -> None:
    s = build(2, [1] * 4 + [30], [50] * 5, page_size=16)
    room, starts = s.batch.page_table.shape[1] * 16, s.batch.q_starts

    def of_hints(**hints: int) -> Extent:
        return Extent.of(s.q, s.cache, quire.Batch(s.batch.page_table, s.batch.kv_lens, starts, **hints))

    assert of_hints() == Extent(5, s.q.shape[0], s.q.shape[0], room)
    assert of_hints(max_q_len=3, max_kv_len=7) == Extent(5, s.q.shape[0], 3, 7)
    assert of_hints(max_q_len=10**6, max_kv_len=10**6) == of_hints()


@pytest.mark.parametrize("change", ["long table", "long kv_lens", "long q_starts"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_batch_that_is_changed(change: str, copied: bool) -> None:
    s = small()
    before, mine = problem_of(s), copy.copy(s.batch) if copied else s.batch
    name = {"long table": "page_table"}.get(change, change.removeprefix("long "))
    setattr(mine, name, getattr(mine, name).long())
    after = problem_of(replace(s, batch=mine))
    types = {"page_table": "int64+int32+int32", "kv_lens": "int32+int64+int32", "q_starts": "int32+int32+int64"}
    assert before.index == "int32" and after == before.replace(index=types[name])
    assert after.index_types == tuple(types[name].split("+")) and before.index_types == ("int32",) * 3


def test_a_cache_that_is_changed() -> None:
    s = small(format="e4m3fn", q_dtype="bf16")
    problems = [problem_of(s)]
    s.cache.ledger = Ledger(s.cache.pages, s.cache.page_size, s.cache.device)
    assert problem_of(s) is problems[0], "the check of a ledger has a launcher of its own"
    for name in ("k_scale", "v_scale"):
        setattr(s.cache, name, torch.ones(s.cache.kv_heads))
        problems.append(problem_of(s))
    assert len(set(problems)) == 3
    s.cache.k_scale = torch.zeros(s.cache.kv_heads)
    assert problem_of(s) is problems[2], "other numbers are no other problem"


@pytest.mark.parametrize("name", ["k", "v"])
def test_the_pages_of_a_cache_stay(name: str) -> None:
    """Views and sizes are worked out once."""
    cache = small(format="bf16", q_dtype="bf16").cache
    with pytest.raises(AttributeError):
        setattr(cache, name, getattr(cache, name))
    with pytest.raises(AttributeError):
        delattr(cache, name)
    same = copy.deepcopy(cache)
    assert torch.equal(bits(same.k), bits(cache.k)) and same.k_view.data_ptr() == same.k.data_ptr() != cache.k.data_ptr()


@pytest.mark.parametrize("pages", [1, 2, 1000])
def test_the_number_of_pages_is_nothing_to_be_compiled_for(pages: int) -> None:
    def cache(pages: int) -> quire.KVCache:
        k, v = (torch.empty(pages, 16, 2, 64, device="meta") for _ in "kv")
        return quire.KVCache.wrap(k, v, layout="nhd")

    assert cache(pages).storage == cache(3).storage


ROWS: dict[str, tuple[Any, str]] = {
    "contiguous": (lambda n, h, d: torch.empty(n, h, d), "aligned"),
    "of a fused projection": (lambda n, h, d: torch.empty(n, h + 4, d)[:, 2:-2], "aligned"),
    "heads first": (lambda n, h, d: torch.empty(h, n, d).transpose(0, 1), "aligned"),
    "every other element": (lambda n, h, d: torch.empty(n, h, 2 * d)[..., ::2], "generic"),
    "rows of odd length": (lambda n, h, d: torch.empty(n, h, d + 1)[..., :d], "generic"),
    "from an odd address": (lambda n, h, d: torch.empty(n * h * d + 1)[1:].view(n, h, d), "generic"),
}


@pytest.mark.parametrize("which", ["q", "out", "new_k", "new_v", "k", "v"])
@pytest.mark.parametrize("name", ROWS)
def test_strided_and_misaligned_rows_take_the_generic_kernels(name: str, which: str) -> None:
    make, memory = ROWS[name]
    s = small(head_dim=32)
    tokens, dim = s.q.shape[0], 32
    strange = make(tokens, s.q.shape[1] if which in ("q", "out") else s.cache.kv_heads, dim)
    plain = torch.empty(tokens, s.cache.kv_heads, dim)
    if which in ("k", "v"):
        k, v = (strange, plain) if which == "k" else (plain, strange)
        found = problem_of_call("write", s.cache, s.batch, k=k, v=v)
    else:
        new = None if which in ("q", "out") else (strange, plain) if which == "new_k" else (plain, strange)
        out = strange if which == "out" else None
        found = problem_of_call("attend", s.cache, s.batch, strange if which == "q" else s.q, new=new, out=out)
    assert found.memory == memory


@pytest.mark.parametrize("name", ["kv_lens", "q_starts", "page_table"])
def test_strided_indices_take_the_generic_kernels(name: str) -> None:
    s = small()
    was = getattr(s.batch, name)
    apart = torch.stack((was, was), -1)[..., 0]
    batch = copy.copy(s.batch)
    setattr(batch, name, apart)
    assert problem_of(replace(s, batch=batch)) == problem_of(s).replace(memory="generic")


def test_json_both_ways() -> None:
    for s in (small(), small(format="e4m3fn", q_dtype="bf16", layout="vllm_x", window=9)):
        problem = problem_of(s)
        assert Problem.from_json(problem.to_json()) == problem
        assert hash(Problem.from_json(problem.to_json())) == hash(problem)


def test_a_problem_in_words_is_one_with_an_allocated_cache() -> None:
    for format, layout in (("bf16", "nhd"), ("e4m3fn", "vllm_x"), ("e5m2", "hnd"), ("fp16", "vllm_joint")):
        pool = quire.PagePool(8, 16)
        dtype = {"bf16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "fp16": torch.float16}[format]
        cache = quire.KVCache.allocate(pool, kv_heads=2, head_dim=64, dtype=dtype, layout=layout)
        q = torch.empty(1, 4, 64, dtype=torch.bfloat16)
        found = problem_of_call("attend", cache, pool.step({pool.sequence(): 1}), q)
        scales = "none" if cache.k_scale is None else "tensor"
        assert found == Problem(4, 2, 64, 16, format=format, layout=layout, scales=scales)


def test_one_launcher_serves_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(launch, "_known", kept)
    for seed in range(5):
        s = build(seed, [1, seed, 2 * seed], [20, 30, 40])
        s.check(quire.attend(s.q, s.cache, s.batch, s.options))
    assert len(kept) == 1
    monkeypatch.setattr(launch, "MAX_PROBLEMS", 1)
    quire.attend(s.q, s.cache, s.batch, Options(window=3))
    assert len(kept) == 1, "at most so many are kept"


@pytest.mark.parametrize("name", ["q_scale", "out_scale"])
def test_scales_in_host_memory_are_read_in_every_call(name: str) -> None:
    """A launcher that is found again must not have kept the number."""
    s = small(q_dtype="e4m3fn", format="bf16") if name == "q_scale" else small()
    scale = torch.tensor(0.5)
    options = Options(**{name: scale})
    first = quire.attend(s.q, s.cache, s.batch, options).float()
    scale.fill_(2.0)
    second = quire.attend(s.q, s.cache, s.batch, options).float()
    assert torch.equal(second, quire.attend(s.q, s.cache, s.batch, Options(**{name: 2.0})).float())
    assert not torch.equal(first, second)


READ = ["sinks", "k_scale", "v_scale", "page_table", "kv_lens", "q_starts"]


@pytest.mark.parametrize("name", READ)
def test_an_output_over_what_is_read(name: str) -> None:
    s = small(format="e4m3fn", q_dtype="fp32", sinks=True)
    quire.attend(s.q, s.cache, s.batch, s.options)
    owner: Any = s.options if name == "sinks" else s.cache if "scale" in name else s.batch
    was = getattr(owner, name)
    memory = torch.zeros(max(s.q.numel(), 2 * was.numel()))
    over = memory.view(was.dtype)[: was.numel()].view(was.shape).copy_(was)
    out = memory[: s.q.numel()].view(s.q.shape)
    if owner is s.options:
        s.options = replace(s.options, sinks=over)
    else:
        setattr(owner, name, over)
    with pytest.raises(quire.ContractError, match=f"memory shared with {name}"):
        quire.attend(s.q, s.cache, s.batch, s.options, out=out)


def test_numbers_that_torch_negates_when_it_reads() -> None:
    s = small()
    negated = torch.complex(s.q, s.q).conj().imag
    assert negated.is_neg()
    with pytest.raises(ArgumentError, match="resolve_neg"):
        quire.attend(negated, s.cache, s.batch)
    assert torch.equal(quire.attend(negated.resolve_neg(), s.cache, s.batch), quire.attend(-s.q, s.cache, s.batch))


def test_calls_of_the_same_layer_have_one_problem() -> None:
    """By whichever operation: vLLM's and those of graphs come this way too."""
    s = small()
    call = Call(s.cache, s.batch, s.q, s.options)
    assert launch.described("attend", call)[0] is launch.described("audit", call)[0] is problem_of(s)


def test_heads_that_32_bits_do_not_reach_are_generic() -> None:
    """Queries stored head by head: the last head begins 2^31 elements behind the first."""
    s = build(1, [3], [9])
    q = torch.empty(16, 3 * 10**6, 64, device="meta").transpose(0, 1)
    cache = quire.KVCache.wrap(*(torch.empty(2, 16, 1, 64, device="meta") for _ in "kv"), layout="nhd")
    batch = quire.Batch(*(t.to("meta") for t in (s.batch.page_table, s.batch.kv_lens, s.batch.q_starts)))
    assert problem_of_call("attend", cache, batch, q).memory == "generic"
    assert problem_of_call("attend", cache, batch, q[:, :2]).memory == "aligned"


def test_equal_facts_are_one_object() -> None:
    s = build(1, [3], [9])
    given = problem_of_call("attend", s.cache, s.batch, s.q, out=torch.empty_like(s.q))
    assert problem_of_call("attend", s.cache, s.batch, s.q) is given
