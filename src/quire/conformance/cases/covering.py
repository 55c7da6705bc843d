"""Covering arrays: a small number of rows that contain every pair, or every triple, of parameter values.

A row assigns a value to each parameter. A rule forbids a combination of values of some parameters. A tuple of values is covered if
a row contains it, and impossible if no allowed row can contain it. Rows are constructed greedily: each starts with a missing tuple,
and every further parameter gets the value that covers the most missing tuples. The order of parameters comes from a generator with
a fixed seed, so the array is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

Row = dict[str, str]
Item = tuple[str, str]
"""A parameter and one of its values."""


class Forbidden(NamedTuple):
    """A rule: a combination of values that no row may contain."""

    reason: str
    parameters: tuple[str, ...]
    holds: Callable[..., bool]
    """Takes the values of `parameters` in order; True where the combination is forbidden."""


class Space:
    """Parameters, their values, and forbidden combinations."""

    def __init__(self, parameters: Mapping[str, Sequence[str]], forbidden: Sequence[Forbidden]):
        self.parameters = {name: tuple(values) for name, values in parameters.items()}
        self.rules: dict[str, list[tuple[tuple[str, ...], set[tuple[str, ...]]]]] = {name: [] for name in parameters}
        """For each parameter its rules: the parameters of a rule, and the combinations of values that it forbids."""
        for rule in forbidden:
            all_values = product(*(self.parameters[name] for name in rule.parameters))
            bad = {values for values in all_values if rule.holds(*values)}
            for name in rule.parameters:
                self.rules[name].append((rule.parameters, bad))

    def allows(self, row: Row, name: str) -> bool:
        """Whether no rule of this parameter forbids the row. Rules with a parameter that has no value yet are ignored."""
        return not any(tuple(map(row.get, names)) in bad for names, bad in self.rules[name])

    def leaves_values(self, row: Row, name: str) -> bool:
        """Whether every parameter that shares a rule with this one has a value, or has an allowed value left."""
        near = {one for names, _ in self.rules[name] for one in names if one not in row}
        return all(any(self.allows({**row, one: value}, one) for value in self.parameters[one]) for one in near)

    def complete(self, row: Row, order: Sequence[str], ranked: Callable[[str, Row], Sequence[str]]) -> Row | None:
        """Completes a row with a value for every parameter in `order`: the first of the `ranked` values with which all others can
        be completed. None if there is none."""
        rest = [name for name in order if name not in row]
        if not rest:
            return row
        for value in ranked(rest[0], row):
            longer = {**row, rest[0]: value}
            if self.allows(longer, rest[0]) and self.leaves_values(longer, rest[0]):
                done = self.complete(longer, rest[1:], ranked)
                if done is not None:
                    return done
        return None

    def possible(self, items: Sequence[Item]) -> bool:
        """Whether an allowed row contains all these items."""
        row = dict(items)
        if not all(self.allows(row, name) and self.leaves_values(row, name) for name in row):
            return False
        # Parameters that share a rule with the given ones come first, so that dead ends are found early.
        near = [one for name in row for names, _ in self.rules[name] for one in names]
        limited = [*dict.fromkeys(near), *(name for name, rules in self.rules.items() if rules and name not in near)]
        return self.complete(row, limited, lambda name, row: self.parameters[name]) is not None

    def tuples(self, strength: int) -> Iterator[tuple[Item, ...]]:
        """Every tuple of `strength` items of different parameters, also impossible ones; parameters with the most values first."""
        for names in combinations(sorted(self.parameters, key=lambda name: -len(self.parameters[name])), strength):
            for values in product(*(self.parameters[name] for name in names)):
                yield tuple(zip(names, values))


class _Missing:
    """The tuples that no row contains yet: for each set of strength - 1 items, one bit per item that completes a missing tuple."""

    def __init__(self, space: Space, strength: int):
        self.space, self.strength = space, strength
        items = [(name, value) for name, values in space.parameters.items() for value in values]
        self.bit = {item: 1 << n for n, item in enumerate(items)}
        everything = (1 << len(items)) - 1
        self.open: dict[frozenset[Item], int] = {}
        for key in combinations(items, strength - 1):
            names = {name for name, _ in key}
            if len(names) == len(key):
                same_parameters = sum(self.bit[name, value] for name in names for value in space.parameters[name])
                self.open[frozenset(key)] = everything & ~same_parameters

    def __contains__(self, items: Sequence[Item]) -> bool:
        return bool(self.open[frozenset(items[1:])] & self.bit[items[0]])

    def gain(self, item: Item, row: Row) -> int:
        """How many missing tuples an item completes with the items of a row. Each tuple is counted strength - 1 times."""
        chosen = list(row.items())
        bits = sum(self.bit[one] for one in chosen)
        return sum((self.open[frozenset((item, *some))] & bits).bit_count() for some in combinations(chosen, self.strength - 2))

    def count(self, row: Row) -> int:
        """How many missing tuples a row contains; each is counted `strength` times."""
        bits = sum(self.bit[one] for one in row.items())
        return sum((self.open[frozenset(key)] & bits).bit_count() for key in combinations(row.items(), self.strength - 1))

    def remove(self, row: Row) -> None:
        bits = sum(self.bit[one] for one in row.items())
        for key in combinations(row.items(), self.strength - 1):
            self.open[frozenset(key)] &= ~bits


def covering_array(space: Space, strength: int, *, given: Sequence[Row] = (), attempts: int = 8) -> list[Row]:
    """Rows that, with the given ones, cover every possible tuple of `strength` items. Each row is the best of `attempts`."""
    missing = _Missing(space, strength)
    for row in given:
        missing.remove(row)
    order = random.Random(strength)

    def ranked(name: str, row: Row) -> Sequence[str]:
        values = list(space.parameters[name])
        order.shuffle(values)  # otherwise the first value wins every tie
        return sorted(values, key=lambda value: -missing.gain((name, value), row))

    rows: list[Row] = []
    for items in space.tuples(strength):
        if items not in missing or not space.possible(items):
            continue
        tried = []
        for _ in range(attempts):
            names = list(space.parameters)
            order.shuffle(names)
            names.sort(key=lambda name: not space.rules[name])  # so that dead ends are found early
            made = space.complete(dict(items), names, ranked)
            assert made is not None, items
            tried.append(made)
        best = max(tried, key=missing.count)
        missing.remove(best)
        rows.append({name: best[name] for name in space.parameters})
    return rows
