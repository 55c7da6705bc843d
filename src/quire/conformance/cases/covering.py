"""Covering arrays: few rows such that every pair, or every triple, of parameter values occurs in one of them.

A row gives each parameter a value. A rule forbids a combination of some parameters. A tuple of values is covered if a row holds it,
and impossible if no allowed row can. Rows are made greedily: each starts with a tuple that is still missing, and every further
parameter takes the value that covers most of what is missing. The order of parameters comes from a generator with a fixed seed, so
the array is the same on every machine.
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
    """A combination of values that no row may have."""

    reason: str
    parameters: tuple[str, ...]
    holds: Callable[..., bool]
    """Takes the values of `parameters` in order; True where the combination is forbidden."""


class Space:
    """Parameters, their values, and what is forbidden among them."""

    def __init__(self, parameters: Mapping[str, Sequence[str]], forbidden: Sequence[Forbidden]):
        self.parameters = {name: tuple(values) for name, values in parameters.items()}
        self.rules: dict[str, list[tuple[tuple[str, ...], set[tuple[str, ...]]]]] = {name: [] for name in parameters}
        """For each parameter the rules about it: the parameters of a rule, and the values that it forbids."""
        for rule in forbidden:
            all_values = product(*(self.parameters[name] for name in rule.parameters))
            bad = {values for values in all_values if rule.holds(*values)}
            for name in rule.parameters:
                self.rules[name].append((rule.parameters, bad))

    def allows(self, row: Row, name: str) -> bool:
        """Whether no rule about this parameter forbids the row. A rule about a parameter that has no value yet is left out."""
        return not any(tuple(map(row.get, names)) in bad for names, bad in self.rules[name])

    def leaves_values(self, row: Row, name: str) -> bool:
        """Whether every parameter that shares a rule with this one has a value, or could be given one."""
        near = {one for names, _ in self.rules[name] for one in names if one not in row}
        return all(any(self.allows({**row, one: value}, one) for value in self.parameters[one]) for one in near)

    def complete(self, row: Row, order: Sequence[str], ranked: Callable[[str, Row], Sequence[str]]) -> Row | None:
        """The row with a value for every parameter in `order`: of those in `ranked`, the first that leaves one for all others."""
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
        """Whether an allowed row holds all these items."""
        row = dict(items)
        if not all(self.allows(row, name) and self.leaves_values(row, name) for name in row):
            return False
        # Parameters that share a rule with those given come first: that is where a dead end would be.
        near = [one for name in row for names, _ in self.rules[name] for one in names]
        limited = [*dict.fromkeys(near), *(name for name, rules in self.rules.items() if rules and name not in near)]
        return self.complete(row, limited, lambda name, row: self.parameters[name]) is not None

    def tuples(self, strength: int) -> Iterator[tuple[Item, ...]]:
        """Every tuple of that many items of different parameters, those with most values first; impossible ones too."""
        for names in combinations(sorted(self.parameters, key=lambda name: -len(self.parameters[name])), strength):
            for values in product(*(self.parameters[name] for name in names)):
                yield tuple(zip(names, values))


class _Missing:
    """The tuples that no row holds yet. For strength - 1 items, one bit for each item that makes a missing tuple with them."""

    def __init__(self, space: Space, strength: int):
        self.space, self.strength = space, strength
        items = [(name, value) for name, values in space.parameters.items() for value in values]
        self.bit = {item: 1 << n for n, item in enumerate(items)}
        everything = (1 << len(items)) - 1
        self.open: dict[frozenset[Item], int] = {}
        for key in combinations(items, strength - 1):
            names = {name for name, _ in key}
            if len(names) == len(key):
                beside = sum(self.bit[name, value] for name in names for value in space.parameters[name])
                self.open[frozenset(key)] = everything & ~beside

    def __contains__(self, items: Sequence[Item]) -> bool:
        return bool(self.open[frozenset(items[1:])] & self.bit[items[0]])

    def gain(self, item: Item, row: Row) -> int:
        """How many missing tuples an item makes with those of a row. A tuple is counted strength - 1 times: once for each item
        that is left out of the key."""
        chosen = list(row.items())
        bits = sum(self.bit[one] for one in chosen)
        return sum((self.open[frozenset((item, *some))] & bits).bit_count() for some in combinations(chosen, self.strength - 2))

    def count(self, row: Row) -> int:
        """How many missing tuples a row holds, each counted as often as it has items."""
        bits = sum(self.bit[one] for one in row.items())
        return sum((self.open[frozenset(key)] & bits).bit_count() for key in combinations(row.items(), self.strength - 1))

    def remove(self, row: Row) -> None:
        bits = sum(self.bit[one] for one in row.items())
        for key in combinations(row.items(), self.strength - 1):
            self.open[frozenset(key)] &= ~bits


def covering_array(space: Space, strength: int, *, given: Sequence[Row] = (), attempts: int = 8) -> list[Row]:
    """Rows that, with those given, cover every possible tuple of `strength` items. Of `attempts` rows the best is kept."""
    missing = _Missing(space, strength)
    for row in given:
        missing.remove(row)
    order = random.Random(strength)

    def ranked(name: str, row: Row) -> Sequence[str]:
        values = list(space.parameters[name])
        order.shuffle(values)  # or the first value would win every tie
        return sorted(values, key=lambda value: -missing.gain((name, value), row))

    rows: list[Row] = []
    for items in space.tuples(strength):
        if items not in missing or not space.possible(items):
            continue
        tried = []
        for _ in range(attempts):
            names = list(space.parameters)
            order.shuffle(names)
            names.sort(key=lambda name: not space.rules[name])  # a dead end is met early
            made = space.complete(dict(items), names, ranked)
            assert made is not None, items
            tried.append(made)
        best = max(tried, key=missing.count)
        missing.remove(best)
        rows.append({name: best[name] for name in space.parameters})
    return rows
