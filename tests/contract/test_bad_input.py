"""Bad input, one test a mistake: the message names the argument, what was given and what is allowed, and nothing is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import quire
from quire import Batch, KVCache, Options, PagePool
from support.scenario import build

LENS = {"q_lens": [1, 4, 2], "kv_lens": [20, 4, 37]}


class Call:
    """A good call whose parts a test replaces."""

    def __init__(self) -> None:
        s = build(50, **LENS, padding=1)
        self.q, self.cache, self.new, self.out = s.q, s.cache, None, None
        self.options: Options | None = None
        self.page_table, self.kv_lens, self.q_starts = s.batch.page_table, s.batch.kv_lens, s.batch.q_starts
        self.hints: dict[str, int] = {}

    def run(self) -> torch.Tensor:
        batch = Batch(self.page_table, self.kv_lens, self.q_starts, **self.hints)
        return quire.attend(self.q, self.cache, batch, self.options, new=self.new, out=self.out)


def set_(**changes: Any) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        for name, value in changes.items():
            setattr(call, name, value(call) if callable(value) else value)

    return apply


def cell(row: int, column: int, value: int) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        call.page_table[row, column] = value

    return apply


# What is done to a good call, the rule that notices, and words its message must have: argument, given, allowed.
MISTAKES: dict[str, tuple[Callable[[Call], None], str, list[str]]] = {
    "page_table of float": (
        set_(page_table=lambda c: c.page_table.float()),
        "index-types",
        ["page_table", "float32[3, 5]", "int32 or int64"],
    ),
    "kv_lens of int16": (set_(kv_lens=lambda c: c.kv_lens.short()), "index-types", ["kv_lens", "int16[3]", "int32 or int64"]),
    "q_starts of uint8": (
        set_(q_starts=lambda c: c.q_starts.to(torch.uint8)),
        "index-types",
        ["q_starts", "uint8[4]", "int32 or int64"],
    ),
    "q_starts of n entries": (
        set_(q_starts=lambda c: c.q_starts[:-1]),
        "shapes",
        ["q_starts", "int32[3]", "[4]", "one more entry"],
    ),
    "q_starts falls": (set_(q_starts=torch.tensor([0, 5, 4, 7])), "lengths", ["q_starts[2]", "given    4", "never falls", "[4]"]),
    "q_starts does not start at 0": (set_(q_starts=torch.tensor([1, 1, 5, 7])), "lengths", ["q_starts[0]", "given    1", "0:"]),
    "q_starts beyond q": (set_(q_starts=torch.tensor([0, 1, 5, 99])), "lengths", ["q_starts[3]", "given    99", "at most 8"]),
    "kv_len below q_len": (set_(kv_lens=torch.tensor([20, 3, 37])), "lengths", ["kv_lens[1]", "given    3", "4 or more", "[3]"]),
    "kv_len negative": (set_(kv_lens=torch.tensor([-5, 4, 37])), "lengths", ["kv_lens[0]", "given    -5", "0 or more"]),
    "kv_len beyond any table": (set_(kv_lens=torch.tensor([20, 4, 2**40])), "table", ["page_table", "5 columns", "sequence 2"]),
    "table too narrow": (
        set_(page_table=lambda c: c.page_table[:, :2]),
        "table",
        ["page_table", "2 columns", "3 or more", "37 tokens"],
    ),
    "table of one row too few": (
        set_(page_table=lambda c: c.page_table[:2]),
        "shapes",
        ["page_table", "int32[2, 5]", "[3, pages_per_seq]"],
    ),
    "page id too large": (cell(2, 1, 900), "table", ["page_table[2, 1]", "given    900", "[0, 9)", "[900]"]),
    "page id negative": (cell(0, 1, -1), "table", ["page_table[0, 1]", "given    -1", "[0, 9)", "[-1]"]),
    "heads that do not divide": (set_(q=lambda c: c.q[:, :3]), "shapes", ["q", "3 q_heads", "a multiple of kv_heads = 2"]),
    "head_dim of another cache": (set_(q=lambda c: c.q[:, :, :8]), "shapes", ["q", "head_dim 8", "16"]),
    "q of two axes": (set_(q=lambda c: c.q[:, 0]), "shapes", ["q", "float32[8, 16]", "[tokens, q_heads, head_dim]"]),
    "q of int": (set_(q=lambda c: c.q.int()), "shapes", ["q", "int32", "float32, float16, bfloat16"]),
    "q on another device": (set_(q=lambda c: c.q.to("meta")), "devices", ["q", "on meta", "on cpu"]),
    "fp8 queries without a scale": (
        set_(q=lambda c: c.q.to(torch.float8_e4m3fn)),
        "quantisation",
        ["q_scale", "missing (None), with fp8 queries"],
    ),
    "q_scale without fp8 queries": (set_(options=Options(q_scale=2.0)), "quantisation", ["q_scale", "fp32 queries", "None"]),
    "slopes of wrong length": (set_(options=Options(alibi=torch.ones(3))), "shapes", ["alibi", "3 entries", "[q_heads] = 4"]),
    "sinks of wrong length": (set_(options=Options(sinks=torch.ones(5))), "shapes", ["sinks", "5 entries", "[q_heads] = 4"]),
    "causal of wrong length": (set_(options=Options(causal=torch.ones(2).bool())), "shapes", ["causal", "bool[2]", "[seqs] = 3"]),
    "mask of wrong length": (set_(options=Options(mask=torch.ones(7, 4).bool())), "shapes", ["mask", "bool[7, 4]", "tokens = 8"]),
    "mask too narrow": (set_(options=Options(mask=torch.ones(8, 3).bool())), "lengths", ["mask", "[tokens, 3]", "M >= 4"]),
    "out of wrong shape": (set_(out=torch.zeros(8, 4, 17)), "output", ["out", "float32[8, 4, 17]", "[8, 4, 16]"]),
    "out of int": (set_(out=torch.zeros(8, 4, 16).int()), "output", ["out", "int32", "float32, float16 or bfloat16"]),
    "out of fp8 without a scale": (set_(out=torch.zeros(8, 4, 16).to(torch.float8_e5m2)), "output", ["out", "out_scale"]),
    "out of 32 bits with a scale": (
        set_(out=torch.zeros(8, 4, 16), options=Options(out_scale=0.5)),
        "output",
        ["out", "float32", "an fp8 type"],
    ),
    "out is q": (set_(out=lambda c: c.q), "output", ["out", "memory shared with q", "memory that no other tensor"]),
    "out overlaps the cache": (
        set_(out=lambda c: c.cache.k.view(-1)[100 : 100 + 8 * 4 * 16].view(8, 4, 16)),
        "output",
        ["out", "memory shared with the cache's K"],
    ),
    "out is expanded": (
        set_(out=torch.zeros(8, 4, 1).expand(8, 4, 16)),
        "output",
        ["out", "overlap", "memory in which no two elements overlap"],
    ),
    "new of wrong heads": (
        set_(new=(torch.zeros(8, 1, 16), torch.zeros(8, 2, 16))),
        "shapes",
        ["new[0]", "float32[8, 1, 16]", "[8, 2, 16]"],
    ),
    "new of different types": (
        set_(new=(torch.zeros(8, 2, 16), torch.zeros(8, 2, 16).half())),
        "shapes",
        ["new[1]", "float16", "the type of new[0], fp32"],
    ),
    "grad is asked for": (set_(q=lambda c: c.q.clone().requires_grad_()), "shapes", ["q", "requires grad", "torch.no_grad()"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_attend_refuses(name: str) -> None:
    mistake, rule, words = MISTAKES[name]
    good = Call()
    good.run()
    call = Call()
    mistake(call)
    kept = [t.clone() for t in (call.cache.k, call.cache.v, call.out if call.out is not None else call.q)]
    with pytest.raises(quire.ContractError) as caught:
        call.run()
    message = str(caught.value)
    for word in [f"[{rule}]", "nothing was written", *words]:
        assert word in message, f"{word!r} is not in\n{message}"
    if call.q.device.type == "cpu":
        after = (call.cache.k, call.cache.v, call.out if call.out is not None else call.q)
        assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(after, kept))
        found = quire.check(
            call.q, call.cache, Batch(call.page_table, call.kv_lens, call.q_starts), call.options, new=call.new, out=call.out
        )
        assert rule in {v.rule for v in found}


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def test_unknown_kernel() -> None:
    s = build(51, **LENS)
    with pytest.raises(quire.KernelError, match=r"kernel: given 'fast'; allowed for attend: .*torch"):
        quire.attend(s.q, s.cache, s.batch, kernel="fast")


def test_the_table_may_hold_anything_where_it_is_not_needed() -> None:
    s = build(52, [1, 0], [60, 30], window=8)
    s.batch.page_table[0, :3] = torch.tensor([-(2**31), 2**31 - 1, -1])
    s.batch.page_table[1] = -7
    s.check(quire.attend(s.q, s.cache, s.batch, s.options))


# Constructors.

CACHE = torch.zeros(6, 16, 2, 8)
BYTES = CACHE.to(torch.uint8)

CONSTRUCTIONS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "unknown layout": (lambda: KVCache.wrap(CACHE, CACHE.clone(), layout="nchw"), ["layout", "'nchw'", "nhd, hnd, vllm_x"]),
    "bytes without a format": (lambda: KVCache.wrap(BYTES, BYTES.clone(), layout="nhd"), ["format", "uint8 storage", "e4m3fn"]),
    "unknown format": (lambda: KVCache.wrap(BYTES, BYTES.clone(), layout="nhd", format="fp8"), ["format", "'fp8'", "e4m3fn"]),
    "format of another size": (
        lambda: KVCache.wrap(CACHE, CACHE.clone(), layout="nhd", format="int8"),
        ["format", "'int8' over torch.float32"],
    ),
    "scale of wrong shape": (
        lambda: KVCache.wrap(BYTES, BYTES.clone(), layout="nhd", format="e5m2", k_scale=torch.ones(3)),
        ["k_scale", "float32[3]", "[kv_heads] = [2]", "[6, 16, 2]"],
    ),
    "scale of half": (
        lambda: KVCache.wrap(BYTES, BYTES.clone(), layout="nhd", format="e5m2", v_scale=torch.ones(2).half()),
        ["v_scale", "float16[2]", "float32"],
    ),
    "scale zero": (
        lambda: KVCache.wrap(BYTES, BYTES.clone(), layout="nhd", format="e5m2", k_scale=0.0),
        ["k_scale", "0.0", "above 0"],
    ),
    "scale NaN": (
        lambda: KVCache.wrap(BYTES, BYTES.clone(), layout="nhd", format="e5m2", k_scale=float("nan")),
        ["k_scale", "nan"],
    ),
    "scale for a plain cache": (
        lambda: KVCache.wrap(CACHE, CACHE.clone(), layout="nhd", k_scale=2.0),
        ["k_scale", "2.0", "not quantised"],
    ),
    "int8 without a scale": (lambda: KVCache.wrap(BYTES, BYTES.clone(), layout="nhd", format="int8"), ["k_scale", "None", "int8"]),
    "K and V of different pages": (lambda: KVCache.wrap(CACHE, CACHE[:5], layout="nhd"), ["v_pages", "pages 5", "pages 6"]),
    "V missing": (lambda: KVCache.wrap(CACHE, layout="nhd"), ["v_pages", "None", "in two tensors"]),
    "joint with two tensors": (lambda: KVCache.wrap(CACHE, CACHE.clone(), layout="vllm_joint"), ["v_pages", "one tensor"]),
    "four axes for five": (
        lambda: KVCache.wrap(CACHE, CACHE.clone(), layout="vllm_x"),
        ["pages", "float32[6, 16, 2, 8]", "5 axes"],
    ),
    "x that does not divide": (
        lambda: KVCache.allocate(PagePool(2, 16), kv_heads=1, head_dim=8, layout="vllm_x", x=3),
        ["x", "3", "a divisor of dim = 8"],
    ),
    "head_dim above 512": (lambda: KVCache.allocate(PagePool(2, 16), kv_heads=1, head_dim=513), ["head_dim", "513", "1 to 512"]),
    "window 0": (lambda: Options(window=0), ["window", "0", "1 or more"]),
    "window negative": (lambda: Options(window=-1), ["window", "-1", "1 or more"]),
    "window pair negative": (lambda: Options(window=(-1, -1)), ["window", "(-1, -1)", "0 or more keys, or None"]),
    "softcap 0": (lambda: Options(softcap=0.0), ["softcap", "0.0", "above 0"]),
    "scale infinite": (lambda: Options(scale=float("inf")), ["scale", "inf", "finite"]),
    "tree with a window and no positions": (
        lambda: Options(mask=torch.ones(2, 2).bool(), window=4),
        ["positions", "nothing, with mask and window", "[tokens]"],
    ),
    "out_scale 0": (lambda: Options(out_scale=0), ["out_scale", "0", "above 0"]),
    "page_table of lists": (lambda: Batch([[0]], [1], [0, 1]), ["page_table", "[[0]]", "a tensor of int32 or int64"]),  # type: ignore[arg-type]
    "hint that is a float": (lambda: Batch(BYTES, BYTES, BYTES, max_q_len=1.5), ["max_q_len", "1.5", "an int"]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_constructor_refuses(name: str) -> None:
    make, words = CONSTRUCTIONS[name]
    with pytest.raises(quire.ArgumentError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("kind", ["tensor", "head", "token"])
def test_bad_scale_values_are_found_before_a_kernel_reads_them(kind: str, value: float) -> None:
    s = build(53, **LENS, format="e4m3fn", scales=kind)
    assert s.cache.k_scale is not None
    if kind == "tensor":
        s.cache.k_scale.fill_(value)
    elif kind == "head":
        s.cache.k_scale[1] = value
    else:
        s.cache.k_scale[int(s.batch.page_table[2, 1]), 3, 1] = value
    if kind == "token" and not value <= 0:
        # What `write` gives a token that holds a NaN or an infinity: the rows that see it show it, and others go on.
        assert [(v.rule, v.seq, v.harmless) for v in quire.check(s.q, s.cache, s.batch)] == [("quantisation", 2, True)]
        out = quire.attend(s.q, s.cache, s.batch)
        s.check(torch.cat((out[:5], s.expected[5:7].to(out.dtype))))
    with quire.checked() if kind == "token" else contextlib.nullcontext():
        with pytest.raises(quire.ContractError, match=r"\[quantisation\] k_scale(.|\n)*a finite number above 0"):
            quire.attend(s.q, s.cache, s.batch)


def test_batch_invariant_refuses_context_form_over_a_quantised_cache() -> None:
    s = build(54, **LENS, format="e4m3fn", form="context", batch_invariant=True)
    with pytest.raises(quire.ContractError, match=r"batch_invariant(.|\n)*full form"):
        quire.attend(s.q, s.cache, s.batch, s.options, new=s.new)


def test_write_refuses() -> None:
    pool = PagePool(4, 4)
    cache = KVCache.allocate(pool, kv_heads=2, head_dim=8, dtype=torch.float32)
    batch = pool.step({pool.sequence(): 3})
    k = torch.ones(3, 2, 8)
    for change, words in (
        ({"k": k[:, :1]}, ["k", "float32[3, 1, 8]", "[3, 2, 8]"]),
        ({"v": k[:2]}, ["v", "float32[2, 2, 8]", "[3, 2, 8]"]),
        ({"k": k.int(), "v": k.int()}, ["k", "int32", "float32, float16 or bfloat16"]),
        ({"slots": torch.tensor([0, 1])}, ["slots", "int64[2]", "[tokens] = 3"]),
        ({"slots": torch.tensor([0.0, 1, 2])}, ["slots", "float32[3]", "int32 or int64"]),
        ({"slots": torch.tensor([0, 1, 16])}, ["slots[2]", "16", "[0, 16)"]),
        ({"slots": torch.tensor([0, 1, 0])}, ["slots[2]", "slot 0, to which token 0 is written too"]),
    ):
        arguments: dict[str, Any] = {"k": k, "v": k} | change
        with pytest.raises(quire.ContractError) as caught:
            quire.write(arguments.pop("k"), arguments.pop("v"), cache, batch, **arguments)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in\n{caught.value}"
    assert not cache.k.any()
    assert not cache.v.any()


def test_a_page_with_several_holders_is_not_written() -> None:
    pool = PagePool(4, 4)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=4, dtype=torch.float32)
    first = pool.sequence()
    batch = pool.step({first: 3})
    pool.fork(first)
    k = torch.ones(3, 1, 4)
    with pytest.raises(quire.ContractError, match=r"\[ownership\](.|\n)*which 2 sequences hold(.|\n)*copies shared pages"):
        quire.write(k, k, cache, batch)
    assert not cache.k.any()


def test_step_checks_and_chooses_before_it_writes() -> None:
    pool = PagePool(4, 4)
    cache = KVCache.allocate(pool, kv_heads=1, head_dim=4, dtype=torch.float32)
    batch = pool.step({pool.sequence(): 3})
    q, k = torch.ones(3, 2, 4), torch.ones(3, 1, 4)
    with pytest.raises(quire.KernelError):
        quire.step(q, k, k, cache, batch, kernel="fast")
    with pytest.raises(quire.ContractError):
        quire.step(q[:, :, :3], k, k, cache, batch)
    assert not cache.k.any()
