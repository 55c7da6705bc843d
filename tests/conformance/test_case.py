"""A case is one line of text, both ways, and the same numbers every time."""

from __future__ import annotations

import pytest
import torch

from quire.conformance.cases.build import build
from quire.conformance.cases.case import Case
from quire.conformance.cases.suite import LEVELS, cases
from quire.errors import ArgumentError


def test_every_case_comes_back_from_its_line() -> None:
    for case in cases("full"):
        assert Case.parse(str(case)) == case


@pytest.mark.parametrize("level", LEVELS)
def test_names_are_unique(level: str) -> None:
    names = [case.name for case in cases(level)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("line", ["a window", "a windo=3,0", "a window=x", "a lse=maybe", "a layout=rows", "a q_lens=1,2"])
def test_a_bad_line_is_refused(line: str) -> None:
    with pytest.raises(ArgumentError):
        Case.parse(line)


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ArgumentError, match="smoke, standard, full"):
        cases("some")


def test_a_case_is_the_same_every_time_and_poison_changes_nothing_else() -> None:
    one, other = build(Case("a", padding=2)), build(Case("a", padding=2, poison="decoy", fill_byte=0x35))
    assert torch.equal(one.q[: one.live], other.q[: other.live])
    assert torch.equal(one.page_table, other.page_table)
    live = ~one.k_pages.isnan()
    assert torch.equal(one.k_pages[live], other.k_pages[live])
    assert not other.k_pages.isnan().any() and not live.all()
