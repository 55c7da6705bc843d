"""The fast static check and the native validation against the rules, on random legal and illegal calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire import ArgumentError, Batch, KVCache, Options, PagePool, Rope
from quire.contract import fast, validated
from quire.contract.call import Call
from quire.contract.rules import CONTRACT
from quire.kernels.native.library import FILE
from support.kernels import NO_LIBRARY

STATIC = [find for rule in CONTRACT for find in rule.static]
VALUES = [find for rule in CONTRACT for find in rule.values]


class Draw:
    """A random call, legal as it is made. `arguments` are those of `Call`."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        pick = self.chance.choice
        self.seqs, self.size, self.heads = pick((0, 1, 2, 3, 4)), pick((1, 2, 4)), pick((1, 2))
        self.q_lens = [pick((0, 1, 1, 2, 5)) for _ in range(self.seqs)]
        self.context = [pick((0, 1, 3, 8)) for _ in range(self.seqs)]
        self.tokens = sum(self.q_lens) + pick((0, 0, 2))
        kv_lens = [q + c for q, c in zip(self.q_lens, self.context)]
        columns = [-(-n // self.size) for n in kv_lens]
        width = max(columns, default=0) + pick((0, 2))
        self.pages = sum(columns) + 1
        ids = list(range(self.pages))
        self.chance.shuffle(ids)
        index = pick((torch.int32, torch.int64))
        table = torch.full((self.seqs, width), pick((-1, 10**6)), dtype=index)
        for row, count in zip(table, columns):
            row[:count] = torch.tensor([ids.pop() for _ in range(count)], dtype=index)
        starts = [sum(self.q_lens[:i]) for i in range(self.seqs + 1)]
        lens = torch.tensor(kv_lens, dtype=index)
        if pick((False, True)):  # views with strides of their own
            table, lens = table.repeat_interleave(2, 1)[:, ::2], lens.repeat_interleave(3)[::3]
        batch = Batch(table, lens, torch.tensor(starts, dtype=pick((torch.int32, torch.int64))))
        q_heads, dim = self.heads * pick((1, 3)), 4
        self.arguments: dict[str, Any] = {"cache": self.cache(dim), "batch": batch, "options": Options()}
        operation = pick(("attend", "attend", "context", "write", "step", "slots"))
        if operation != "write":
            self.arguments |= {"q": torch.randn(self.tokens, q_heads, dim), "options": self.options(q_heads, operation)}
        if operation == "context":
            self.arguments["new"] = self.pair(dim)
        if operation in ("write", "step", "slots"):
            self.arguments["k"], self.arguments["v"] = self.pair(dim)
        if operation == "slots":
            self.arguments["slots"] = batch.slots_of_tokens(self.tokens, self.size)
        if "q" in self.arguments and pick((False, False, True)):
            self.arguments["out"] = torch.empty(self.tokens, q_heads, dim)
        if "q" in self.arguments and seed % 4 == 0:
            self.add_spans(batch, index)
        # A generator of its own: other draws stay as they are.
        self.more = random.Random(f"rope {seed}")
        if "k" in self.arguments and self.more.random() < 0.4:
            self.arguments |= self.rotation(q_heads, dim)

    def rotation(self, q_heads: int, dim: int) -> dict[str, Any]:
        """The arguments of a write that rotates."""
        pick, k, options = self.more.choice, self.arguments["k"], self.arguments["options"]
        length = pick((14, 14, 64, 9))
        rope = Rope(torch.ones(length, 2), torch.ones(length, 2), q_norm=pick((None, torch.ones(dim))))
        if pick((False, False, True)):
            rope = Rope(torch.ones(length, 2), torch.ones(length, 2), sections=(1, 1, 0))
        shape = (self.tokens,) if rope.sections is None else (3, self.tokens)
        positions = torch.randint(0, 14, shape, dtype=pick((torch.int32, torch.int64)))
        if rope.sections is None and options.mask is None:
            positions = pick((None, positions))
        q = self.arguments.get("q", pick((None, torch.randn(self.tokens, q_heads, dim))))
        if q is not None and pick((False, True)):  # views of a fused projection
            fused = torch.randn(self.tokens, q_heads + 2 * self.heads, dim)
            q, k, self.arguments["v"] = fused.split((q_heads, self.heads, self.heads), 1)
            self.arguments["k"] = k
            if "q" in self.arguments:
                self.arguments["q"] = q
        out = None if q is None or "q" in self.arguments else pick((None, q, torch.empty(q.shape)))
        return {"rope": rope, "q_in": q, "q_out": out, "rope_positions": positions}

    def add_spans(self, batch: Batch, index: torch.dtype) -> None:
        """Gives every token a span, in place of a window, causality and a mask."""
        options, spans = self.arguments["options"], []
        for q_len, context in zip(self.q_lens, self.context):
            for _ in range(q_len):
                spans.append([self.chance.randint(0, q_len + context) for _ in "be"])
        spans += [[-3, 10**6]] * (self.tokens - len(spans))
        batch.spans = torch.tensor(spans, dtype=index).view(-1, 2)
        self.arguments["options"] = Options(alibi=options.alibi, out_scale=options.out_scale)

    def pair(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(self.tokens, self.heads, dim), torch.randn(self.tokens, self.heads, dim)

    def cache(self, dim: int) -> KVCache:
        pool = self.chance.choice((None, PagePool(self.pages, self.size)))
        kind = self.chance.choice((None, None, "tensor", "head", "token"))
        shape = (self.pages, self.size, self.heads, dim)
        if kind is None:
            return KVCache.wrap(torch.zeros(shape), torch.zeros(shape), layout="nhd", pool=pool)
        scale = {"tensor": (), "head": (self.heads,), "token": shape[:3]}[kind]
        stored = torch.zeros(shape, dtype=torch.uint8)
        scales = {"k_scale": torch.rand(scale) + 0.1, "v_scale": torch.rand(scale) + 0.1}
        return KVCache.wrap(stored, stored.clone(), layout="nhd", format="e4m3fn", pool=pool, **scales)

    def options(self, q_heads: int, operation: str) -> Options:
        pick = self.chance.choice
        given: dict[str, Any] = {}
        given["window"] = pick((None, None, 1, 3, (2, 0), (0, 2), (None, 1), (1, None)))
        kind = pick(("plain", "plain", "open", "rows", "tree"))
        if kind == "open":
            given["causal"] = False
        elif kind == "rows":
            given["causal"] = torch.tensor([pick((False, True)) for _ in range(self.seqs)], dtype=torch.bool)
        elif kind == "tree":
            given["mask"] = torch.rand(self.tokens, max(self.q_lens, default=0) + pick((0, 1))) < pick((0.3, 0.7, 1.0))
            given["positions"] = torch.randint(-2, 14, (self.tokens,))
        if pick((False, False, True)):
            given["alibi"] = torch.rand(q_heads)
        if pick((False, False, True)):
            given["out_scale"] = torch.tensor(0.5)
        if pick((False, True)) and operation != "context":
            given["batch_invariant"] = True
        return Options(**given)

    def call(self) -> Call:
        return Call(**self.arguments)


def legal(checks: list[Any], call: Call) -> bool:
    return not any(not violation.harmless for find in checks for violation in find(call))


def spoil_static(draw: Draw) -> None:
    """Changes something that shapes, types, devices or options show. Some changes are legal."""
    given, batch, pick = draw.arguments, draw.arguments["batch"], draw.chance.choice
    tensors = [name for name in ("q", "k", "v", "out", "slots") if name in given]
    tensors += [name for name in ("q_in", "q_out", "rope_positions") if given.get(name) is not None]
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.to(pick((torch.float16, torch.int32, torch.int64, torch.float64, torch.float8_e5m2))),
        lambda t: t[1:],
        lambda t: t.unsqueeze(0),
        lambda t: t[..., :-1],
        lambda t: t.to("meta"),
        lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        lambda t: t.clone().requires_grad_() if t.is_floating_point() else t.bool(),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
        lambda t: t.expand(2, *t.shape)[0],
        lambda t: torch.zeros(1, dtype=t.dtype).expand(t.shape),
        lambda t: given["cache"].k.view(-1)[: t.numel()].view(t.shape) if t.numel() <= given["cache"].k.numel() else t,
    ]
    if batch.spans is not None and pick((False, True)):
        if pick((False, True)):
            batch.spans = pick(changes)(batch.spans)
        else:
            wrong = pick(({"window": 3}, {"causal": False}, {"mask": torch.ones(draw.tokens, 9, dtype=torch.bool)}, {}))
            given["options"] = Options(**wrong)
        return
    place = pick((*tensors, *tensors, "page_table", "kv_lens", "q_starts", "batch.slots", "copies", "new", "options", "share"))
    change = pick(changes)
    if place in tensors:
        given[place] = change(given[place])
    elif place == "batch.slots":
        batch.slots = change(torch.arange(draw.tokens) - draw.tokens)
    elif place == "copies":
        batch.copies = pick((((0, 0),), ((0, 99),)))
    elif place == "new" and "new" in given:
        at = pick((0, 1))
        given["new"] = tuple(change(t) if i == at else t for i, t in enumerate(given["new"]))
    elif place == "options" and "q" in given:
        given["options"] = Options(
            **pick(
                (
                    {"alibi": torch.ones(given["q"].shape[-1])},
                    {"sinks": torch.ones(3)},
                    {"sinks": torch.ones(given["q"].shape[1], device="meta")},
                    {"causal": torch.ones(2, dtype=torch.bool)},
                    {"mask": torch.ones(3, 4, dtype=torch.bool)},
                    {"mask": torch.ones(draw.tokens, 9, dtype=torch.bool), "positions": torch.ones(4, dtype=torch.int64)},
                    {"q_scale": 2.0},
                    {"out_scale": 2.0},
                    {"batch_invariant": True},
                )
            )
        )
    elif place == "share" and "out" in given:
        given["out"] = pick((given["q"], given["q"].reshape(-1)[:0].new_empty(given["q"].shape)))
    elif hasattr(batch, place):
        setattr(batch, place, change(getattr(batch, place)))


@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_what_shapes_show(first: int) -> None:
    surely = legals = refused = 0
    for seed in range(first, first + 500):
        draw = Draw(seed)
        for _ in range(draw.chance.choice((0, 1, 1, 1, 2))):
            spoil_static(draw)
        try:
            call = draw.call()
            fine = legal(STATIC, call)
        except (ArgumentError, AttributeError, IndexError, RuntimeError):
            continue  # refused before, or something that the rules themselves cannot look at
        quick = fast.is_certainly_legal(call)
        assert fine or not quick, f"seed {seed}: the quick check accepts what a rule refuses"
        surely, legals, refused = surely + quick, legals + fine, refused + (not fine)
    assert refused > 100, "too few calls were illegal for this to mean anything"
    assert surely > 0.7 * legals, f"only {surely} of {legals} legal calls were known to be"


def spoil_values(draw: Draw) -> None:
    """Changes a value that a rule looks at, or one that none does."""
    given, batch, pick = draw.arguments, draw.arguments["batch"], draw.chance.choice
    cache = given["cache"]
    if batch.spans is not None and draw.tokens and pick((False, True)):
        row, side = draw.chance.randrange(draw.tokens), pick((0, 1))
        batch.spans[row, side] += pick((-1, 1, -20, 20, 10**6, 2**30))
        return
    place = pick(("table", "table", "kv_lens", "kv_lens", "q_starts", "slots", "holders", "scale", "scale", "out_scale", "mask"))
    if place == "table" and batch.page_table.numel():
        row, column = (draw.chance.randrange(n) for n in batch.page_table.shape)
        batch.page_table[row, column] = pick((-1, draw.pages, 0, draw.pages - 1, 2**31 - 1, -(2**31)))
    elif place == "kv_lens" and draw.seqs:
        seq = draw.chance.randrange(draw.seqs)
        batch.kv_lens[seq] = pick((-1, 0, 1, 2**31 - 1, int(batch.kv_lens[seq]) + 1, int(batch.kv_lens[seq]) + draw.size, 40))
    elif place == "q_starts":
        at = draw.chance.randrange(draw.seqs + 1)
        batch.q_starts[at] = pick((0, 1, -1, int(batch.q_starts[at]) + 1, draw.tokens, draw.tokens + 1))
    elif place == "slots" and draw.tokens and "slots" in given:
        given["slots"][draw.chance.randrange(draw.tokens)] = pick(
            (-1, -2, 0, 1, draw.pages * draw.size, draw.pages * draw.size - 1)
        )
    elif place == "holders" and cache.pool is not None:
        cache.pool.holders[draw.chance.randrange(draw.pages)] = 2
    elif place == "scale" and cache.k_scale is not None:
        scale = pick((cache.k_scale, cache.v_scale)).view(-1)
        bad = pick((0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-40))
        scale[draw.chance.randrange(len(scale))] = bad
    elif place == "out_scale" and isinstance(given["options"].out_scale, torch.Tensor):
        given["options"].out_scale.fill_(pick((0.0, float("inf"), float("nan"))))
    elif given.get("rope_positions") is not None and draw.tokens and draw.more.random() < 0.7:
        given["rope_positions"][..., draw.more.randrange(draw.tokens)] = draw.more.choice((-1, 13, 14, 64, 2**31 - 1))
    elif place == "mask" and given["options"].mask is not None:
        given["options"].positions.add_(pick((-20, 5, 1000)))


@pytest.mark.skipif(not FILE.exists(), reason=NO_LIBRARY)
@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_what_values_show(first: int) -> None:
    """Native code and the rules say the same, in both directions."""
    illegal = 0
    for seed in range(first, first + 500):
        draw = Draw(seed)
        for _ in range(draw.chance.choice((0, 1, 1, 2))):
            spoil_values(draw)
        call = draw.call()
        fine = legal(VALUES, call)
        assert validated.are_certainly_legal(call, False) is fine, f"seed {seed}: the rules say {'legal' if fine else 'illegal'}"
        illegal += not fine
    assert 50 < illegal < 450


@pytest.mark.parametrize("context_from, only", [(1, (0, 2**31 - 1)), (2, (0, 2**31 - 1)), (2, (1, 1)), (1, (2, 5))])
def test_calls_of_which_some_sequences_are_not_part(context_from: int, only: tuple[int, int]) -> None:
    for seed in range(250):
        draw = Draw(seed)
        spoil_values(draw)
        if "q" in draw.arguments and "k" not in draw.arguments:
            call = Call(**draw.arguments, context_from=context_from, only=only)
            assert validated.are_certainly_legal(call, False) is legal(VALUES, call), f"seed {seed}"


def test_every_rule_is_covered_by_a_fast_check_or_runs_in_every_call() -> None:
    from quire.contract import check

    assert fast.COVERED | set(check._UNCOVERED) == set(STATIC)
    assert validated.COVERED | set(check._UNCOVERED_VALUES) == set(VALUES)
