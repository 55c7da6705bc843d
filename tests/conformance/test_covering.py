"""Covering arrays: every allowed pair of parameter values occurs in a case of `standard`, every triple in one of `full`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations, product
from typing import Any

import pytest

from quire.conformance.cases import parameters, write_parameters
from quire.conformance.cases.case import Case
from quire.conformance.cases.covering import Forbidden, Space, covering_array
from quire.conformance.cases.parameters import lengths_of
from quire.conformance.cases.suite import cases_of

DEFAULTS = {spec.name: spec.default for spec in fields(Case)}
LENGTHS = ("lengths", "empty")
MODULES = {"": parameters, "write_": write_parameters}
"""The parameters of each operation, by the prefix of its files."""
of_each_operation = pytest.mark.parametrize("prefix", MODULES, ids=["attend", "write"])


def row_of(case: Case) -> dict[str, str]:
    """The parameter values of a case, derived from its fields."""
    row, known = {}, MODULES["write_" if case.operation == "write" else ""].PARAMETERS
    for name, values in known.items():
        used = sorted({field for given in values.values() for field in given})
        if name not in LENGTHS:
            mine = [getattr(case, field) for field in used]
            (row[name],) = (v for v, given in values.items() if [given.get(field, DEFAULTS[field]) for field in used] == mine)
    both = product(known["lengths"], known["empty"])
    sequences = list(zip(case.q_lens, case.kv_lens))
    ((row["lengths"], row["empty"]),) = (p for p in both if list(lengths_of(p[0], case.page_size, p[1])) == sequences)
    return row


def is_forbidden(row: dict[str, str], prefix: str) -> bool:
    rules = MODULES[prefix].FORBIDDEN
    return any(rule.holds(*(row[name] for name in rule.parameters)) for rule in rules if set(rule.parameters) <= row.keys())


def can_be_completed(row: dict[str, str], rest: Sequence[str], prefix: str) -> bool:
    """Whether some allowed row contains these values: an independent search over the parameters in `rest`."""
    if is_forbidden(row, prefix):
        return False
    if not rest:
        return True
    return any(can_be_completed({**row, rest[0]: value}, rest[1:], prefix) for value in MODULES[prefix].PARAMETERS[rest[0]])


def near(names: Sequence[str], prefix: str) -> list[str]:
    """Parameters that share a rule with these, and those that share a rule with them."""
    found = dict.fromkeys(names)
    for _ in range(2):
        found |= dict.fromkeys(
            p for rule in MODULES[prefix].FORBIDDEN if found.keys() & set(rule.parameters) for p in rule.parameters
        )
    return [name for name in found if name not in names]


def uncovered(cases: Sequence[Case], strength: int, prefix: str) -> list[tuple[tuple[str, str], ...]]:
    """Tuples of values that no case contains."""
    rows = [row_of(case) for case in cases]
    missing, known = [], MODULES[prefix].PARAMETERS
    for names in combinations(known, strength):
        have = {tuple(row[name] for name in names) for row in rows}
        missing += [tuple(zip(names, values)) for values in product(*(known[name] for name in names)) if values not in have]
    return missing


@of_each_operation
def test_no_case_has_a_forbidden_combination(prefix: str) -> None:
    for case in (*cases_of(f"{prefix}pairs"), *cases_of(f"{prefix}triples")):
        assert not is_forbidden(row_of(case), prefix), case


@of_each_operation
def test_standard_has_every_allowed_pair(prefix: str) -> None:
    missing = uncovered(cases_of(f"{prefix}pairs"), 2, prefix)
    assert len(missing) < 100
    for pair in missing:
        assert not can_be_completed(dict(pair), near([name for name, _ in pair], prefix), prefix), pair


@of_each_operation
def test_full_has_every_allowed_triple(prefix: str) -> None:
    """A triple that contains an impossible pair is impossible; the others are searched."""
    pairs, triples = cases_of(f"{prefix}pairs"), cases_of(f"{prefix}triples")
    impossible = {frozenset(pair) for pair in uncovered(pairs, 2, prefix)}
    missing = uncovered((*pairs, *triples), 3, prefix)
    left = [items for items in missing if not any(frozenset(pair) in impossible for pair in combinations(items, 2))]
    for items in left:
        row = dict(items)
        assert is_forbidden(row, prefix) or not can_be_completed(row, near([name for name, _ in items], prefix), prefix), items


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
