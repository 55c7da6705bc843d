"""The operators in graphs: torch's own checks of their declarations, and compiled steps that give what plain calls give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests.generate_tests import OpCheckError

import quire
from quire import ops
from quire.attend import is_traced
from quire.errors import ArgumentError
from support.scenario import TYPES, Scenario, build

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
ROWS = {"q_lens": [1, 5, 0], "kv_lens": [9, 5, 7], "page_size": 4, "padding": 2}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-softcap-sinks": {"window": 6, "softcap": 3.0, "sinks": True},
    "non-causal-right": {"causal": False, "window": (None, 1)},
    "tree-alibi": {"mask": True, "alibi": True},
    "causal-per-sequence": {"causal": "mixed", "scale": 0.3},
    "context-form": {"form": "context"},
    "spans": {"spans": "images"},
    "int8-scales-per-head": {"format": "int8", "scales": "head"},
    "e4m3fn-bytes-scales-per-token": {"format": "e4m3fn", "storage": "bytes", "scales": "token"},
    "int8-int4-scales-per-token": {"format": "int8", "v_format": "int4", "scales": "token"},
    "nvfp4-swizzled": {"format": "nvfp4", "v_format": "nvfp4_swizzled", "head_dim": 64},
    "bf16-joint-int64": {"format": "bf16", "q_dtype": "bf16", "layout": "vllm_joint", "index": (torch.int64,) * 3},
    "vllm_x": {"layout": "vllm_x"},
}


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    torch._dynamo.reset()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def parts(s: Scenario) -> tuple[Any, ...]:
    return (*ops._of_cache(s.cache), *ops._of_batch(s.batch, s.batch.slots), *ops._of_options(s.options))


def new_tokens(s: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the right shape, the same for each call."""
    g = torch.Generator().manual_seed(5)
    sizes = (s.cache.head_dim, s.cache.v_head_dim)
    made = (torch.randn(s.q.shape[0], s.cache.kv_heads, dim, generator=g) for dim in sizes)
    k, v = (t.to(s.q.device, s.q.dtype if s.q.dtype in (torch.float16, torch.bfloat16) else torch.float32) for t in made)
    return k, v


def opcheck(op: Any, *args: Any) -> None:
    torch.library.opcheck(op, args)


# What torch finds out about the declarations.


INTO = [*((name, False) for name in CALLS), ("plain", True), ("context-form", True)]


@pytest.mark.parametrize("name, given", INTO, ids=[f"{name}{'-out-lse' if given else ''}" for name, given in INTO])
def test_attend_is_as_declared(name: str, given: bool, device: str) -> None:
    s = build(3, **ROWS, **CALLS[name], poison=0.0, bad_id=0, device=device)
    out = torch.zeros(*s.q.shape[:2], s.cache.v_head_dim, dtype=s.q.dtype, device=device) if given else None
    opcheck(torch.ops.quire.attend.default, s.q, *parts(s), *(s.new or (None, None)), out, given, None, "auto", None)


WRITES = ("plain", "int8-scales-per-head", "int8-int4-scales-per-token", "nvfp4-swizzled", "bf16-joint-int64")


@pytest.mark.parametrize("name", WRITES)
def test_write_and_step_are_as_declared(name: str, device: str) -> None:
    s = build(3, **ROWS, **CALLS[name], poison=0.0, bad_id=0, device=device)
    k, v = new_tokens(s)
    cache_and_batch = (*ops._of_cache(s.cache), *ops._of_batch(s.batch, None))
    opcheck(torch.ops.quire.write.default, k, v, *cache_and_batch, None, "auto", None)
    opcheck(torch.ops.quire.step.default, s.q, k, v, *parts(s), None, True, None, "auto", None)


@pytest.mark.parametrize("argument", ["k_pages", "v_pages", "k_scale", "v_scale"])
def test_torch_sees_a_write_that_is_not_declared(argument: str) -> None:
    """The check above can fail: without the mark of any one tensor that a write changes, it does."""
    schema = next(text for text in ops._SCHEMAS if text.startswith("write"))
    before, mark, after = schema.partition(f" {argument}")
    schema = before.rpartition("Tensor")[0] + "Tensor" + ("?" if "scale" in argument else "") + mark + after
    library = torch.library.Library("quire_undeclared", "FRAGMENT")
    library.define(schema.replace("write(", f"write_{argument}("))
    library.impl(f"write_{argument}", ops._write, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quire_undeclared::write_{argument}", ops._fake_write, lib=library)
    s = build(3, **ROWS, **CALLS["e4m3fn-bytes-scales-per-token"], poison=0.0, bad_id=0)
    with pytest.raises(OpCheckError, match=argument):
        op = getattr(torch.ops.quire_undeclared, f"write_{argument}").default
        opcheck(op, *new_tokens(s), *ops._of_cache(s.cache), *ops._of_batch(s.batch, None), None, "auto", None)


# Compiled calls against plain ones.


def compiled(f: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(f, fullgraph=True, backend=backend)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name, backend", [("plain", "eager"), *((name, "aot_eager") for name in CALLS)])
def test_attend_compiled(name: str, backend: str, device: str) -> None:
    s = build(4, **ROWS, **CALLS[name], device=device)

    def call(q: torch.Tensor, cache: quire.KVCache, batch: quire.Batch, **how: Any) -> Any:
        return quire.attend(q, cache, batch, s.options, new=s.new, **how)

    out, lse = compiled(call, backend)(s.q, s.cache, s.batch, lse=True)
    same((out, lse), call(s.q, s.cache, s.batch, lse=True))
    assert not out[s.live :].any() and not lse[s.live :].any()
    given = torch.full_like(out, torch.nan)
    assert compiled(call, backend)(s.q, s.cache, s.batch, out=given) is given
    same(given[: s.live], out[: s.live])
    assert given[s.live :].isnan().all()


FP8: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "fp8-to-bf16": ({"q_dtype": "e4m3fn", "q_scale": 0.02}, torch.bfloat16),
    "bf16-to-fp8": ({"q_dtype": "bf16", "out_scale": 0.01}, torch.float8_e4m3fn),
}


@pytest.mark.parametrize("scale", ["number", "tensor"])
@pytest.mark.parametrize("name", FP8)
def test_fp8_queries_and_outputs_compiled(name: str, scale: str, device: str) -> None:
    features, dtype = FP8[name]
    if scale == "tensor":
        features = {key: torch.tensor(value) if "scale" in key else value for key, value in features.items()}
    s = build(5, **ROWS, format="bf16", **features, device=device)
    seen = []

    def call(q: torch.Tensor) -> torch.Tensor:
        out = quire.attend(q, s.cache, s.batch, s.options)
        seen.append(out.dtype)
        return out

    out = compiled(call)(s.q)
    assert [out.dtype, *seen] == [dtype, dtype]
    same(out.float(), call(s.q).float())


class Layer(torch.nn.Module):
    """An attention layer of a model, with its cache."""

    def __init__(self, cache: quire.KVCache, options: quire.Options | None, how: str):
        super().__init__()
        self.cache, self.options, self.how = cache, options, how
        self.heads = (2 * cache.kv_heads, cache.kv_heads, cache.kv_heads)
        self.qkv = torch.nn.Linear(24, 4 * cache.kv_heads * cache.head_dim)
        self.out = torch.nn.Linear(2 * cache.kv_heads * cache.v_head_dim, 24)

    def forward(self, x: torch.Tensor, batch: quire.Batch) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.cache.head_dim)).split(self.heads, 1)
        if self.how == "step":
            attended = quire.step(q, k, v, self.cache, batch, self.options)
        else:
            quire.write(k, v, self.cache, batch)
            attended = quire.attend(q, self.cache, batch, self.options)
        return x + self.out(attended.flatten(1))


CACHES: dict[str, dict[str, Any]] = {
    "nhd": {"dtype": TYPES["fp32"]},
    "joint": {"dtype": TYPES["fp32"], "layout": "vllm_joint"},
    "fp8-token": {"dtype": TYPES["e4m3fn"], "scales": "token"},
    "fp8-one-scale": {"dtype": TYPES["e4m3fn"], "k_scale": torch.tensor(0.02), "v_scale": torch.tensor(0.03)},
}


GROWTH = ((6, 3), (1, 4), (1, 1), (1, 1), (1, 1), (1, 1))
RUNS = [
    ("nhd", "eager", "step", 6),
    ("nhd", "aot_eager", "write-attend", 6),
    ("joint", "aot_eager", "step", 2),
    ("joint", "aot_eager", "write-attend", 2),
    ("fp8-token", "aot_eager", "step", 2),
    ("fp8-one-scale", "aot_eager", "write-attend", 2),
    ("joint", "inductor", "step", 2),
]


@pytest.mark.parametrize("cache, backend, how, steps", RUNS, ids=["-".join(map(str, run)) for run in RUNS])
@torch.no_grad()
def test_model_step_compiled(cache: str, backend: str, how: str, steps: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing pair of sequences: prefill, a mixed step, decodes. The compiled model keeps its own cache."""
    if backend == "inductor":
        monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # processes that compile take longer to start
    torch.manual_seed(7)
    how_cached = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in CACHES[cache].items()}
    options = quire.Options(window=11, sinks=torch.randn(4, device=device))
    pool = quire.PagePool(pages=16, page_size=4, device=device)
    models = [Layer(quire.KVCache.allocate(pool, kv_heads=2, head_dim=8, **how_cached), options, how).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(models[1], fullgraph=True, backend=counter)
    a, b = pool.sequence(), pool.sequence()
    close = {"rtol": 1e-4, "atol": 1e-5} if backend == "inductor" else {"rtol": 0, "atol": 0}
    for new in GROWTH[:steps]:
        batch = pool.step({a: new[0], b: new[1]})
        x = torch.randn(sum(new), 24, device=device)
        torch.testing.assert_close(step(x, batch), models[0](x, batch), **close)
        torch.testing.assert_close(models[1].cache.k.float(), models[0].cache.k.float(), **close)
        torch.testing.assert_close(models[1].cache.v.float(), models[0].cache.v.float(), **close)
    assert models[0].cache.k.float().any()
    assert counter.frame_count <= 3  # sizes that change become symbols: not one graph for each step


def test_slots_of_a_compiled_write(device: str) -> None:
    """Slots may come with the batch or with the call, which wins."""
    for slots, on_batch in ((None, [2, 7]), ([9, -1], [2, 7]), ([3, 1], None)):
        caches = []
        for write in (quire.write, compiled(quire.write)):
            cache = quire.KVCache.allocate(
                quire.PagePool(pages=3, page_size=4, device=device), kv_heads=1, head_dim=8, dtype=torch.float32
            )
            index = [None if at is None else torch.tensor(at, device=device) for at in (slots, on_batch)]
            table, lens, starts = (torch.tensor(t, device=device) for t in ([[0, 1, 2]], [2], [0, 2]))
            k, v = torch.arange(1.0, 33.0, device=device).view(2, 2, 1, 8)
            write(k, v, cache, quire.Batch(table, lens, starts, slots=index[1]), slots=index[0])
            caches.append((cache.k, cache.v))
        assert caches[0][0].any()
        same(caches[1], caches[0])


# What is refused, with the error that a plain call gives or a clear one.


def a_step(device: str = "cpu", **cached: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, quire.KVCache, quire.Batch]:
    pool = quire.PagePool(pages=4, page_size=4, device=device)
    cache = quire.KVCache.allocate(pool, kv_heads=1, head_dim=8, dtype=torch.float32, **cached)
    q, k, v = torch.randn(3, 5, 1, 8, device=device)
    return q, k, v, cache, pool.step({pool.sequence(): 5})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_ledger_is_refused(backend: str) -> None:
    with pytest.raises(quire.ArgumentError, match="cache: given a cache with a ledger"):
        compiled(quire.step, backend)(*a_step(ledger=True))


def test_copies_are_refused() -> None:
    _, k, v, cache, batch = a_step()
    batch.copies = ((0, 1),)
    with pytest.raises(quire.ArgumentError, match="copies: given a batch with copies"):
        compiled(quire.write)(k, v, cache, batch)
    assert not cache.k.any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_refused(backend: str) -> None:
    q, k, v, cache, batch = a_step()
    weight = torch.ones(8, requires_grad=True)
    step = compiled(lambda q: quire.step(q * weight, k, v, cache, batch), backend)
    with pytest.raises(quire.ArgumentError, match="q: given a tensor that requires grad"):
        step(q)
    assert not cache.k.any()
    with torch.no_grad():
        same(step(q), quire.step(q, k, v, cache, batch))
    assert not compiled(lambda k: quire.step(q, k * weight, v, cache, batch), backend)(k).requires_grad


def test_the_contract_holds_in_a_graph() -> None:
    """A bad page id in host memory raises as it does outside of a graph, and nothing is written."""
    q, k, v, cache, batch = a_step()
    step = compiled(quire.step)
    batch.page_table[0, 1] = 99
    with pytest.raises(quire.ContractError, match="page_table"):
        step(q, k, v, cache, batch)
    assert not cache.k.any()
    batch.page_table[0, 1] = 1
    step(q, k, v, cache, batch)
    assert cache.k.any()


def test_a_kernel_by_name_in_a_graph() -> None:
    with pytest.raises(quire.KernelError, match="no-such-kernel"):
        compiled(lambda *given: quire.step(*given, kernel="no-such-kernel"))(*a_step())


def test_checks_in_a_graph() -> None:
    """`check="full"` and `quire.checked()` reach the operator."""
    q, k, v, cache, batch = a_step()
    low = quire.Batch(batch.page_table, batch.kv_lens, batch.q_starts, max_q_len=1)
    step = compiled(lambda: quire.step(q, k, v, cache, low, check="full"))
    step()
    with quire.checked(), pytest.raises(quire.ContractError, match="max_q_len"):
        step()


def test_export() -> None:
    """An exported program holds the operators by name."""
    q, k, v, cache, batch = a_step()
    quire.write(k, v, cache, batch)

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor, q_starts: torch.Tensor) -> torch.Tensor:
            return quire.attend(q, cache, quire.Batch(page_table, kv_lens, q_starts))

    index = (batch.page_table, batch.kv_lens, batch.q_starts)
    program = torch.export.export(Attend(), (q, *index))
    assert "torch.ops.quire.attend" in program.graph_module.code
    same(program.module()(q, *index), quire.attend(q, cache, batch))


class Subclass(torch.Tensor):
    """What some ways of tracing hand to a function."""


@pytest.mark.parametrize("compiling", [True, False])
def test_who_is_traced(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    assert is_traced(torch.ones(1).as_subclass(Subclass)) == compiling
    assert not is_traced(torch.ones(1))
    assert is_traced(FakeTensorMode().from_tensor(torch.ones(1)))


def test_a_real_call_while_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_compiling` holds for the whole process: another thread may export something while this one runs."""
    q, k, v, cache, batch = a_step()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert quire.step(q, k, v, cache, batch).shape == q.shape


# Caches that are made within a graph.


def wrapped(s: Scenario, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An attend over pages that are wrapped on the spot, as an engine that owns them may do."""
    cache = quire.KVCache.wrap(k, v, layout="nhd")
    batch = quire.Batch(s.batch.page_table, s.batch.kv_lens, s.batch.q_starts)
    out, lse = quire.attend(s.q, cache, batch, quire.Options(), lse=True)
    return out, lse


def test_a_cache_wrapped_in_a_graph(device: str) -> None:
    s = build(3, **ROWS, device=device)
    expected = wrapped(s, s.cache.k, s.cache.v)
    got = torch.compile(lambda k, v: wrapped(s, k, v), backend="aot_eager", fullgraph=True)(s.cache.k, s.cache.v)
    for mine, other in zip(got, expected):
        assert torch.equal(mine[: s.live], other[: s.live])


@pytest.mark.parametrize("dynamic", [None, True])
def test_more_pages_in_a_graph(dynamic: bool | None) -> None:
    s = build(3, **ROWS)
    graph = torch.compile(lambda k, v: wrapped(s, k, v), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for more in range(3):
        k, v = (torch.cat((pages, torch.zeros(more, *pages.shape[1:]))) for pages in (s.cache.k, s.cache.v))
        assert torch.equal(graph(k, v)[0][: s.live], wrapped(s, k, v)[0][: s.live])


def test_another_scale_in_a_graph() -> None:
    s = build(3, **ROWS, format="int8")
    batch = quire.Batch(s.batch.page_table, s.batch.kv_lens, s.batch.q_starts)

    def attend(scale: float) -> torch.Tensor:
        cache = quire.KVCache.wrap(s.cache.k, s.cache.v, layout="nhd", k_scale=scale, v_scale=scale)
        return quire.attend(s.q, cache, batch)

    graph = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(graph(scale)[: s.live], attend(scale)[: s.live])


def test_memory_that_is_shared_is_refused_in_a_graph_too(device: str) -> None:
    """Where tensors lie is known when the graph is run."""
    s = build(3, **ROWS, device=device)
    pages, graph = s.cache.k, torch.compile(lambda k, v: wrapped(s, k, v), backend="aot_eager", fullgraph=True)
    for again in (pages[:], torch.utils.dlpack.from_dlpack(pages)):
        with pytest.raises(ArgumentError, match="memory shared with k_pages"):
            graph(pages, again)
    with pytest.raises(ArgumentError, match="memory in which no two elements overlap"):
        graph(pages, torch.zeros(1, device=device).expand(pages.shape))


def test_scales_that_share_memory_are_refused_in_a_graph_too() -> None:
    s = build(3, **ROWS, format="int8", scales="token")
    k, v = new_tokens(s)

    def step(k_scale: torch.Tensor, v_scale: torch.Tensor) -> torch.Tensor:
        cache = quire.KVCache.wrap(s.cache.k, s.cache.v, layout="nhd", k_scale=k_scale, v_scale=v_scale)
        return quire.step(s.q, k, v, cache, quire.Batch(s.batch.page_table, s.batch.kv_lens, s.batch.q_starts))

    scales = s.cache.k_scale
    assert scales is not None and scales.dim() == 3
    with pytest.raises(ArgumentError, match="scales that share memory"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(scales, scales[:])


def test_tensors_that_stand_for_others() -> None:
    """What a tool that estimates memory does: nothing is compiled, and nothing is computed."""
    s = build(3, **ROWS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        k, v, s.q = (mode.from_tensor(t) for t in (s.cache.k, s.cache.v, s.q))
        out, lse = wrapped(s, k, v)
    assert out.shape == s.q.shape and lse.shape == s.q.shape[:2] and type(out) is type(s.q)


# Rotations.

ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"q_norm": torch.rand(16), "k_norm": torch.rand(16).bfloat16(), "eps": 0.1},
}


def rope_of(name: str, device: str) -> quire.Rope:
    own = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in ROPES[name].items()}
    return quire.Rope.make(16, 100.0, 16, interleaved=name == "norms", device=device, **own)


@pytest.mark.parametrize("name", ROPES)
def test_rotations_are_as_declared(name: str, device: str) -> None:
    s = build(3, **ROWS, **CALLS["int8-scales-per-head"], poison=0.0, bad_id=0, device=device)
    (k, v), turn = new_tokens(s), (*ops._of_rope(rope_of(name, device)), None)
    cache_and_batch = (*ops._of_cache(s.cache), *ops._of_batch(s.batch, None))
    for q_out in (None, torch.zeros_like(s.q)):
        opcheck(torch.ops.quire.rope_write.default, s.q, k, v, *cache_and_batch, *turn, q_out, None, "auto", None)
    opcheck(torch.ops.quire.rope_step.default, s.q, k, v, *parts(s), *turn, None, True, None, "auto", None)


@pytest.mark.parametrize("name", ROPES)
def test_rotations_compiled(name: str, device: str) -> None:
    s = build(4, **ROWS, device=device)
    (k, v), rope = new_tokens(s), rope_of(name, device)

    def run(q: torch.Tensor, cache: quire.KVCache, batch: quire.Batch) -> tuple[Any, ...]:
        mine = q.clone()
        stepped = quire.step(q, k, v, cache, batch, s.options, rope=rope, lse=True)
        apart = quire.write(k, v, cache, batch, rope=rope, q=q, positions=batch.kv_lens.new_full((q.shape[0],), 3))
        quire.write(k, v, cache, batch, rope=rope)
        return *stepped, apart, quire.write(k, v, cache, batch, rope=rope, q=mine, q_out=mine), mine

    same(compiled(run)(s.q, s.cache, s.batch), run(s.q, s.cache, s.batch))
