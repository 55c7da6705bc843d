"""`Batch(spans=...)`: the interval of keys that each new token sees."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import quire
from quire import Batch, ContractError, KVCache, Options, PagePool
from quire.conformance.recording.record import load
from quire.contract.call import Call
from support import kernels
from support.scenario import Scenario, build

KERNELS = [name for name in ("torch", "native") if name == "torch" or kernels.levels()]
KINDS = ("causal", "chunks", "prefix", "images", "any")
INDICES = ((torch.int32,) * 3, (torch.int64,) * 3)
LENS: dict[str, Any] = {"q_lens": [1, 7, 0, 40], "kv_lens": [30, 9, 5, 60], "page_size": 4}

each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def attend(s: Scenario, kernel: str, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return quire.attend(s.q, s.cache, s.batch, s.options, new=s.new, lse=True, kernel=kernel, **how)


def drawn(seed: int) -> dict[str, Any]:
    """A random mixed batch with some features; some sequences have several tiles of keys."""
    r = random.Random(seed)
    kv_lens = [r.choice([0, 1, r.randint(2, 70), r.randint(200, 400)]) for _ in range(r.randint(1, 3))]
    q_lens = [min(r.choice([0, 1, 1, 2, 7, 30, 60]), n) for n in kv_lens]
    form, format = r.choice(["full", "context"]), r.choice(["fp32", "bf16", "e4m3fn", "int8"])
    if form == "full" and r.random() < 0.2:
        q_lens[0] = r.randint(0, 9)  # more queries than keys
    return {
        "q_lens": q_lens, "kv_lens": kv_lens, "form": form, "format": format, "spans": r.choice(KINDS),
        "page_size": r.choice([4, 8, 16]), "scales": r.choice(["tensor", "head", "token"]), "padding": r.choice([0, 2]),
        "layout": r.choice(["nhd", "hnd", "vllm_x"]), "q_dtype": r.choice(["fp32", "bf16"]), "index": r.choice(INDICES),
        "group": r.choice([1, 2, 3]), "bad_id": r.choice([-1, 9999]), "alibi": True if r.random() < 0.4 else None,
        "softcap": r.choice([None, 3.0]), "sinks": True if r.random() < 0.3 else None,
        "shard": r.choice([None, None, (0, 2, 1), (1, 3, 5), (1, 2, 16)]),
        "batch_invariant": r.random() < 0.2 and not (form == "context" and format in ("e4m3fn", "int8")),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_random_batches(seed: int) -> None:
    s = build(seed, **drawn(seed))
    assert not [v for v in quire.check(s.q, s.cache, s.batch, s.options, new=s.new) if not v.harmless]
    for kernel in KERNELS:
        out, lse = attend(s, kernel)
        s.check(out, lse, factors=s.q.dtype)


@each_kernel
@pytest.mark.parametrize("q_lens", [[1, 3, 1], [40, 60, 5]], ids=["decode", "prefill"])
def test_spans_like_causality_give_what_causality_gives(q_lens: list[int], kernel: str) -> None:
    case: dict[str, Any] = {"q_lens": q_lens, "kv_lens": [300, 150, 64]}
    plain, s = build(3, **case), build(3, **case, spans="causal")
    out, lse = attend(s, kernel)
    s.check(out, lse)
    want, want_lse = attend(plain, kernel)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@each_kernel
def test_a_token_with_an_empty_span_sees_nothing(kernel: str) -> None:
    spans = [(2, 2), (5, 1), (0, 3), (-4, -4), (10**6, 7)]
    s = build(1, [5], [9], spans=spans)
    out, lse = attend(s, kernel)
    assert (out[[0, 1, 3, 4]] == 0).all() and (lse[[0, 1, 3, 4]] == -math.inf).all()
    s.check(out, lse)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    s = build(1, [5], [9], spans=spans, sinks=sinks)
    out, lse = attend(s, kernel)
    assert (out[[0, 1, 3, 4]] == 0).all() and torch.allclose(lse[[0, 1, 3, 4]], sinks.expand(4, 4))
    s.check(out, lse)


@each_kernel
@pytest.mark.parametrize("q_len", [2, 20], ids=["few rows", "many rows"])
def test_what_lies_between_spans_is_not_read(q_len: int, kernel: str) -> None:
    """Pages that no token sees are free: NaN, and no entry in the table."""
    spans = [(3, 20), (300, 308)] * (q_len // 2)
    s = build(2, [q_len], [400], spans=spans, page_size=8, format="e4m3fn", scales="token")
    assert (s.batch.page_table[0, 4:36] == -1).all()
    s.check(*attend(s, kernel, check="full"))


@each_kernel
def test_rows_do_not_depend_on_chunks(kernel: str) -> None:
    """A prompt at once, and token by token: the same spans and, batch-invariant, the same bits."""
    whole = build(4, [50], [50], spans="prefix", batch_invariant=True)
    spans = whole.batch.spans
    assert spans is not None
    # A token of the prefix sees later tokens: they must be in the cache when it is computed.
    out, _ = attend(whole, kernel)
    table, starts = whole.batch.page_table, torch.tensor([0, 5], dtype=torch.int32)
    for end in range(20, 51, 5):
        batch = Batch(table, torch.tensor([end], dtype=torch.int32), starts, spans=spans[end - 5 : end])
        got = quire.attend(whole.q[end - 5 : end].contiguous(), whole.cache, batch, whole.options, kernel=kernel)
        assert torch.equal(got, out[end - 5 : end])


@each_kernel
@pytest.mark.parametrize(
    "strided",
    [lambda t: t.T.contiguous().T, lambda t: torch.cat((t, t + 9), 1)[:, :2], lambda t: t.repeat_interleave(2, 0)[::2]],
    ids=["transposed", "columns", "rows"],
)
def test_strided_spans(strided: Any, kernel: str) -> None:
    s = build(5, **LENS, spans="any")
    s.batch.spans = strided(s.batch.spans)
    assert not s.batch.spans.is_contiguous()
    s.check(*attend(s, kernel))


# The contract.


def refused(s: Scenario, options: Options | None = None) -> list[quire.Violation]:
    found = quire.check(s.q, s.cache, s.batch, options or s.options, new=s.new)
    with pytest.raises(ContractError) as caught:
        quire.attend(s.q, s.cache, s.batch, options or s.options, new=s.new)
    assert [str(v) for v in caught.value.violations] == [str(v) for v in found]
    return found


@pytest.mark.parametrize(
    ("name", "given"),
    [("window", {"window": 5}), ("causal", {"causal": False}), ("causal", {"causal": torch.tensor([True] * 4)})],
    ids=["window", "non-causal", "per sequence"],
)
def test_spans_and_other_options_exclude_each_other(name: str, given: dict[str, Any]) -> None:
    (violation,) = refused(build(6, **LENS, spans="chunks"), Options(**given))
    assert (violation.rule, violation.argument) == ("spans", name)
    assert "together with spans" in violation.given


def test_spans_exclude_a_mask() -> None:
    s = build(6, **LENS, spans="chunks")
    found = refused(s, Options(mask=torch.ones(s.q.shape[0], 40, dtype=torch.bool)))
    assert ("spans", "mask") in [(v.rule, v.argument) for v in found]


def test_an_interval_outside_of_the_sequence_is_named() -> None:
    s = build(7, **LENS, spans="chunks")
    assert s.batch.spans is not None
    s.batch.spans[3, 1], s.batch.spans[20, 0] = 10, -2
    first, second = (v for v in refused(s) if v.rule == "spans")
    assert (first.rule, first.argument, first.seq, first.token, first.given) == ("spans", "spans[3]", 1, 3, "[0, 10)")
    assert first.allowed == "[begin, end) within [0, 9), the keys of sequence 1; begin >= end for none"
    assert (second.argument, second.seq, second.token) == ("spans[20]", 3, 20)
    assert "[-2]" in second.picture and "kv_len 60" in second.picture


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda t: t[:-1], "spans"), (lambda t: t[:, :1], "spans"), (lambda t: t.flatten(), "spans"),
        (lambda t: t.short(), "index-types"), (lambda t: t.float(), "index-types"), (lambda t: t.to("meta"), "devices"),
    ],
    ids=["rows", "columns", "axes", "int16", "fp32", "device"],
)  # fmt: skip
def test_shape_type_and_device(change: Any, rule: str) -> None:
    s = build(8, **LENS, spans="chunks")
    s.batch.spans = change(s.batch.spans)
    assert (rule, "spans") in [(v.rule, v.argument) for v in refused(s)]


def test_a_page_that_a_span_needs_is_named() -> None:
    s = build(9, [1, 2], [30, 40], spans=[(9, 17), (0, 8), (32, 40)], page_size=8)
    s.batch.page_table[1, 4] = 99
    (violation,) = refused(s)
    assert (violation.rule, violation.argument) == ("table", "page_table[1, 4]")


@each_kernel
def test_a_missing_page_that_nobody_checked_gives_nan(kernel: str) -> None:
    """A change that torch does not see. Nothing is read out of bounds, and other sequences are right."""
    s = build(10, [1, 20, 3], [30, 80, 40], spans="images", page_size=4)
    attend(s, kernel)
    for name, value in (("page_table", 10**6), ("page_table", -1)):
        getattr(s.batch, name).numpy()[1, :] = value
        out, lse = attend(s, kernel)
        assert out[1:21].isnan().all() and lse[1:21].isnan().all()
        torch.testing.assert_close(out[[0, 21, 22, 23]].double(), s.expected[[0, 21, 22, 23]], rtol=1e-4, atol=1e-5)


@each_kernel
def test_an_interval_that_nobody_checked_is_clipped(kernel: str) -> None:
    s = build(11, [3, 20], [30, 80], spans=[(0, 30)] * 3 + [(5, 80)] * 20, page_size=4)
    attend(s, kernel)
    assert s.batch.spans is not None
    s.batch.spans.numpy()[:3] = (-(2**31), 2**31 - 1)
    s.batch.spans.numpy()[3:, 1] = 2**31 - 1
    s.check(*attend(s, kernel))


def test_spans_of_padding_rows_hold_anything() -> None:
    s = build(12, **LENS, spans="any", padding=3)
    assert s.batch.spans is not None and s.batch.spans[-3:].tolist() == [[-7, 10**9]] * 3
    assert not quire.check(s.q, s.cache, s.batch, s.options)


def test_a_sequence_may_have_fewer_keys_than_queries() -> None:
    """Spans replace causality: queries need not be keys. In context form they are."""
    s = build(13, [6], [2], spans=[(0, 1), (0, 2), (1, 2), (2, 2), (0, 2), (0, 0)])
    for kernel in KERNELS:
        s.check(*attend(s, kernel))
    new = (torch.zeros(6, 2, 16), torch.zeros(6, 2, 16))
    with pytest.raises(ContractError, match="lengths"):
        quire.attend(s.q, s.cache, s.batch, new=new)


@pytest.mark.parametrize("form", ["full", "context"])
def test_required_are_exactly_the_keys_in_some_span(form: str) -> None:
    for seed in range(5):
        s = build(seed, [3, 0, 8], [60, 9, 40], spans="any", form=form, page_size=4)
        assert s.batch.spans is not None
        call = Call(s.cache, s.batch, s.q, s.options, s.new)
        wanted = []
        for seq, (rows, kv_len) in enumerate(((range(3), 60), (range(0), 9), (range(3, 11), 40))):
            end = kv_len - len(rows) if form == "context" else kv_len
            seen = [s.batch.spans[row].tolist() for row in rows]
            wanted += [(seq, key) for key in range(end) if any(a <= key < b for a, b in seen)]
        assert list(zip(*(part.tolist() for part in call.needed))) == wanted


# Other entrances.


def test_step_explain_and_write() -> None:
    pool = PagePool(pages=16, page_size=4)
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=16, dtype=torch.float32, ledger=True)
    batch = pool.step({pool.sequence(): 9})
    spans = torch.tensor([[0, 9]] * 4 + [[max(0, i - 2), i + 1] for i in range(4, 9)], dtype=torch.int32)
    q, k, v = torch.randn(9, 8, 16).split((4, 2, 2), dim=1)
    with quire.checked(results=True):
        out = quire.step(q, k, v, cache, batch.with_spans(spans))
    want, _ = quire.reference.attention(q, k, v, spans=spans)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    decision = quire.explain(q, cache, batch.with_spans(spans), platform=quire.Platform.named("sm90"))
    assert "spans" in str(decision.problem)
    assert not [refusal for one in decision.candidates for refusal in one.refusals if refusal.rule == "spans"]


def test_images_of_long_prompts_take_the_kernel_for_hopper() -> None:
    """As Gemma 4's layers with a window: heads of 256."""
    pool = PagePool(pages=64, page_size=32)
    batch = pool.step({pool.sequence(): 1500}).with_spans(torch.zeros(1500, 2, dtype=torch.int32))
    for format, dtype, name in (("bf16", torch.bfloat16, "gluon-mixed"), ("e4m3fn", torch.float8_e4m3fn, "gluon-mixed-bytes")):
        cache = KVCache.allocate(pool, kv_heads=4, head_dim=256, dtype=dtype)
        q = torch.zeros(1500, 8, 256, dtype=torch.bfloat16)
        decision = quire.explain(q, cache, batch, platform=quire.Platform.named("sm90"))
        assert decision.chosen is not None and decision.chosen.name == name, (format, str(decision))


def test_compiled() -> None:
    from quire import ops  # noqa: F401

    s = build(14, **LENS, spans="images")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, spans: quire.attend(q, s.cache, s.batch.with_spans(spans)), fullgraph=True, backend="aot_eager"
    )
    s.check(compiled(s.q, s.batch.spans))


def test_recorded(tmp_path: Any) -> None:
    s = build(15, **LENS, spans="any")
    with quire.record(tmp_path / "calls.safetensors"):
        quire.attend(s.q, s.cache, s.batch)
    (call,) = load(tmp_path / "calls.safetensors")
    assert call.batch.spans is not None and torch.equal(call.batch.spans, s.batch.spans)
    s.check(quire.attend(call.q, call.cache, call.batch))


def test_a_batch_on_fixed_buffers() -> None:
    s = build(16, **LENS, spans="chunks")
    b = s.batch
    fixed = Batch.allocate(5, b.page_table.shape[1] + 1, 60, spans=True).fill(b.page_table, b.kv_lens, b.q_starts, spans=b.spans)
    q = torch.cat((s.q, torch.full((60 - len(s.q), *s.q.shape[1:]), math.nan)))
    s.check(quire.attend(q, s.cache, fixed)[: s.live])
