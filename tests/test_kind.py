"""What is kept of one call must hold for the next: everything that a launcher was made for is part of a kind."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import quire
from quire.attend import are_apart, reads_elsewhere
from quire.cache.kv_cache import FIXED
from quire.cache.ledger import Ledger
from quire.errors import ArgumentError
from quire.kind import of_batch, of_cache, of_options, tensors_of
from quire.options import Options
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
    assert of_options(options) != before and tensors_of(options) == (sinks,)


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
    cache.k_scale = torch.ones(cache.kv_heads)
    assert of_cache(cache) is not kinds[0]


@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_a_cache_is_made_of_stays(name: str) -> None:
    """Its views, sizes and kind are worked out once."""
    cache = build(1, [1, 2], [20, 30], format="bf16", q_dtype="bf16").cache
    with pytest.raises(AttributeError, match=f"{name} of a cache .* cannot be replaced"):
        setattr(cache, name, getattr(cache, name))
    assert copy.deepcopy(cache).page_size == cache.page_size


@pytest.mark.parametrize("name", ["q_scale", "out_scale"])
def test_scales_that_are_read_elsewhere(name: str) -> None:
    """Their numbers become part of a launcher: none is kept."""
    q = torch.empty(1, device="meta")
    assert reads_elsewhere(replace(Options(), **{name: torch.tensor(0.5)}), q)
    assert not reads_elsewhere(replace(Options(), **{name: torch.tensor(0.5, device="meta")}), q)
    assert not reads_elsewhere(replace(Options(), **{name: 0.5}), q) and not reads_elsewhere(Options(), q)


def test_an_output_over_an_option() -> None:
    """It is looked for in every call that could be quick, and refused by the rules."""
    s = build(1, [1, 2], [20, 30])
    memory = torch.zeros(s.q.numel() + s.q.shape[1])
    out, sinks = memory[: s.q.numel()].view(s.q.shape), memory[: s.q.shape[1]]
    assert not are_apart(out, s.q, *tensors_of(Options(sinks=sinks)))
    with pytest.raises(quire.ContractError, match="sinks"):
        quire.attend(s.q, s.cache, s.batch, Options(sinks=sinks), out=out)


def test_numbers_that_torch_negates_when_it_reads() -> None:
    s = build(1, [1, 2], [20, 30])
    negated = torch.complex(s.q, s.q).conj().imag
    assert negated.is_neg()
    with pytest.raises(ArgumentError, match="resolve_neg"):
        quire.attend(negated, s.cache, s.batch)
    assert torch.equal(quire.attend(negated.resolve_neg(), s.cache, s.batch), quire.attend(-s.q, s.cache, s.batch))
