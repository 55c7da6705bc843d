"""Cases: parsing and printing as one line of text, invalid lines, and reproducible numbers."""

from __future__ import annotations

import pytest
import torch

from quire.conformance.cases.build import build
from quire.conformance.cases.case import Case
from quire.conformance.cases.suite import LEVELS, all_cases, cases
from quire.errors import ArgumentError


def test_str_and_parse_are_inverse() -> None:
    for case in all_cases():
        assert Case.parse(str(case)) == case


@pytest.mark.parametrize("level", LEVELS)
def test_names_are_unique(level: str) -> None:
    names = [case.name for operation in ("attend", "write") for case in cases(level, operation)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "line, allowed",
    [
        ("a window", "FIELD=VALUE"),
        ("a windo=3,0", "FIELD=VALUE"),
        ("a window=x", "window: given x; allowed: integers or none, separated by commas"),
        ("a q_lens=1,b", "q_lens: given 1,b; allowed: integers, separated by commas"),
        ("a lse=1", "lse: given 1; allowed: yes or no"),
        ("a softcap=much", "softcap: given much; allowed: a number or none"),
        ("a group=two", "group: given two; allowed: an integer"),
        ("a layout=rows", "layout: given rows; allowed: nhd, hnd"),
        ("a q_lens=1,2", "as many as kv_lens"),
        ("a rope=half-split", "attend with rope=half-split"),
        ("a operation=write window=3,0", "write with window=3,0"),
        ("a operation=write norm=weight", "rope: given none with norm"),
        ("a operation=write rope=interleaved hadamard=yes", "without hadamard"),
        ("a operation=write rope=interleaved rotary_dim=66", "rotary_dim: given 66; allowed: an even number"),
        ("a operation=write q_dtype=e4m3fn", "a write of fp32, fp16 or bf16"),
        ("a hadamard=yes head_dim=80", "a power of two"),
    ],
)
def test_invalid_line_is_refused_with_the_allowed_values(line: str, allowed: str) -> None:
    with pytest.raises(ArgumentError, match=allowed):
        Case.parse(line)


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ArgumentError, match="smoke, standard, full"):
        cases("some")


def test_numbers_are_reproducible_and_independent_of_poison() -> None:
    one, other = build(Case("a", padding=2)), build(Case("a", padding=2, poison="decoy", fill_byte=0x35))
    assert torch.equal(one.q[: one.live], other.q[: other.live])
    assert torch.equal(one.page_table, other.page_table)
    live = ~one.k_pages.isnan()
    assert torch.equal(one.k_pages[live], other.k_pages[live])
    assert not other.k_pages.isnan().any() and not live.all()
