"""What is kept of one call must hold for the next: everything that a launcher was made for is part of a kind."""

from __future__ import annotations

import copy
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import quire
from quire.attend import are_apart, reads_elsewhere
from quire.cache.ledger import Ledger
from quire.contract.call import Call
from quire.errors import ArgumentError
from quire.kind import of_batch, of_cache, of_options, read_by
from quire.options import Options
from support.launched import bits
from support.scenario import build

OTHERS: dict[str, Any] = {
    "scale": 0.3,
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


def batch() -> quire.Batch:
    return build(1, [1, 2], [20, 30]).batch


def test_every_option_makes_a_kind() -> None:
    assert set(OTHERS) == {field.name for field in fields(Options)}
    kinds = [of_options(Options())]
    for name, value in OTHERS.items():
        more = {"mask": OTHERS["mask"]} if name == "positions" else {}
        kinds.append(of_options(Options(**{name: value}, **more)))
    kinds += [
        of_options(Options(scale=0.2)),
        of_options(Options(alibi=torch.ones(8)[::2])),
        of_options(Options(sinks=torch.ones(5))),
    ]
    assert len(set(kinds)) == len(kinds)
    assert of_options(Options(scale=0.3)) == of_options(Options(scale=0.3))
    assert of_options(Options(sinks=torch.zeros(4))) == of_options(Options(sinks=torch.ones(4)))


def test_parameters_that_are_converted_in_place() -> None:
    """What `module.to(torch.bfloat16)` does."""
    sinks = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    options = Options(sinks=sinks)
    before = of_options(options)
    sinks.data = sinks.data.bfloat16()
    assert of_options(options) != before


@pytest.mark.parametrize("change", ["wider table", "long table", "long kv_lens", "more rows", "max_q_len", "max_kv_len"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_batch_that_is_changed(change: str, copied: bool) -> None:
    mine = batch()
    before = of_batch(mine)
    assert of_batch(mine) is before and of_batch(batch()) is before
    mine = copy.copy(mine) if copied else mine
    table = mine.page_table
    if change == "wider table":
        mine.page_table = torch.cat((table, table), 1)
    elif change == "long table":
        mine.page_table = table.long()
    elif change == "long kv_lens":
        mine.kv_lens = mine.kv_lens.long()
    elif change == "more rows":
        mine.page_table, mine.kv_lens = torch.cat((table, table)), torch.cat((mine.kv_lens, mine.kv_lens))
    else:
        setattr(mine, change, 1000)
    assert of_batch(mine) is not before


def test_a_cache_that_is_changed() -> None:
    cache = build(1, [1, 2], [20, 30], format="e4m3fn", q_dtype="bf16").cache
    kinds = [of_cache(cache)]
    assert of_cache(cache) is kinds[0]
    cache.ledger = Ledger(cache.pages, cache.page_size, cache.device)
    kinds.append(of_cache(cache))
    cache.ledger = None
    assert of_cache(cache) is kinds[0] and len(set(kinds)) == 2
    for name in ("k_scale", "v_scale"):
        setattr(cache, name, torch.ones(cache.kv_heads))
        kinds.append(of_cache(cache))
    assert len(set(kinds)) == 4


@pytest.mark.parametrize("name", ["k", "v"])
def test_the_pages_of_a_cache_stay(name: str) -> None:
    """Views, sizes and kind are worked out once."""
    cache = build(1, [1, 2], [20, 30], format="bf16", q_dtype="bf16").cache
    with pytest.raises(AttributeError):
        setattr(cache, name, getattr(cache, name))
    with pytest.raises(AttributeError):
        delattr(cache, name)
    same = copy.deepcopy(cache)
    assert torch.equal(bits(same.k), bits(cache.k)) and same.k_view.data_ptr() == same.k.data_ptr() != cache.k.data_ptr()


@pytest.mark.parametrize("name", ["q_scale", "out_scale"])
def test_scales_that_are_read_elsewhere(name: str) -> None:
    """Their numbers become part of a launcher: none is kept."""
    q = torch.empty(1, device="meta")
    assert reads_elsewhere(replace(Options(), **{name: torch.tensor(0.5)}), q)
    assert not reads_elsewhere(replace(Options(), **{name: torch.tensor(0.5, device="meta")}), q)
    assert not reads_elsewhere(replace(Options(), **{name: 0.5}), q) and not reads_elsewhere(Options(), q)


READ = ["sinks", "k_scale", "v_scale", "page_table", "kv_lens", "q_starts"]


@pytest.mark.parametrize("name", READ)
def test_an_output_over_what_is_read(name: str) -> None:
    """It is looked for in every call that could be quick, and refused by the rules."""
    s = build(1, [1, 2], [20, 30], format="e4m3fn", q_dtype="fp32", sinks=True)
    owner: Any = s.options if name == "sinks" else s.cache if "scale" in name else s.batch
    was = getattr(owner, name)
    memory = torch.zeros(max(s.q.numel(), 2 * was.numel()))
    assert are_apart(memory, s.q, *read_by(s.cache, s.batch, s.options))
    over = memory.view(was.dtype)[: was.numel()].view(was.shape).copy_(was)
    out = memory[: s.q.numel()].view(s.q.shape)
    if owner is s.options:
        s.options = replace(s.options, sinks=over)
    else:
        setattr(owner, name, over)
    assert not are_apart(out, s.q, *read_by(s.cache, s.batch, s.options))
    with pytest.raises(quire.ContractError, match=f"memory shared with {name}"):
        quire.attend(s.q, s.cache, s.batch, s.options, out=out)


@pytest.mark.parametrize("verb", ["attend", "step"])
def test_what_the_rules_look_at_is_looked_at_in_quick_calls(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = build(1, [1, 2], [20, 30], format="e4m3fn", q_dtype="fp32", sinks=True, alibi=True)
    s.batch.slots = s.batch.slots_of_tokens(3, s.cache.page_size)
    k = torch.ones(3, s.cache.kv_heads, s.cache.head_dim)
    out, seen = torch.empty_like(s.q), []
    module = sys.modules[f"quire.{verb}"]
    monkeypatch.setattr(module, "is_quick", lambda *call: True)
    monkeypatch.setattr(module, "are_apart", lambda *tensors: seen.extend(tensors))
    more, rows = ({"new": (k, k.clone())}, ()) if verb == "attend" else ({}, (k, k.clone()))
    getattr(quire, verb)(s.q, *rows, s.cache, s.batch, s.options, out=out, **more)
    call = Call(s.cache, s.batch, s.q, s.options, more.get("new"), out, *rows)
    wanted = [*call.tensors.values(), s.cache.k, s.cache.v, s.cache.k_scale, s.cache.v_scale]
    assert {id(tensor) for tensor in wanted} == {id(tensor) for tensor in seen if tensor is not None}


def test_numbers_that_torch_negates_when_it_reads() -> None:
    s = build(1, [1, 2], [20, 30])
    negated = torch.complex(s.q, s.q).conj().imag
    assert negated.is_neg()
    with pytest.raises(ArgumentError, match="resolve_neg"):
        quire.attend(negated, s.cache, s.batch)
    assert torch.equal(quire.attend(negated.resolve_neg(), s.cache, s.batch), quire.attend(-s.q, s.cache, s.batch))
