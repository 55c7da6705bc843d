"""Covering arrays: every allowed pair of parameter values occurs in a case of `standard`, every triple in one of `full`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations, product
from typing import Any

import pytest

from quire.conformance.cases.case import Case
from quire.conformance.cases.covering import Forbidden, Space, covering_array
from quire.conformance.cases.parameters import FORBIDDEN, PARAMETERS, lengths_of
from quire.conformance.cases.suite import cases_of

DEFAULTS = {spec.name: spec.default for spec in fields(Case)}
LENGTHS = ("lengths", "empty")


def row_of(case: Case) -> dict[str, str]:
    """The parameter values of a case, derived from its fields."""
    row = {}
    for name, values in PARAMETERS.items():
        used = sorted({field for given in values.values() for field in given})
        if name not in LENGTHS:
            mine = [getattr(case, field) for field in used]
            (row[name],) = (v for v, given in values.items() if [given.get(field, DEFAULTS[field]) for field in used] == mine)
    both = product(PARAMETERS["lengths"], PARAMETERS["empty"])
    sequences = list(zip(case.q_lens, case.kv_lens))
    ((row["lengths"], row["empty"]),) = (p for p in both if list(lengths_of(p[0], case.page_size, p[1])) == sequences)
    return row


def is_forbidden(row: dict[str, str]) -> bool:
    return any(rule.holds(*(row[name] for name in rule.parameters)) for rule in FORBIDDEN if set(rule.parameters) <= row.keys())


def can_be_completed(row: dict[str, str], rest: Sequence[str]) -> bool:
    """Whether some allowed row contains these values: an independent search over the parameters in `rest`."""
    if is_forbidden(row):
        return False
    if not rest:
        return True
    return any(can_be_completed({**row, rest[0]: value}, rest[1:]) for value in PARAMETERS[rest[0]])


def near(names: Sequence[str]) -> list[str]:
    """Parameters that share a rule with these, and those that share a rule with them."""
    found = dict.fromkeys(names)
    for _ in range(2):
        found |= dict.fromkeys(p for rule in FORBIDDEN if found.keys() & set(rule.parameters) for p in rule.parameters)
    return [name for name in found if name not in names]


def uncovered(cases: Sequence[Case], strength: int) -> list[tuple[tuple[str, str], ...]]:
    """Tuples of values that no case contains."""
    rows = [row_of(case) for case in cases]
    missing = []
    for names in combinations(PARAMETERS, strength):
        have = {tuple(row[name] for name in names) for row in rows}
        missing += [tuple(zip(names, values)) for values in product(*(PARAMETERS[name] for name in names)) if values not in have]
    return missing


def test_no_case_has_a_forbidden_combination() -> None:
    for case in (*cases_of("pairs"), *cases_of("triples")):
        assert not is_forbidden(row_of(case)), case


def test_standard_has_every_allowed_pair() -> None:
    missing = uncovered(cases_of("pairs"), 2)
    assert len(missing) < 100
    for pair in missing:
        assert not can_be_completed(dict(pair), near([name for name, _ in pair])), pair


def test_full_has_every_allowed_triple() -> None:
    """A triple that contains an impossible pair is impossible; the others are searched."""
    impossible = {frozenset(pair) for pair in uncovered(cases_of("pairs"), 2)}
    missing = uncovered((*cases_of("pairs"), *cases_of("triples")), 3)
    left = [items for items in missing if not any(frozenset(pair) in impossible for pair in combinations(items, 2))]
    for items in left:
        row = dict(items)
        assert is_forbidden(row) or not can_be_completed(row, near([name for name, _ in items])), items


@pytest.mark.parametrize("strength", [2, 3])
def test_small_array_is_complete_and_reproducible(strength: int) -> None:
    values: dict[str, Any] = {"a": "123", "b": "12", "c": "123", "d": "12"}
    space = Space(values, [Forbidden("a is not b", ("a", "b"), lambda a, b: a == b)])
    rows = covering_array(space, strength)
    assert rows == covering_array(space, strength)
    assert len(rows) < 3 * 2 * 3 * 2
    for names in combinations(values, strength):
        have = {tuple(row[name] for name in names) for row in rows}
        want = {
            pair for pair in product(*(values[name] for name in names))
            if not {"a", "b"} <= set(names) or pair[names.index("a")] != pair[names.index("b")]
        }  # fmt: skip
        assert have == want
